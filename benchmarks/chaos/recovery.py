"""What counts as recovered, and how long it took. Pure.

| kind    | the run goes on when                                                  | who stands in meanwhile        |
| ------- | --------------------------------------------------------------------- | ------------------------------ |
| engine  | the calls it had are answered, by it or by another engine              | the other engine, if it works  |
| hub     | a generate call is answered again                                     | nobody; calls wait             |
| agent   | nobody waits for its groups: it renews them, or another process has them | the other process, if it works |
| redis   | a finished episode is recorded again                                  | nobody; episodes wait          |
| trainer | the next version is published                                         | nobody; generation goes on     |

The recovery is the time from the blow to then. Where nobody stands in, two stretches are told apart from it: the time in which a
part that was stopped stands still, which is the fault's own length, and the time in which a killed part's process starts
(interpreter, imports, model), which is the software's and the machine's.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chaos.schedule import Action

Interval = tuple[float, float]

NEEDS: Mapping[str, tuple[str, ...]] = {
    "engine": ("engine", "hub"),
    "hub": ("hub", "engine"),
    "agent": ("agent", "redis"),
    "redis": ("redis", "hub", "engine", "agent"),
    "trainer": ("trainer", "redis", "hub", "engine", "agent"),
}
"""Kind → the kinds without which the run cannot go on in its regard: of a pair, only these excuse it."""


@dataclass(frozen=True)
class Recovery:
    """Of one blow."""

    kind: str
    action: Action
    part: str
    total_s: float
    """From the blow until the run goes on."""
    start_up_s: float
    """Of these, in which processes that nobody stands in for were starting."""
    standing_s: float
    """Of these, in which such processes stood still."""

    @property
    def recovery_s(self) -> float:
        return self.total_s - self.start_up_s - self.standing_s


def covered_s(window: Interval, intervals: Iterable[Interval]) -> float:
    """Seconds of `window` that lie in at least one of the intervals."""
    begin, end = window
    clipped = sorted((max(begin, first), min(end, last)) for first, last in intervals)
    covered, reached = 0.0, begin
    for first, last in clipped:
        covered += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return covered


def recovery(
    kind: str,
    action: Action,
    part: str,
    *,
    blow_at: float,
    goes_on_at: float,
    starting: Sequence[Interval],
    standing: Sequence[Interval],
) -> Recovery:
    """Args: starting, standing: of every part that was hit in the same fault, is needed, and that nobody stands in for. A moment in
    which one stands still and another starts counts as standing still.
    """
    window = (blow_at, goes_on_at)
    standing_s = covered_s(window, standing)
    either_s = covered_s(window, [*standing, *starting])
    return Recovery(kind, action, part, goes_on_at - blow_at, start_up_s=either_s - standing_s, standing_s=standing_s)


def table(recoveries: Sequence[Recovery]) -> list[tuple[str, ...]]:
    """Rows of kind, count, recovery median and max, and the medians of what is told apart."""
    rows = [("fault", "times", "recovery median", "max", "start-up median", "total max")]
    for key in sorted({(one.kind, one.action) for one in recoveries}):
        found = [one for one in recoveries if (one.kind, one.action) == key]
        rows.append(
            (
                f"{key[1]} {key[0]}",
                str(len(found)),
                _seconds(statistics.median(one.recovery_s for one in found)),
                _seconds(max(one.recovery_s for one in found)),
                _seconds(statistics.median(one.start_up_s for one in found)),
                _seconds(max(one.total_s for one in found)),
            )
        )
    return rows


def _seconds(value: float) -> str:
    return f"{value:.1f} s"
