"""The training loop, and one update from batch to checkpoint.

A killed trainer loses nothing and trains nothing twice, because of this order: push → lineage → publish (the groups count as
trained) → checkpoint → acknowledge (their entries leave the stream). Killed before publish, the groups are ready again; killed
before the checkpoint is durable, `restore` makes them ready again; killed before acknowledge, `restore` acknowledges them.

A checkpoint becomes durable while later updates go on; it is acknowledged at the next step boundary after that. One that could not
be written leaves its groups to the next, and training stops when that happens too often.
"""

import time
from collections.abc import Mapping

import msgspec

from shared.configuration import Configuration
from shared.errors import TrainingError
from shared.stream import TrajectoryConsumer
from trainer import gathering, ranks
from trainer.batching import BatchPlan, entry_ids
from trainer.checkpoints import Checkpoints, Component, LedgerState, RunState, SaveResult
from trainer.guards import SkippedUpdates
from trainer.lead import SKIPPED_FILE, Batch, Lead
from trainer.learner import Learned, Learner

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
        skipped_updates: SkippedUpdates,
        components: Mapping[str, Component],
        lead: Lead | None,
    ) -> None:
        """Args: resumed: the checkpoint that `learner` and `components` hold, if any. consumer: fetches this rank's share.
        components: what checkpoints keep besides, by name.
        """
        self._configuration = configuration
        self._resumed = resumed
        self._version = resumed.version if resumed else 0
        self._learner = learner
        self._consumer = consumer
        self._checkpoints = checkpoints
        self._lead = lead
        self._skipped_updates = skipped_updates
        self._components = components
        self._unsaved: list[str] = []
        """Groups trained since the last checkpoint, durable or under way; known to rank 0."""
        self._durable_version = self._version
        self._failed_saves = 0
        """In a row."""

    def run(self) -> None:
        """Updates until `num_updates` or until asked to stop; then a checkpoint, unless the last update has one."""
        if self._lead:
            self._lead.restore(self._resumed)
            self._lead.push(self._learner.policy, self._version)
            self._lead.evaluate_if_due(self._version)
        else:
            gathering.follow(self._learner.policy)
        while self._version < self._configuration.trainer.num_updates:
            if self._lead:
                self._settle(self._checkpoints.result())
            if not self._update():
                break
        self._finish()
        if self._lead:
            self._lead.summarise()

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
        if learned.has_learnt:
            self._version += 1
            if self._lead and batch:
                pushed = self._lead.push(self._learner.policy, self._version)
                self._lead.publish(batch, learned, self._version)
                self._lead.log(
                    batch,
                    learned,
                    pushed,
                    fetch_s=fetched - started,
                    train_s=trained - fetched,
                    skipped_updates=self._skipped_updates.total,
                )
                self._unsaved += batch.group_ids
            else:
                gathering.follow(self._learner.policy)
        self._guard(batch, learned)
        if learned.has_learnt:
            if self._is_checkpoint_due():
                self._save()
            if self._lead:
                self._lead.evaluate_if_due(self._version)
        return True

    def _guard(self, batch: Batch | None, learned: Learned) -> None:
        """Raises: TrainingError on every rank alike after too many updates whose numbers were not finite."""
        self._skipped_updates.count(is_skipped=learned.skipped is not None)
        if self._lead and batch and learned.skipped:
            self._lead.report_skipped(batch, learned.skipped, in_a_row=self._skipped_updates.in_a_row)
        if self._skipped_updates.are_too_many:
            raise TrainingError(too_many_skipped(self._configuration, self._skipped_updates.in_a_row))

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
        """Begins to make this version durable."""
        self._settle(self._checkpoints.wait())
        self._checkpoints.save(
            self._learner.engines,
            self._version,
            self._unsaved,
            ledger=self._lead.ledger_state() if self._lead else LedgerState(0, {}),
            components=self._components,
        )
        self._unsaved = []

    def _settle(self, saved: SaveResult | None) -> None:
        """Draws the consequences of a save that ended. Raises: TrainingError after too many failures in a row."""
        if saved is None:
            return
        if saved.problem is None:
            self._durable_version = saved.version
            self._failed_saves = 0
            if self._lead:
                self._lead.acknowledge(saved.version)
                self._lead.note(f"checkpoint of version {saved.version}")
            return
        self._unsaved = [*saved.group_ids, *self._unsaved]
        self._failed_saves += 1
        allowed = self._configuration.trainer.checkpoint.max_failed_saves
        if self._failed_saves > allowed:
            raise TrainingError(saved.problem)
        if self._lead:
            self._lead.note(f"{saved.problem}; training goes on, {self._failed_saves} of {allowed} failed saves in a row")

    def _finish(self) -> None:
        """Raises: TrainingError if the last version cannot be made durable."""
        self._settle(self._checkpoints.wait())
        if self._durable_version < self._version:
            self._save()
            last = self._checkpoints.wait()
            if last and last.problem:
                raise TrainingError(last.problem)
            self._settle(last)
        if self._lead and self._version >= self._configuration.trainer.num_updates:
            self._lead.note(f"finished: all {self._version} updates are done; raise trainer.num_updates to go on")


def too_many_skipped(configuration: Configuration, in_a_row: int) -> str:
    """Why training stops when numbers that are not finite do not go away, and where to look."""
    return (
        f"the loss and gradient of an update must be finite numbers, and {in_a_row} updates in a row had others "
        f"(trainer.max_skipped_updates={configuration.trainer.max_skipped_updates}); the trajectories are in "
        f"{configuration.run.directory}/{SKIPPED_FILE}; if their records are sound, lower trainer.learning_rate or "
        "trainer.max_grad_norm, or resume from a checkpoint before the weights went wrong"
    )
