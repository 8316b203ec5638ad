"""The trainer of a simulated run: the product's choice of batches, and seconds in place of the optimiser."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import redis

from benchmarks.asynchrony.ledger_seam import Endings
from benchmarks.asynchrony.modelled_environment import World
from shared import versions
from shared.configuration import RolloutSection
from shared.keys import Keys
from shared.ledger import DiscardReason, TrainingLedger
from shared.stream import Delivery, TrajectoryConsumer
from trainer.assembly import Selection
from trainer.rollouts import RolloutReader

LONG_S = 1e7
"""Longer than any run."""


class DrainingConsumer(TrajectoryConsumer):
    """Never blocks: the modelled trainer waits in virtual time, between readings."""

    is_drained = False

    def read(self, *, block_ms: int) -> list[Delivery]:
        deliveries = list(self._decoded(self._read(">", block_ms=None)))
        self.is_drained = not deliveries
        return deliveries


class ModelledTrainer:
    """`TrainingLoop` with the optimiser's seconds modelled: batch → train → push → publish → acknowledge."""

    def __init__(self, world: World, client: redis.Redis, keys: Keys, endings: Endings) -> None:
        self._world = world
        self._endings = endings
        self._system = world.system
        rollout = RolloutSection(
            rollout_batch_size=self._system.groups,
            num_return_sequences_in_group=self._system.group_size,
            async_generation_ratio=self._system.ratio,
            on_stale=cast(Any, self._system.on_stale),
            redundant_groups=self._system.redundant_groups,
            redundant_episodes=self._system.redundant_episodes,
            max_filtered_groups=1_000_000,
            stale_wait_s=LONG_S,
        )
        self._client = client
        self._keys = keys
        self.ledger = TrainingLedger(client, keys)
        self.ledger.create_consumer_group()
        self._consumer = DrainingConsumer(client, keys, self.ledger)
        self._reader = RolloutReader(self._consumer, self.ledger, rollout, timeout_s=LONG_S)
        self.trained_group_ids: set[str] = set()

    async def run(self, num_updates: int, progress: Callable[[int], None]) -> None:
        clock, outcome = asyncio.get_running_loop(), self._world.outcome
        for version in range(num_updates):
            began = clock.time()
            selection = await self._next_batch(version)
            groups = selection.batch
            self._endings.receive()
            outcome.wait_s.append(clock.time() - began)
            samples = sum(len(group.trainable) for group in groups)
            await asyncio.sleep(samples * self._system.train_s / self._system.training_gpus)
            group_ids = [group.group_id for group in groups]
            self._world.fleet.publish(version + 1)
            self.ledger.publish(version + 1, group_ids)
            self.ledger.acknowledge(version + 1)
            self._note(selection, version)
            outcome.published_s.append(clock.time())
            outcome.trained_samples.append(samples)
            self._reader.give_up_stale(version + 1)
            if self._system.aborts_at_version:
                self._discard_live(admitted_before=version + 1 - self._system.ratio, requeue=False)
            self._endings.receive()
            progress(version + 1)

    async def _next_batch(self, version: int) -> Selection:
        while True:
            self._world.something_new.clear()
            if not (self._system.is_batch and self._world.num_open):
                self._consumer.is_drained = False
                selection = self._reader.next_batch(version, progress=ignore, is_stopped=lambda: self._consumer.is_drained)
                if selection:
                    return selection
                self._endings.receive()
            await self._world.something_new.wait()
            if self._system.is_batch:
                await asyncio.sleep(1e-3)  # Environments close after their last record's siblings wake this.

    def _note(self, selection: Selection, version: int) -> None:
        outcome = self._world.outcome
        for group in selection.batch:
            self.trained_group_ids.add(group.group_id)
            for episode in group.episodes:
                oldest_trained = max(selection.oldest_version, episode.oldest_version or 0)
                outcome.max_lag = max(outcome.max_lag, versions.lag(version, oldest_trained))
                work = self._world.fleet.work_by_session[episode.trajectory_id]
                outcome.trained.append((work.task, work.occurrence))
                kept = episode.num_sampled_since(selection.oldest_version) / episode.num_sampled_since(0)
                outcome.tokens_wasted += (1 - kept) * work.num_tokens

    def _discard_live(self, *, admitted_before: float, requeue: bool) -> None:
        """Gives up every group, ready or running, that was admitted before a version."""
        live = self.ledger.live_groups()
        records = [*(group.record for group in live.ready), *live.running]
        old = [record.group_id for record in records if record.admitted_version < admitted_before]
        if old:
            self.ledger.discard(old, DiscardReason.STALE, requeue=requeue)


def ignore(*_: int) -> None:
    """Progress that nobody watches."""
