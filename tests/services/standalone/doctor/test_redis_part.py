import msgspec
import pytest

from services.standalone.doctor import redis_part
from services.standalone.doctor.finding import Severity
from services.standalone.doctor.parts import Port
from services.standalone.doctor.redis_part import RedisAnswer, RedisFacts
from shared.configuration import RedisSection
from shared.keys import Keys

URL = "redis://127.0.0.1:6379/0"
INFO = {"redis_version": "7.2.4", "aof_enabled": 1, "role": "master"}


def rows(facts: RedisFacts, *, require_aof: bool = True, is_run_up: bool = False):
    return redis_part.check(facts, require_aof=require_aof, is_run_up=is_run_up)


def answering(*, clock_ahead_s: float = 0.0, knows_run: bool = True, **info) -> RedisFacts:
    return RedisFacts(URL, Port.TAKEN, RedisAnswer({**INFO, **info}, 1000.0 + clock_ahead_s, 1000.0, knows_run))


def silent(port: Port, *, trouble: str = "refused", is_refused: bool = False) -> RedisFacts:
    return RedisFacts(URL, port, None, trouble, is_refused)


def test_redis_that_is_set_up_for_a_run_is_one_row():
    (row,) = rows(answering())
    assert (row.severity, row.found) == (Severity.OK, f"7.2.4 at {URL}, has this run")


def test_redis_without_this_run_says_so():
    assert "has nothing of this run yet" in rows(answering(knows_run=False))[0].found


@pytest.mark.parametrize(
    ("facts", "severity", "remedy"),
    [
        (answering(redis_version="6.0.9"), Severity.PROBLEM, "install a newer Redis or Valkey"),
        (answering(aof_enabled=0), Severity.PROBLEM, "start it with --appendonly yes"),
        (answering(maxmemory=1, maxmemory_policy="allkeys-lru"), Severity.PROBLEM, "run CONFIG SET maxmemory-policy noeviction"),
        (answering(clock_ahead_s=60), Severity.WARNING, "synchronise both by NTP"),
    ],
)
def test_what_could_lose_the_books_is_a_row_with_its_remedy(facts, severity, remedy):
    _, row = rows(facts)
    assert row.severity is severity
    assert row.remedy.startswith(remedy)
    assert ";" not in row.rule


def test_append_only_file_may_be_waived():
    assert len(rows(answering(aof_enabled=0), require_aof=False)) == 1


@pytest.mark.parametrize(
    ("facts", "is_run_up", "severity", "words"),
    [
        (silent(Port.FREE), False, Severity.OK, "`headrace up` starts one"),
        (silent(Port.UNDECIDED), False, Severity.OK, "port chosen at start"),
        (silent(Port.FREE), True, Severity.PROBLEM, "and the run is up"),
        (silent(Port.TAKEN), False, Severity.PROBLEM, "something else listens at"),
        (silent(Port.ELSEWHERE), False, Severity.PROBLEM, "does not answer at"),
        (silent(Port.TAKEN, trouble="invalid password", is_refused=True), True, Severity.PROBLEM, "invalid password"),
    ],
)
def test_silence_is_judged_by_whose_address_it_is(facts, is_run_up, severity, words):
    (row,) = rows(facts, is_run_up=is_run_up)
    assert row.severity is severity
    assert words in row.found


def test_real_redis_is_looked_at(redis_url, redis_client, keys):
    section = RedisSection(redis_url)
    assert not redis_part.look(section, keys).answer.knows_run
    redis_client.hset(keys.ledger, "version", 0)
    found = redis_part.look(section, keys)
    assert found.answer.knows_run
    assert [row.severity for row in rows(found)] == [Severity.OK]


def test_password_that_is_missing_or_wrong_is_told_without_it(serve_redis, monkeypatch):
    monkeypatch.delenv("HEADRACE_REDIS_PASSWORD", raising=False)
    section = RedisSection(serve_redis("--requirepass", "right", password="right"))
    for given in (None, "wr0ng"):
        if given:
            monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", given)
        (row,) = rows(redis_part.look(section, Keys("x")))
        assert row.severity is Severity.PROBLEM
        assert "HEADRACE_REDIS_PASSWORD" in row.remedy
        assert "wr0ng" not in msgspec.json.encode(row).decode()
