"""Retries counted by what went wrong: one that passes does not spend what was meant for another."""

import asyncio
import random
from collections import Counter

import msgspec

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


class RetryBudget:
    """What is left of a struct whose fields are problems and whose values are numbers of retries."""

    def __init__(self, allowed: msgspec.Struct) -> None:
        self._left = Counter[str](msgspec.structs.asdict(allowed))
        self._wait_s = _FIRST_WAIT_S

    async def spend(self, problem: str) -> bool:
        """Waits before another try, longer each time; False at once if none is left for this problem."""
        if self._left[problem] == 0:
            return False
        self._left[problem] -= 1
        await asyncio.sleep(self._wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        return True
