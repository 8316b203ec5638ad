"""What a check comes to."""

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It may be in the way, or be so on purpose."""
    PROBLEM = "problem"
    """The run cannot run like this."""


class Finding(msgspec.Struct, frozen=True):
    """One row: what was found, the rule it is held against, and what to do; "" where there is nothing to do."""

    check: str
    severity: Severity
    found: str
    rule: str
    remedy: str = ""


def ok(check: str, found: str, rule: str) -> Finding:
    return Finding(check, Severity.OK, found, rule)


def warning(check: str, found: str, rule: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, found, rule, remedy)


def problem(check: str, found: str, rule: str, remedy: str) -> Finding:
    return Finding(check, Severity.PROBLEM, found, rule, remedy)
