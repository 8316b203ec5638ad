"""Engines at the transport seam: what answers a generate call, how long it takes, and which versions its tokens carry.

A GPU samples for `slots` sequences at once, each at one token every `token_s` (decoding is bound by memory bandwidth), and queues
the rest in order. New weights take effect on all GPUs at once, in the middle of sequences too, as the hub's pause does.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from services.env_agents.generation import Generation
from services.inference_hub.routing import choose
from services.inference_hub.sessions import Sessions
from shared.environment_spec import SamplingParameters
from shared.versions import VersionSpan

RECORDED_TOKENS = 32
"""Of a turn, in its record: seconds come from the plan's tokens, and records stay small."""
_SAME_INSTANT_S = 1e-4


@dataclass
class Slots:
    """Places on one GPU, given in the order asked for; several at once to a gang."""

    id: str
    num_free: int
    outstanding_tokens: int = 0
    waiters: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    @contextlib.asynccontextmanager
    async def held(self, count: int = 1) -> AsyncIterator[None]:
        if self.waiters or self.num_free < count:
            waiter = asyncio.get_running_loop().create_future()
            self.waiters.append((count, waiter))
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.cancelled():
                    with contextlib.suppress(ValueError):  # Passed over already, because it was cancelled.
                        self.waiters.remove((count, waiter))
                    self.give_back(0)
                else:
                    self.give_back(count)
                raise
        else:
            self.num_free -= count
        try:
            yield
        finally:
            self.give_back(count)

    def give_back(self, count: int) -> None:
        self.num_free += count
        while self.waiters and self.waiters[0][0] <= self.num_free:
            wanted, waiter = self.waiters.popleft()
            if not waiter.done():
                self.num_free -= wanted
                waiter.set_result(None)


class LockStep:
    """A barrier that opens when everyone inside has arrived; whoever leaves is no longer waited for."""

    def __init__(self) -> None:
        self.num_inside = 0
        self._arrived: list[asyncio.Future[None]] = []

    def enter(self) -> None:
        self.num_inside += 1

    def leave(self) -> None:
        self.num_inside -= 1
        self._open_if_complete()

    async def arrive(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._arrived.append(future)
        # Those who start at the same instant are to be inside before anyone is counted.
        asyncio.get_running_loop().call_later(_SAME_INSTANT_S, self._open_if_complete)
        try:
            await future
        finally:
            if future in self._arrived:
                self._arrived.remove(future)

    def _open_if_complete(self) -> None:
        if self._arrived and len(self._arrived) >= self.num_inside:
            arrived, self._arrived = self._arrived, []
            for future in arrived:
                if not future.done():
                    future.set_result(None)


@dataclass
class Work:
    """What an episode asked of the engines."""

    task: int
    occurrence: int
    num_turns: int = 0
    num_tokens: float = 0.0
    """Sampled, those of an aborted turn included."""


class EngineFleet:
    """A GenerationClient whose hub routes as the real one does and whose GPUs are a model.

    A prompt's first two token ids name its task and occurrence (stack.py's renderer writes them).
    """

    def __init__(
        self,
        tokens_of: Callable[[int, int, int], int],
        *,
        gpus: int,
        slots: int,
        token_s: float,
        gang_size: int,
        lock_step: LockStep | None,
    ) -> None:
        """Args: tokens_of: task, occurrence and turn → tokens. gang_size: G if a group is one n=G call on one GPU, 1 if not."""
        self._tokens_of = tokens_of
        self._gpus = [Slots(f"gpu{index}", slots) for index in range(gpus)]
        self._sessions = Sessions()
        self._token_s = token_s
        self._gang_size = gang_size
        self._gangs: dict[tuple[int, int], _Gang] = {}
        self._lock_step = lock_step
        self.version = 0
        self._version_times: list[tuple[float, int]] = []
        self.work_by_session: dict[str, Work] = {}

    def publish(self, version: int) -> None:
        """New weights are in force from now on."""
        self.version = version
        self._version_times.append((asyncio.get_running_loop().time(), version))

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParameters,
        max_new_tokens: int,
        is_greedy: bool,
        session_id: str,
        deadline: float,
        environment: str = "",
        is_validation: bool = False,
    ) -> Generation:
        """One turn. The rest of the arguments is what the real client takes."""
        work = self.work_by_session.setdefault(session_id, Work(token_ids[0], token_ids[1]))
        num_tokens = self._tokens_of(work.task, work.occurrence, work.num_turns)
        work.num_turns += 1
        if self._lock_step:
            await self._lock_step.arrive()
        cost = len(token_ids) + max_new_tokens
        if self._gang_size > 1:
            return await self._generate_in_gang(work, num_tokens, cost)
        gpu = choose(self._gpus, preferred_id=self._sessions.engine_id(session_id), cost_tokens=cost)
        self._sessions.remember(session_id, gpu.id)
        gpu.outstanding_tokens += cost
        try:
            async with gpu.held():
                return await self._sample(work, num_tokens)
        finally:
            gpu.outstanding_tokens -= cost

    def end_session(self, session_id: str) -> None:
        """Places here do not depend on caches."""

    async def _generate_in_gang(self, work: Work, num_tokens: int, cost: int) -> Generation:
        """The group's siblings share one call: it begins when G places are free on its GPU, and all return with the longest."""
        key = (work.task, work.occurrence // self._gang_size)
        gang = self._gangs.setdefault(key, _Gang(choose(self._gpus, preferred_id=None, cost_tokens=cost)))
        gang.gpu.outstanding_tokens += cost
        gang.num_members += 1
        try:
            if gang.num_members == 1:
                await asyncio.sleep(_SAME_INSTANT_S)
                gang.call = asyncio.create_task(self._call(gang))
                gang.is_called.set()
            gang.longest_s = max(gang.longest_s, num_tokens * self._token_s)
            await gang.is_called.wait()
            assert gang.call is not None
            began = await gang.call
            work.num_tokens += num_tokens
            return self._generation(began, began + num_tokens * self._token_s)
        finally:
            gang.gpu.outstanding_tokens -= cost

    async def _call(self, gang: "_Gang") -> float:
        async with gang.gpu.held(gang.num_members):
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(gang.longest_s)
            return began

    async def _sample(self, work: Work, num_tokens: int) -> Generation:
        clock = asyncio.get_running_loop()
        began = clock.time()
        try:
            await asyncio.sleep(num_tokens * self._token_s)
        except asyncio.CancelledError:
            work.num_tokens += (clock.time() - began) / self._token_s
            raise
        work.num_tokens += num_tokens
        return self._generation(began, clock.time())

    def _generation(self, began: float, ended: float) -> Generation:
        """Tokens are evenly spread over [began, ended); each carries the version in force when it was sampled."""
        version, start, spans = 0, 0, []
        for at, next_version in self._version_times:
            if at > began:
                if at >= ended:
                    break
                position = min(RECORDED_TOKENS - 1, max(1, round(RECORDED_TOKENS * (at - began) / (ended - began))))
                if position > start:
                    spans.append(VersionSpan(start, position, version))
                    start = position
            version = next_version
        spans.append(VersionSpan(start, RECORDED_TOKENS, version))
        return Generation([0] * RECORDED_TOKENS, [0.0] * RECORDED_TOKENS, spans, is_cut=False)


@dataclass
class _Gang:
    gpu: Slots
    num_members: int = 0
    longest_s: float = 0.0
    call: asyncio.Task[float] | None = None
    is_called: asyncio.Event = field(default_factory=asyncio.Event)
