"""The Redis of a run: reachable, the password accepted, and set up so that it loses nothing."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import AuthenticationError, AuthorizationError

from services.standalone.connections import redis_client
from services.standalone.doctor.finding import Finding, Severity, ok, problem
from services.standalone.doctor.parts import SEE_LOGS, Port, port_at
from shared import redis_address, redis_checks
from shared.configuration import RedisSection
from shared.errors import ConfigurationError
from shared.keys import Keys

RULE = "redis.url leads to a Redis that keeps the books of the run"


@dataclass(frozen=True)
class RedisAnswer:
    """INFO, and what two clocks showed at once."""

    info: Mapping[str, Any]
    server_time_s: float
    local_time_s: float
    knows_run: bool
    """It has the run's ledger."""


@dataclass(frozen=True)
class RedisFacts:
    """`answer` is None if it does not answer, and `trouble` why; `is_refused` if address or password cannot be used."""

    address: str
    """Without its password."""
    port: Port
    answer: RedisAnswer | None
    trouble: str = ""
    is_refused: bool = False


def look(section: RedisSection, keys: Keys) -> RedisFacts:
    address, port = redis_address.masked(section.url), port_at(section.url)
    if port is Port.UNDECIDED:
        return RedisFacts(address, port, None)
    try:
        with redis_client(section.url) as client:
            return RedisFacts(address, port, _ask(client, keys))
    except (AuthenticationError, AuthorizationError, ConfigurationError) as error:
        return RedisFacts(address, port, None, redis_checks.reason(error), is_refused=True)
    except redis.RedisError as error:
        return RedisFacts(address, port, None, redis_checks.reason(error))


def check(facts: RedisFacts, *, require_aof: bool, is_run_up: bool) -> list[Finding]:
    """Its row, and one for each setting that is wrong."""
    if facts.answer is None:
        return [_check_silence(facts, is_run_up=is_run_up)]
    answer = facts.answer
    known = "has this run" if answer.knows_run else "has nothing of this run yet"
    found = f"{answer.info.get('redis_version')} at {facts.address}, {known}"
    findings = redis_checks.findings(
        answer.info, require_aof=require_aof, server_time_s=answer.server_time_s, local_time_s=answer.local_time_s
    )
    return [ok("redis", found, RULE), *map(_row, findings)]


def _check_silence(facts: RedisFacts, *, is_run_up: bool) -> Finding:
    found = f"{facts.address}: {facts.trouble}"
    if facts.is_refused:
        return problem("redis", found, RULE, f"correct redis.url, or its password in {redis_address.HOW_TO_GIVE}")
    if facts.port is Port.TAKEN:
        return problem("redis", f"something else listens at {found}", RULE, "stop it, or set redis.url to another address")
    if is_run_up:
        return problem("redis", f"does not answer at {found}, and the run is up", RULE, SEE_LOGS)
    if facts.port is Port.ELSEWHERE:
        return problem("redis", f"does not answer at {found}", RULE, "start it, or correct redis.url")
    words = "port chosen at start" if facts.port is Port.UNDECIDED else f"{facts.address} is free"
    return ok("redis", f"does not run yet, `headrace up` starts one; {words}", RULE)


def _row(finding: redis_checks.Finding) -> Finding:
    """Its sentence is rule and value, and the remedy after a semicolon."""
    rule, _, remedy = finding.sentence.partition("; ")
    return Finding("redis", Severity(finding.severity), "set up otherwise", rule, remedy)


def _ask(client: redis.Redis, keys: Keys) -> RedisAnswer:
    before_s = time.time()
    pipeline = client.pipeline(transaction=False)
    pipeline.info()
    pipeline.time()
    pipeline.exists(keys.ledger)
    info, (seconds, microseconds), is_known = pipeline.execute()
    return RedisAnswer(info, seconds + microseconds / 1e6, (before_s + time.time()) / 2, bool(is_known))
