"""Whether an engine that has calls still works on them. Pure.

Signs of it are an answer, and another step of its scheduler: SGLang stamps what `/v1/loads` says with the time of the scheduler's
last step, and its HTTP process answers that from shared memory, so also while the scheduler hangs. Each chunk of a prefill is a
step, so a long one shows progress.
"""


class Progress:
    """The silence of one engine, looked at now and then."""

    def __init__(self) -> None:
        self._silent_since = 0.0
        self._busy_period: int | None = None
        self._step = 0.0

    def silent_s(self, now: float, *, busy_period: int | None, has_answered: bool, step: float) -> float:
        """Seconds since a look found the last sign; 0 for an engine that never told its steps, about which nothing can be said.

        Args: busy_period: which of its times with calls this is; None while it has none, or may not work on them. has_answered:
        since the last look. step: the time stamp of its scheduler's last step; 0 if it did not say.
        """
        has_stepped = step not in (0, self._step)
        is_same_period = busy_period is not None and busy_period == self._busy_period
        self._step = step or self._step
        self._busy_period = busy_period
        if has_answered or has_stepped or not is_same_period or not self._step:
            self._silent_since = now
        return now - self._silent_since
