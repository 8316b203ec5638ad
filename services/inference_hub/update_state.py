"""One weight update as a state machine, without time or network of its own.

    PREPARING ──► PAUSED ──► LOADING ──► COMMITTED
        │            │         │ ▲
        └────────────┴────┬────┘ └─ each bucket
                          ▼
                        FAILED

The coordinator is idle when there is no update or the last one has ended. Every state but the last two has a deadline, so that a
trainer that died cannot leave the engines paused.
"""

from enum import StrEnum
from typing import Final

from shared.errors import WeightUpdateError


class UpdateState(StrEnum):
    PREPARING = "preparing"
    """New calls are held; engines are being paused and asked to expect weights."""
    PAUSED = "paused"
    """No engine generates; none of the new weights was sent."""
    LOADING = "loading"
    """At least one bucket was sent, so engines may hold part of a set."""
    COMMITTED = "committed"
    FAILED = "failed"


TRANSITIONS: Final = {
    UpdateState.PREPARING: {UpdateState.PAUSED, UpdateState.FAILED},
    UpdateState.PAUSED: {UpdateState.LOADING, UpdateState.FAILED},
    UpdateState.LOADING: {UpdateState.LOADING, UpdateState.COMMITTED, UpdateState.FAILED},
    UpdateState.COMMITTED: frozenset[UpdateState](),
    UpdateState.FAILED: frozenset[UpdateState](),
}


class UpdateProgress:
    """The state of one update and its deadline. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(self, update_id: str, *, timeout_s: float, now: float) -> None:
        self.update_id = update_id
        self.state = UpdateState.PREPARING
        self.was_loading = False
        """Engines may hold part of the set."""
        self.is_set_complete = False
        """The last bucket has been loaded."""
        self.failure: str | None = None
        self._timeout_s = timeout_s
        self._deadline = now + timeout_s

    @property
    def is_over(self) -> bool:
        return self.state in (UpdateState.COMMITTED, UpdateState.FAILED)

    def remaining_s(self, now: float) -> float:
        """Seconds until the state's deadline; negative if it has passed."""
        return self._deadline - now

    def check(self, state: UpdateState) -> None:
        """Raises: WeightUpdateError if the update may not move on to `state` now."""
        if state is UpdateState.COMMITTED and not self.is_over and not self.is_set_complete:
            raise WeightUpdateError(
                f"weight update {self.update_id} can be committed after its last bucket, and none with is_last was loaded; "
                "send the rest of the weights"
            )
        if state not in TRANSITIONS[self.state]:
            because = f" because {self.failure}" if self.failure else ""
            raise WeightUpdateError(
                f"weight update {self.update_id} cannot become {state}: it is {self.state}{because}; start a new one with "
                "POST /weight_updates"
            )

    def advance(self, state: UpdateState, *, now: float) -> None:
        """Moves on and starts the new state's deadline. Raises: WeightUpdateError if the state does not allow it."""
        self.check(state)
        self.state = state
        self.was_loading = self.was_loading or state is UpdateState.LOADING
        self.renew(now=now)

    def renew(self, *, now: float) -> None:
        """Starts the state's deadline again: something happened."""
        self._deadline = now + self._timeout_s

    def fail(self, reason: str, *, now: float) -> bool:
        """Ends the update without effect if it is over already. Returns whether this ended it."""
        if self.is_over:
            return False
        self.advance(UpdateState.FAILED, now=now)
        self.failure = reason
        return True
