"""The training loop, and one update from batch to checkpoint.

A killed trainer loses nothing and trains nothing twice, because of this order: push → lineage → publish (the groups count as
trained) → checkpoint → acknowledge (their entries leave the stream). Killed before publish, the groups are ready again; killed
before the checkpoint, `restore` makes them ready again; killed before acknowledge, `restore` acknowledges them.
"""

import time

import msgspec

from shared.configuration import Configuration
from shared.stream import TrajectoryConsumer
from trainer import gathering, ranks
from trainer.batching import BatchPlan, entry_ids
from trainer.checkpoints import Checkpoints, RunState
from trainer.lead import Batch, Lead
from trainer.learner import Learner

_plan_decoder = msgspec.msgpack.Decoder(BatchPlan | None)


class TrainingLoop:
    """Every rank runs one, in step; the one of rank 0 has a `lead`."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        resumed: RunState | None,
        learner: Learner,
        consumer: TrajectoryConsumer,
        checkpoints: Checkpoints,
        lead: Lead | None,
    ) -> None:
        """Args: resumed: the checkpoint that `learner` holds, if any. consumer: fetches this rank's share."""
        self._configuration = configuration
        self._version = resumed.version if resumed else 0
        self._resumed_group_ids = resumed.group_ids if resumed else ()
        self._learner = learner
        self._consumer = consumer
        self._checkpoints = checkpoints
        self._lead = lead
        self._unsaved: list[str] = []
        """Groups trained since the last checkpoint; known to rank 0."""
        self._is_saved = True

    def run(self) -> None:
        """Updates until `num_updates` or until asked to stop; then a checkpoint, unless the last update has one."""
        if self._lead:
            self._lead.restore(self._version, self._resumed_group_ids)
            self._lead.push(self._learner.policy, self._version)
            self._lead.evaluate_if_due(self._version)
        else:
            gathering.follow(self._learner.policy)
        while self._version < self._configuration.trainer.num_updates:
            if not self._update():
                break
        if not self._is_saved:
            self._save()
        if self._lead:
            self._lead.summarise()
        if self._lead and self._version >= self._configuration.trainer.num_updates:
            self._lead.note(f"finished: all {self._version} updates are done; raise trainer.num_updates to go on")

    def _update(self) -> bool:
        """One update; False if there is none because training was asked to stop."""
        batch = self._lead.next_batch(self._version, ranks.count()) if self._lead else None
        plan = self._share_plan(batch)
        if plan is None:
            return False
        started = time.perf_counter()
        wanted = entry_ids(plan.shares[ranks.rank()])
        trajectories = dict(zip(wanted, self._consumer.fetch(wanted), strict=True))
        fetched = time.perf_counter()
        learned = self._learner.learn(plan, trajectories)
        trained = time.perf_counter()
        self._version += 1
        self._is_saved = False
        if self._lead and batch:
            pushed = self._lead.push(self._learner.policy, self._version)
            self._lead.publish(batch, learned, self._version)
            self._lead.log(batch, learned, pushed, fetch_s=fetched - started, train_s=trained - fetched)
            self._unsaved += batch.group_ids
        else:
            gathering.follow(self._learner.policy)
        if self._is_checkpoint_due():
            self._save()
        if self._lead:
            self._lead.evaluate_if_due(self._version)
        return True

    def _share_plan(self, batch: Batch | None) -> BatchPlan | None:
        """Rank 0's plan on every rank; None on all if rank 0 has no batch."""
        message = msgspec.msgpack.encode(batch.plan if batch else None)
        # While rank 0 waits for its batch, it may push the weights once more, and need this rank for it.
        while (received := ranks.from_rank_zero(message, self._learner.engine.device)) == gathering.GATHER:
            gathering.take_part(self._learner.policy)
        plan: BatchPlan | None = _plan_decoder.decode(received)
        return plan

    def _is_checkpoint_due(self) -> bool:
        trainer = self._configuration.trainer
        return self._version % trainer.checkpoint.every_updates == 0 or self._version == trainer.num_updates

    def _save(self) -> None:
        self._checkpoints.save(self._learner.engine, self._version, self._unsaved)
        self._unsaved = []
        self._is_saved = True
        if self._lead:
            self._lead.acknowledge(self._version)
            self._lead.note(f"checkpoint of version {self._version}")
