"""Which environment the next group belongs to: each gets its share of the groups, evenly spread over time."""

from collections.abc import Mapping


def next_environment(weights: Mapping[str, float], credit_by_name: Mapping[str, float]) -> tuple[str, dict[str, float]] | None:
    """The environment furthest behind its share, and everyone's credit after its turn; None if no weight is positive.

    Smooth weighted round-robin: everyone earns weight / Σ weights, the richest is chosen and pays 1. Over any stretch of groups
    each environment's count is within one of its share for as long as the weights do not change. Newcomers start at 0, so that
    one registered late does not catch up on the past; those without weight keep no credit.
    """
    total = sum(weights.values())
    if total <= 0:
        return None
    earned = {name: credit_by_name.get(name, 0.0) + weight / total for name, weight in weights.items() if weight > 0}
    chosen = max(earned, key=earned.__getitem__)
    earned[chosen] -= 1.0
    return chosen, earned
