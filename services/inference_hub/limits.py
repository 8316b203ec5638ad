"""How many calls an engine gets at once: more while it runs all that it has, fewer when it shows that it cannot. Pure.

AIMD, as TCP's congestion window (Chiu and Jain 1989): what an engine can run depends on how long its calls turn out to be.
"""

import msgspec

FIRST_LIMIT = 256
"""For an engine that does not say how many requests it runs at once."""
BACK_OFF = 0.8
NO_GROWTH_USAGE = 0.9


class EngineLoad(msgspec.Struct, frozen=True):
    """What SGLang's `/v1/loads` says about one scheduler."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    max_running_requests: int = 0
    token_usage: float = 0.0
    """Share of the KV cache that running requests hold."""
    timestamp: float = 0.0
    """Of the scheduler's last step, in seconds of the engine's clock; 0 if it does not say."""


class CallLimit:
    """The number of calls one engine gets at once, at least 1."""

    def __init__(self) -> None:
        self._limit = float(FIRST_LIMIT)
        self._ceiling: int | None = None
        self._can_grow = True
        self._was_queueing = False
        self.round = 0
        """Counts the times it fell: what a call that began before says about the engine is known already."""

    @property
    def value(self) -> int:
        return int(self._limit)

    def answered(self, *, began_in_round: int, num_retractions: int, was_full: bool) -> None:
        """A call was answered. `num_retractions`: how often the engine took its KV cache away for another's sake."""
        if began_in_round != self.round:
            return
        if num_retractions:
            self._fall(self._limit * BACK_OFF)
        elif was_full and self._can_grow:
            self._limit += 1 / self._limit
            if self._ceiling is not None:
                self._limit = min(self._limit, self._ceiling)

    def reported(self, load: EngineLoad) -> None:
        """The engine's own word: requests that wait in it are too many."""
        if load.max_running_requests and load.max_running_requests != self._ceiling:
            self._ceiling = load.max_running_requests
            self._limit = float(self._ceiling)
        self._can_grow = not load.num_waiting_reqs and load.token_usage < NO_GROWTH_USAGE
        if load.num_waiting_reqs and self._was_queueing:
            self._fall(min(self._limit, max(self._limit * BACK_OFF, load.num_running_reqs)))
        self._was_queueing = load.num_waiting_reqs > 0

    def _fall(self, limit: float) -> None:
        self._limit = max(1.0, limit)
        self.round += 1
