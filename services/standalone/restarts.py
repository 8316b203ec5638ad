"""Whether a process that ended unasked is started again, and when. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shared.run_arguments import BAD_INPUT

FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 30.0
MOST_DOUBLINGS: Final = math.ceil(math.log2(LONGEST_DELAY_S / FIRST_DELAY_S))
STEADY_S: Final = 10.0
"""A life that lasted so long starts the delays anew: it was not the start that failed."""
PROOF_S: Final = 60.0
"""A process that nobody can ask whether it is ready has worked if it lived so long."""


@dataclass(frozen=True)
class RestartPolicy:
    """At most `max_restarts` of one process within `window_s`."""

    max_restarts: int
    window_s: float


NO_RESTARTS: Final = RestartPolicy(max_restarts=0, window_s=1.0)


@dataclass(frozen=True)
class EndedLife:
    """One life of a process, from its start to its end."""

    is_first: bool
    status: int
    """As `Child.status`: negative for a signal; a launcher reports its child's as 128 plus the number."""
    lived_s: float
    was_ready: bool | None
    """None if nobody can ask it."""


def has_worked(life: EndedLife) -> bool:
    """Whether the first life shows that another may go well: a run that never worked ends at once, with what is wrong."""
    if life.was_ready is not None:
        return life.was_ready
    was_killed = life.status < 0 or life.status > 128
    return life.status != BAD_INPUT and (was_killed or life.lived_s >= PROOF_S)


def delay_s(life: EndedLife, short_lives: int, restarted_at: Sequence[float], policy: RestartPolicy, *, now: float) -> float | None:
    """Seconds until the process is started again, or None if it is not.

    Args: short_lives: in a row, this one included, that ended before `STEADY_S`. restarted_at: times of earlier restarts, on the
    clock of `now`.
    """
    if life.is_first and not has_worked(life):
        return None
    if sum(now - time < policy.window_s for time in restarted_at) >= policy.max_restarts:
        return None
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(MOST_DOUBLINGS, max(0, short_lives - 1)))
