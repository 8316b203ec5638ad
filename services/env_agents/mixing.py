"""Which environment the next group belongs to: each gets its share of the groups, evenly spread over time.

Smooth weighted round-robin: with every group an environment earns its share as credit, the richest of those that can start gets the
group and pays 1. Over any stretch its count is within a group or so of what it earned. Nothing is drawn by chance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_OWED_GROUPS: Final = 16.0
"""How much of its minimum share an environment without free places can be owed. What it misses beyond that is not made up for."""


@dataclass(frozen=True)
class Candidate:
    """An environment that takes part."""

    weight: float
    min_share: float = 0.0
    """Of all groups, 0 … 1."""
    can_start: bool = True
    """Whether it has places for another group; one that has none is owed its minimum share meanwhile, and nothing more."""


def next_environment(
    candidates: Mapping[str, Candidate], credit_by_name: Mapping[str, float]
) -> tuple[str, dict[str, float]] | None:
    """The environment furthest behind its share, and everyone's credit after its turn; None if none can start.

    Newcomers start at 0, so that one registered late does not catch up on the past; those without a share keep no credit.
    """
    sharing = {name: each for name, each in candidates.items() if each.weight > 0 or each.min_share > 0}
    ready = {name: each for name, each in sharing.items() if each.can_start}
    if not ready:
        return None
    credit = {name: credit_by_name.get(name, 0.0) for name in sharing}
    owed = {
        name: max(0.0, min(each.min_share, MAX_OWED_GROUPS - credit[name])) for name, each in sharing.items() if not each.can_start
    }
    owed = _scaled_to_at_most(owed, 1.0)
    earned = {**owed, **shares(ready, 1.0 - sum(owed.values()))}
    credit = {name: credit[name] + earned[name] for name in sharing}
    chosen = max(ready, key=credit.__getitem__)
    credit[chosen] -= 1.0
    return chosen, credit


def shares(candidates: Mapping[str, Candidate], total: float = 1.0) -> dict[str, float]:
    """How `total` is shared: by weight, but nobody below its minimum share for as long as those leave room for it.

    An environment that its weight would give less than its minimum gets the minimum, and the others share what is left by weight.
    """
    if not any(each.weight > 0 for each in candidates.values()):
        minimums = {name: each.min_share for name, each in candidates.items()}
        return {name: total * minimum / sum(minimums.values()) for name, minimum in minimums.items()}
    minimums = _scaled_to_at_most({name: each.min_share for name, each in candidates.items()}, total)
    at_minimum: dict[str, float] = {}
    while True:
        by_weight = {name: each.weight for name, each in candidates.items() if name not in at_minimum}
        left, weights = total - sum(at_minimum.values()), sum(by_weight.values())
        below = {name: minimums[name] for name, weight in by_weight.items() if weight * left < minimums[name] * weights}
        if not below or len(below) == len(by_weight):
            return {**at_minimum, **{name: left * weight / weights for name, weight in by_weight.items()}}
        at_minimum |= below


def _scaled_to_at_most(values: Mapping[str, float], total: float) -> dict[str, float]:
    factor = min(1.0, total / sum(values.values())) if any(values.values()) else 1.0
    return {name: factor * value for name, value in values.items()}
