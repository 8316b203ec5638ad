"""The demo's calculator, answering as slowly as a web shop or a test suite does."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from examples.calculator import Calculator
from services.env_agents.environment import Message, RequestedCall, Task


class WaitingCalculator(Calculator):
    """Every tool call and every score waits for exp N(ln median_s, sigma) seconds."""

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, median_s: float, sigma: float, seed: int) -> None:
        self._median_s = median_s
        self._sigma = sigma
        self._seed = seed

    async def reset(self, task: Task) -> list[Message]:
        self._rng = np.random.default_rng([self._seed, task.seed, next(self._numbers)])
        return await super().reset(task)

    async def call_tool(self, call: RequestedCall) -> str:
        await self._wait()
        return await super().call_tool(call)

    async def score(self, answer: str) -> float:
        await self._wait()
        return await super().score(answer)

    async def _wait(self) -> None:
        await asyncio.sleep(self._median_s * float(np.exp(self._rng.normal(0.0, self._sigma))))
