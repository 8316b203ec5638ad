"""One run under virtual time: the product's rollout side and its trainer's decisions, around modelled engines and optimiser.

A run's life: Redis keys are fresh → RolloutLoop admits and plays → the trainer takes batches as `Lead` does, `train_s` later
publishes and acknowledges → after the last update the loop stops. Leases use Redis's own clock, so they are longer than any run.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import cast

import redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from benchmarks.asynchrony.ledger_seam import CountedRedis, Endings, WatchedLedger
from benchmarks.asynchrony.modelled_environment import SimulatedLoader, TokenRenderer, World
from benchmarks.asynchrony.modelled_trainer import LONG_S, ModelledTrainer, ignore
from benchmarks.asynchrony.outcome import Outcome
from benchmarks.asynchrony.system import System
from benchmarks.asynchrony.workloads import Workload
from services.env_agents.episode import EnvironmentAgent
from services.env_agents.episode_statistics import RunStatistics
from services.env_agents.generation import GenerationClient
from services.env_agents.group_filters import zero_variance
from services.env_agents.loading import EnvironmentLoader
from services.env_agents.metrics import AgentMetrics
from services.env_agents.registry import EnvironmentRegistry
from services.env_agents.rendering import ChatRenderer
from services.env_agents.rollout_loop import RolloutLoop, RolloutSettings
from services.env_agents.running_group import GroupRules
from shared.configuration import EnvAgentsSection
from shared.environment_spec import EnvironmentLimits, EnvironmentSpec, SamplingParameters
from shared.keys import Keys


async def simulate(
    system: System, workload: Workload, redis_url: str, *, num_updates: int, progress: Callable[[int], None] = ignore
) -> Outcome:
    """Runs `num_updates` updates. Call it under `virtual_time.run`."""
    began = time.monotonic()
    keys = Keys(f"bench-{uuid.uuid4().hex[:12]}")
    world = World(system, workload)
    with redis.Redis.from_url(redis_url) as sync_client:
        endings = Endings(sync_client, keys)
        trainer = ModelledTrainer(world, sync_client, keys, endings)
        async with _rolling_out(world, redis_url, keys, endings) as ledger:
            await trainer.run(num_updates, progress)
            world.is_over = True
            world.outcome.discarded = trainer.ledger.books().discarded
            _count_tokens(world, trainer, ledger)
        for key in sync_client.scan_iter(f"*{{{keys.run_id}}}*", count=1000):
            sync_client.delete(key)
    world.outcome.real_s = time.monotonic() - began
    return world.outcome


@contextlib.asynccontextmanager
async def _rolling_out(world: World, redis_url: str, keys: Keys, endings: Endings) -> AsyncIterator[WatchedLedger]:
    system = world.system
    connection = CountedRedis.from_url(redis_url, retry=Retry(NoBackoff(), 0), single_connection_client=True)
    async with connection as client:
        ledger = WatchedLedger(client, keys, world, endings)
        await ledger.load_scripts()
        await ledger.configure(
            async_generation_ratio=system.ratio, batch_groups=system.groups, redundant_groups=system.redundant_groups
        )
        registry = EnvironmentRegistry(client, keys, cast(EnvironmentLoader, SimulatedLoader(world)))
        await registry.declare(_spec())
        settings = RolloutSettings(
            run_id=keys.run_id,
            owner="simulated",
            groups=GroupRules(
                size=system.group_size,
                redundant_episodes=system.redundant_episodes,
                filters={"zero_variance": zero_variance} if world.workload.filtered_share else {},
            ),
            lease_s=EnvAgentsSection().lease_s,
            admission_poll_s=system.admission_poll_s,
            refresh_s=LONG_S,
            grace_s=0.0,
        )
        agent = EnvironmentAgent(cast(ChatRenderer, TokenRenderer()), cast(GenerationClient, world.fleet))
        statistics = RunStatistics(client, keys, process="simulated")
        loop = RolloutLoop(settings, ledger, registry, agent, AgentMetrics(), statistics)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(loop.run())
            try:
                yield ledger
            finally:
                loop.stop()
                await running


def _spec() -> EnvironmentSpec:
    limits = EnvironmentLimits(
        max_turns=10_000,
        max_tokens=10_000_000,
        reset_timeout_s=LONG_S,
        step_timeout_s=LONG_S,
        episode_timeout_s=LONG_S,
        max_concurrent_episodes=1_000_000,
    )
    return EnvironmentSpec(
        name="simulated",
        import_path="benchmarks.asynchrony.modelled_environment:SimulatedEnvironment",
        limits=limits,
        sampling=SamplingParameters(max_new_tokens=32_768),
    )


def _count_tokens(world: World, trainer: ModelledTrainer, ledger: WatchedLedger) -> None:
    """What became of every sampled token: trained, wasted, or still on its way at the end."""
    kept = {*trainer.ledger.live_groups().ids, *trainer.trained_group_ids}
    outcome = world.outcome
    for session, work in world.fleet.work_by_session.items():
        group_id = ledger.group_by_trajectory.get(session)
        outcome.tokens_generated += work.num_tokens
        is_cancelled = group_id is None and (work.task, work.occurrence) in world.closed
        if is_cancelled or (group_id is not None and group_id not in kept):
            outcome.tokens_wasted += work.num_tokens
    slots = world.system.gpus * world.system.slots
    outcome.busy_share = outcome.tokens_generated * world.system.token_s / (slots * outcome.published_s[-1])
