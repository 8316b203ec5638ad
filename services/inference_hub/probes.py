"""Finds out which engines are alive and what weights they hold: by their traffic first, by probes where there is none.

`/model_info` is the probe: SGLang's `/health` generates a token and therefore fails on an engine that a weight update paused.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from services.inference_hub.engine_client import EngineUnreachableError, ServerInfo
from services.inference_hub.engines import Engine, EngineRegistry
from services.inference_hub.limits import EngineLoad
from services.inference_hub.metrics import Metrics
from services.inference_hub.request_limits import RequestLimits
from services.inference_hub.usage import Limits
from shared.errors import EngineError

PROBE_TIMEOUT_S: Final = 5.0
VERIFY_TIMEOUT_S: Final = 15.0
MAX_FAILED_PROBES: Final = 3
"""Probes in a row that may run into their deadline: a machine under load answers late. A refused connection counts at once."""
ANY_VERSION: Final = "any"
SAYS_VOCABULARY: Final = frozenset({"0.5.23"})
"""Versions known to look at `token_ids_logprob` before they use it."""

_logger = logging.getLogger(__name__)


class Prober:
    """Verifies engines that join and watches each one until it is gone."""

    def __init__(
        self,
        registry: EngineRegistry,
        metrics: Metrics,
        *,
        interval_s: float,
        hang_timeout_s: float,
        engine_version: str,
        model_type: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: hang_timeout_s: an engine with calls that shows no progress for so long is lost. model_type: that every
        engine must serve; None: any. clock: seconds that never go back."""
        self._registry = registry
        self._metrics = metrics
        self._interval_s = interval_s
        self._hang_timeout_s = hang_timeout_s
        self._engine_version = engine_version
        self._model_type = model_type
        self._clock = clock

    async def watch(self, engine: Engine) -> None:
        """Probes `engine` at each interval, and at once when something woke it, until it is gone."""
        while not engine.is_gone:
            engine.wake.clear()
            await self.check(engine)
            try:
                async with asyncio.timeout(self._interval_s):
                    await engine.wake.wait()
            except TimeoutError:
                pass
        await engine.client.close()  # A probe that was under way when it went may have opened it again.

    async def check(self, engine: Engine) -> None:
        """One probe, if its traffic has not already shown that it is alive, and a look at whether that goes on."""
        has_answered, engine.has_answered = engine.has_answered, False
        load = EngineLoad()
        try:
            if not engine.is_verified:
                await self.verify(engine)
                load = await self._load(engine)
            elif engine.is_suspect or not has_answered:
                await self._probe(engine)
        except EngineError as error:
            await self._failed(engine, error)
        else:
            engine.num_failed_probes = 0
            engine.is_suspect = False
            if not engine.has_told_limits and engine in self._registry.routable:
                await self._ask_again(engine)
            self._registry.refresh()
            if engine.num_outstanding_calls:
                load = await self._load(engine)
        await self._look_for_a_hang(engine, load, has_answered=has_answered)

    async def _look_for_a_hang(self, engine: Engine, load: EngineLoad, *, has_answered: bool) -> None:
        may_work = engine.is_verified and not engine.is_updating and engine.num_outstanding_calls > 0
        now = self._clock()
        silent_s = engine.progress.silent_s(
            now, busy_period=engine.busy_period if may_work else None, has_answered=has_answered, step=load.timestamp
        )
        if silent_s < self._hang_timeout_s:
            return
        if await self._is_paused(engine):
            engine.progress.silent_s(now, busy_period=None, has_answered=False, step=0)
            return
        num_calls = engine.num_outstanding_calls
        _logger.warning("engine=%s hangs calls=%d silent_s=%.1f", engine.id, num_calls, silent_s)
        await self._registry.lose(
            engine,
            f"engine {engine.url} must make progress within {self._hang_timeout_s:g} s while it has calls "
            f"(inference_hub.hang_timeout_s), and made none with {num_calls}; restart it if it does not come back",
        )

    async def _is_paused(self, engine: Engine) -> bool:
        """Whether somebody else paused it, as an operator may."""
        try:
            return not await engine.client.is_ready(timeout_s=PROBE_TIMEOUT_S)
        except EngineError:
            return False

    async def verify(self, engine: Engine) -> None:
        """Learns what the engine is, and lets it generate if a hub that died left it paused.

        Raises: EngineError, also if it is of another version or cannot take weights.
        """
        server = await engine.client.server_info(timeout_s=VERIFY_TIMEOUT_S)
        if self._engine_version not in (ANY_VERSION, server.version):
            raise EngineError(
                f"engine {engine.url} must be SGLang {self._engine_version} (inference_hub.engine_version), got {server.version}; "
                f"install that version, or set inference_hub.engine_version={ANY_VERSION} to accept every one"
            )
        if server.dp_size != 1:
            raise EngineError(
                f"engine {engine.url} must have dp_size 1, because SGLang pushes weights to no other, got {server.dp_size}; "
                "start one engine for each replica"
            )
        info = await engine.client.model_info(timeout_s=PROBE_TIMEOUT_S)
        if self._model_type and info.model_type and info.model_type != self._model_type:
            raise EngineError(
                f"engine {engine.url} must serve the run's model (run.model_path), which is a {self._model_type}, got a "
                f"{info.model_type}; start it with that model"
            )
        can_generate = not engine.is_incomplete and not engine.is_updating
        if can_generate and not await engine.client.is_ready(timeout_s=PROBE_TIMEOUT_S):
            await engine.client.post("continue_generation", {}, timeout_s=PROBE_TIMEOUT_S)
        engine.tensor_parallel_size = server.tp_size
        engine.model_path = server.model_path
        engine.limits = Limits(server.max_running_calls, server.max_total_num_tokens)
        await self._learn_limits(engine, server, may_generate=can_generate)
        engine.is_overlapping = not server.disable_overlap_schedule
        engine.version = info.version
        engine.problem = None
        engine.is_suspect = False
        engine.is_verified = True
        _logger.info("engine=%s joined sglang=%s tensor_parallel_size=%d", engine.id, server.version, server.tp_size)

    async def _learn_limits(self, engine: Engine, server: ServerInfo, *, may_generate: bool) -> None:
        """As far as it says: what it does not say it has to refuse itself."""
        context_tokens = vocabulary = None
        engine.has_told_limits = False
        with suppress(EngineError):
            context_tokens = await engine.client.context_tokens(timeout_s=PROBE_TIMEOUT_S)
            if may_generate and server.version in SAYS_VOCABULARY:  # While it is paused it would wait with its refusal.
                vocabulary = await engine.client.vocabulary(timeout_s=PROBE_TIMEOUT_S)
            engine.has_told_limits = may_generate
        engine.request_limits = RequestLimits(server.max_req_input_len, context_tokens, vocabulary)

    async def _ask_again(self, engine: Engine) -> None:
        """For the limits of one that could not tell them all when it was verified, such as while it waited for weights."""
        with suppress(EngineError):
            server = await engine.client.server_info(timeout_s=VERIFY_TIMEOUT_S)
            await self._learn_limits(engine, server, may_generate=True)

    async def _load(self, engine: Engine) -> EngineLoad:
        """Its scheduler's own word, which corrects the hub's idea of what it can run. One that gives none is none the worse."""
        try:
            load = await engine.client.load(timeout_s=PROBE_TIMEOUT_S)
        except EngineError:
            return EngineLoad()
        engine.limit.reported(load)
        self._registry.on_change()
        return load

    async def _probe(self, engine: Engine) -> None:
        info = await engine.client.model_info(timeout_s=PROBE_TIMEOUT_S)
        # During an update the label changes before the set is complete; `put_in_force` says when it is.
        if not engine.is_updating:
            engine.version = info.version
        engine.problem = None

    async def _failed(self, engine: Engine, error: EngineError) -> None:
        if engine.problem != str(error):  # Once, rather than at every probe.
            _logger.warning("engine=%s problem: %s", engine.id, error)
        engine.problem = str(error)
        engine.num_failed_probes += 1
        self._metrics.probe_failures.inc()
        if not engine.is_verified:
            return
        if isinstance(error, EngineUnreachableError) or engine.num_failed_probes >= MAX_FAILED_PROBES:
            await self._registry.lose(engine, str(error))
