import logging
import re
from typing import Any

import pytest
import redis
import redis.asyncio

from shared.configuration import RedisSection
from shared.errors import ConfigurationError
from shared.redis_address import connection_url
from shared.redis_checks import findings, reason, require_usable, require_usable_async

SOUND = {
    "redis_version": "7.2.4",
    "role": "master",
    "aof_enabled": 1,
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
}
"""INFO of a Redis as a run needs it, of the fields that matter."""
PASSWORD = "s3cret/@"


def found(*, require_aof: bool = True, skew_s: float = 0.0, **different: Any) -> list[tuple[str, str]]:
    info = {**SOUND, **different}
    listed = findings(info, require_aof=require_aof, server_time_s=1_000.0 + skew_s, local_time_s=1_000.0)
    return [(finding.severity, finding.sentence) for finding in listed]


@pytest.mark.parametrize(
    "different", [{}, {"redis_version": "6.2.0"}, {"maxmemory_policy": "allkeys-lru"}, {"maxmemory": 2**30}, {"skew_s": -9.9}]
)
def test_a_redis_that_keeps_its_promises_gives_no_finding(different: dict[str, Any]) -> None:
    assert found(**different) == []


@pytest.mark.parametrize(
    ("different", "severity", "sentence"),
    [
        ({"redis_version": "6.0.16"}, "problem", "its version must be >= 6.2, got 6.0.16"),
        ({"aof_enabled": 0}, "problem", "its append-only file must be on.*got appendonly no.*redis.require_aof=false"),
        (
            {"maxmemory": 2**30, "maxmemory_policy": "allkeys-lru"},
            "problem",
            "its maxmemory-policy must be noeviction.*got allkeys-lru.*CONFIG SET",
        ),
        (
            {"role": "slave", "master_host": "10.0.0.2", "master_port": 6379},
            "problem",
            "must be a primary, got a replica of 10.0.0.2:6379; set redis.url",
        ),
        ({"skew_s": 12.0}, "warning", "its clock must be within 10 s of this machine's.*is 12 s ahead of it; synchronise"),
        ({"skew_s": -3600.0}, "warning", "is 3600 s behind it"),
    ],
)
def test_each_broken_promise_is_a_sentence_with_rule_value_and_remedy(
    different: dict[str, Any], severity: str, sentence: str
) -> None:
    [(found_severity, found_sentence)] = found(**different)
    assert found_severity == severity
    assert re.search(sentence, found_sentence)


def test_an_append_only_file_is_not_asked_for_where_the_run_does_without() -> None:
    assert found(aof_enabled=0, require_aof=False) == []


@pytest.fixture(scope="module")
def guarded_url(serve_redis) -> str:
    """A Redis that asks for `PASSWORD`, without an append-only file."""
    return serve_redis("--requirepass", PASSWORD, password=PASSWORD)


def check(section: RedisSection) -> None:
    with redis.Redis.from_url(connection_url(section.url)) as client:
        require_usable(client, section)


def test_a_real_redis_without_append_only_file_is_refused(guarded_url, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", PASSWORD)
    with pytest.raises(ConfigurationError, match="its append-only file must be on"):
        check(RedisSection(guarded_url))
    check(RedisSection(guarded_url, require_aof=False))


def test_a_missing_and_a_wrong_password_are_sentences_with_the_remedy(guarded_url, monkeypatch) -> None:
    with pytest.raises(ConfigurationError, match="must be given its password, and got none; set it in HEADRACE_REDIS_PASSWORD"):
        check(RedisSection(guarded_url))
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", "wr0ng")
    with pytest.raises(ConfigurationError, match=r"must accept the password it is given.*correct it in HEADRACE") as refusal:
        check(RedisSection(guarded_url))
    assert "wr0ng" not in str(refusal.value)


def test_a_paragraph_is_cut_to_its_first_sentence() -> None:
    protected = "DENIED Redis is running in protected mode. In this mode connections are only accepted from loopback. " * 5
    assert reason(redis.ConnectionError(protected)) == "DENIED Redis is running in protected mode"
    refused = "Error 111 connecting to 127.0.0.1:1. Connection refused."
    assert reason(redis.ConnectionError(refused)) == refused


def test_a_redis_that_is_not_there_is_a_sentence_without_the_password() -> None:
    with pytest.raises(ConfigurationError, match=r"redis.url must be a reachable Redis, got 'redis://:\*\*\*@127.0.0.1:1/0'"):
        check(RedisSection("redis://:s3cret@127.0.0.1:1/0"))


async def test_asynchronous_callers_are_told_the_same(redis_url, guarded_url, monkeypatch, caplog) -> None:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        monkeypatch.setattr("shared.redis_checks.MAX_CLOCK_SKEW_S", -1.0)
        with caplog.at_level(logging.WARNING):
            await require_usable_async(client, RedisSection(redis_url))
    assert "its clock must be within" in caplog.text
    async with redis.asyncio.Redis.from_url(guarded_url) as client:
        with pytest.raises(ConfigurationError, match="must be given its password"):
            await require_usable_async(client, RedisSection(guarded_url))
