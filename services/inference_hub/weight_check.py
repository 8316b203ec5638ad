"""Whether engines hold what the trainer sent: SGLang's checksum of each tensor against the trainer's own.

An engine's tensors have the names and the fused layout of its own model class; the trainer says what it expects by those names.
Only an engine of one rank holds whole tensors. Engines with several ranks are compared with each other.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from shared.decoding import UNDECODABLE
from shared.errors import EngineError

MAX_NAMED: Final = 8
"""Names that a sentence lists."""

Checksums = Mapping[str, str]
"""Tensor name → checksum."""


class RankChecksums(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class CheckReply(msgspec.Struct, frozen=True):
    """`POST /weights_checker {action: checksum}`."""

    ranks: tuple[RankChecksums, ...]


def parse_check(body: bytes, url: str) -> list[Checksums]:
    """The checksums of each rank. Raises: EngineError."""
    try:
        return [rank.checksums for rank in msgspec.json.decode(body, type=CheckReply).ranks]
    except UNDECODABLE as error:
        raise EngineError(f"engine {url} must answer /weights_checker with checksums, got something else: {error}") from error


def differing_names(expected: Checksums, found: Checksums) -> list[str]:
    """Every difference in names, as phrases, in order."""
    missing = [f"{name} is not in the engine" for name in sorted(expected.keys() - found.keys())]
    extra = [f"{name} is only in the engine" for name in sorted(found.keys() - expected.keys())]
    return missing + extra


def differing_values(expected: Checksums, found: Checksums) -> list[str]:
    """Tensors that both have, with another content."""
    return sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])


def listed(items: Sequence[str]) -> str:
    shown = "; ".join(items[:MAX_NAMED])
    return shown if len(items) <= MAX_NAMED else f"{shown}; and {len(items) - MAX_NAMED} more"


def mismatches(found_by_engine: Mapping[str, Sequence[Checksums]], expected: Checksums | None) -> dict[str, str]:
    """Engine id → what is wrong with its weights, for those where something is.

    Engines of one rank are compared with `expected`; the others with what most engines of as many ranks have.
    """
    problems = {}
    for engine_id, ranks in found_by_engine.items():
        if len(ranks) == 1 and expected is not None:
            wrong = differing_names(expected, ranks[0]) or differing_values(expected, ranks[0])
            if wrong:
                problems[engine_id] = f"{len(wrong)} tensors differ from the trainer's: {listed(wrong)}"
        elif not _is_as_most(ranks, found_by_engine.values()):
            problems[engine_id] = "its weights differ from those of most other engines"
    return problems


def _is_as_most(ranks: Sequence[Checksums], everyone: Iterable[Sequence[Checksums]]) -> bool:
    same_size = [tuple(_digest(rank) for rank in other) for other in everyone if len(other) == len(ranks)]
    most, _ = Counter(same_size).most_common(1)[0]
    return tuple(_digest(rank) for rank in ranks) == most


def _digest(checksums: Checksums) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(checksums.items()))
