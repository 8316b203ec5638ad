from pathlib import Path

import pytest
from redis.connection import parse_url

from shared import redis_address
from shared.errors import ConfigurationError
from shared.redis_address import connection_url, masked, without_password

SECRET = "s3cret/@:?#%"
ENCODED = "s3cret%2F%40%3A%3F%23%25"
GIVEN = {"HEADRACE_REDIS_PASSWORD": SECRET}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://control:6379/0", f"redis://:{ENCODED}@control:6379/0"),
        ("rediss://trainer@[::1]:6379/1?ssl_cert_reqs=none", f"rediss://trainer:{ENCODED}@[::1]:6379/1?ssl_cert_reqs=none"),
        ("unix:///run/redis.sock?db=2", f"unix://:{ENCODED}@/run/redis.sock?db=2"),
        (f"redis://:{ENCODED}@control", f"redis://:{ENCODED}@control"),
    ],
)
def test_the_password_of_the_environment_goes_into_the_url(url: str, expected: str) -> None:
    assert connection_url(url, GIVEN) == expected
    assert parse_url(expected)["password"] == SECRET


def test_without_a_password_the_url_stays_as_it_is() -> None:
    assert connection_url("redis://control:6379/0", {"HEADRACE_REDIS_PASSWORD": ""}) == "redis://control:6379/0"
    assert connection_url("redis://:own@control", {}) == "redis://:own@control"


def test_a_file_gives_the_password_without_its_last_line_end(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(f"{SECRET}\n")
    variables = {"HEADRACE_REDIS_PASSWORD_FILE": str(path)}
    assert redis_address.password("redis://control", variables) == SECRET
    assert redis_address.password("redis://control", {**variables, **GIVEN}) == SECRET


def test_two_different_passwords_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("0ther")
    with pytest.raises(ConfigurationError, match="must not give two values of the password of Redis") as refusal:
        connection_url("redis://control", {**GIVEN, "HEADRACE_REDIS_PASSWORD_FILE": str(path)})
    assert "s3cret" not in str(refusal.value)
    assert "0ther" not in str(refusal.value)
    with pytest.raises(ConfigurationError, match=r"must be given once, and redis.url \(redis://:\*\*\*@control\)"):
        connection_url("redis://:other@control", GIVEN)


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "cannot be read: No such file"), (b"\n", "is empty"), (b"\xff\xfe", "it is not text")]
)
def test_a_password_file_that_holds_none_is_refused(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"HEADRACE_REDIS_PASSWORD_FILE must name a file.* {sentence}"):
        connection_url("redis://control", {"HEADRACE_REDIS_PASSWORD_FILE": str(path)})


@pytest.mark.parametrize(
    "url", ["control:6379", "http://control", "redis://", "redis://control:port/0", "redis://:s3cret/@#x@control", "user:s3cret@h"]
)
def test_what_is_no_address_of_a_redis_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"redis\.url must look like redis://host:6379/0") as refusal:
        connection_url(url, {})
    assert "s3cret" not in str(refusal.value)


def test_a_password_in_the_query_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigurationError, match=r"no password in its query, got 'redis://control\?password=\*\*\*&db=1'"):
        connection_url("redis://control?password=s3cret&db=1", {})


@pytest.mark.parametrize(
    ("url", "shown", "written"),
    [
        ("redis://control:6379/0", "redis://control:6379/0", "redis://control:6379/0"),
        ("redis://user@control", "redis://user@control", "redis://user@control"),
        ("redis://user:s3cret@control:1/0", "redis://user:***@control:1/0", "redis://user@control:1/0"),
        ("unix://:s3cret@/run/redis.sock", "unix://:***@/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_shown_and_written_it_has_no_password(url: str, shown: str, written: str) -> None:
    assert masked(url) == shown
    assert without_password(url) == written


def test_option_that_cannot_be_read_is_a_sentence():
    with pytest.raises(
        ConfigurationError, match=r"redis\.url must have options that redis-py knows, got 'redis://h\?socket_timeout=abc'"
    ):
        connection_url("redis://h?socket_timeout=abc", {})
