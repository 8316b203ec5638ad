"""Finds out which engines are alive and what weights they hold: by their traffic first, by probes where there is none.

`/model_info` is the probe: SGLang's `/health` generates a token and therefore fails on an engine that a weight update paused.
"""

import asyncio
import logging
from typing import Final

from services.inference_hub.engine_client import EngineUnreachableError
from services.inference_hub.engines import Engine, EngineRegistry
from services.inference_hub.metrics import Metrics
from services.inference_hub.usage import Limits
from shared.errors import EngineError

PROBE_TIMEOUT_S: Final = 5.0
VERIFY_TIMEOUT_S: Final = 15.0
MAX_FAILED_PROBES: Final = 3
"""Probes in a row that may run into their deadline: a machine under load answers late. A refused connection counts at once."""
ANY_VERSION: Final = "any"

_logger = logging.getLogger(__name__)


class Prober:
    """Verifies engines that join and watches each one until it is gone."""

    def __init__(self, registry: EngineRegistry, metrics: Metrics, *, interval_s: float, engine_version: str) -> None:
        self._registry = registry
        self._metrics = metrics
        self._interval_s = interval_s
        self._engine_version = engine_version

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
        """One probe, if its traffic has not already shown that it is alive."""
        try:
            if not engine.is_verified:
                await self.verify(engine)
                await self._ask_load(engine)
            elif engine.is_suspect or not engine.has_answered:
                await self._probe(engine)
        except EngineError as error:
            await self._failed(engine, error)
        else:
            engine.has_answered = False
            engine.num_failed_probes = 0
            engine.is_suspect = False
            self._registry.refresh()
            if engine.num_outstanding_calls:
                await self._ask_load(engine)

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
        can_generate = not engine.is_incomplete and not engine.is_updating
        if can_generate and not await engine.client.is_ready(timeout_s=PROBE_TIMEOUT_S):
            await engine.client.post("continue_generation", {}, timeout_s=PROBE_TIMEOUT_S)
        engine.tensor_parallel_size = server.tp_size
        engine.model_path = server.model_path
        engine.limits = Limits(server.max_running_calls, server.max_total_num_tokens)
        engine.is_overlapping = not server.disable_overlap_schedule
        engine.version = info.version
        engine.problem = None
        engine.is_verified = True
        _logger.info("engine=%s joined sglang=%s tensor_parallel_size=%d", engine.id, server.version, server.tp_size)

    async def _ask_load(self, engine: Engine) -> None:
        """Corrects the hub's own idea of what the engine can run. One that does not say is none the worse for it."""
        try:
            load = await engine.client.load(timeout_s=PROBE_TIMEOUT_S)
        except EngineError:
            return
        engine.limit.reported(load)
        self._registry.on_change()

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
