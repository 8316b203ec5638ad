"""The trainer's inlet: waits until the stream holds the next batch, and gives up groups that will never train. Rank 0 only."""

import math
import time
from collections.abc import Callable, Iterable

import redis

from shared.configuration import RolloutSection
from shared.errors import TrainingError
from shared.ledger import FILTERED, Books, DiscardReason, TrainingLedger
from shared.stream import Delivery, TrajectoryConsumer
from trainer.assembly import Episode, GroupAssembler, Selection, select
from trainer.record_checks import NO_LIMITS, RecordLimits, why_untrainable

POLL_MS = 500
LOOK_S = 1.0
"""Between two looks at every group while fewer than a batch are ready: each costs Redis a walk over all that live."""

Progress = Callable[[int, int], None]
"""Called with groups ready and groups needed."""


class RolloutReader:
    """Reads episodes, oldest batch first.

    Whatever was delivered and not acknowledged is read again at the start and after every lost connection: a reply lost on its
    way leaves entries that Redis holds for delivered and nobody has seen. Reading twice is harmless.
    """

    def __init__(
        self,
        consumer: TrajectoryConsumer,
        ledger: TrainingLedger,
        rollout: RolloutSection,
        *,
        timeout_s: float,
        min_trainable: int = 2,
        limits: RecordLimits = NO_LIMITS,
    ) -> None:
        """Args: consumer: over a client that does not retry by itself. timeout_s: longest wait for one batch. min_trainable:
        episodes of a group that must have a reward, or it has failed. limits: of a record that the model can be trained on.
        """
        self._consumer = consumer
        self._ledger = ledger
        self._rollout = rollout
        self._timeout_s = timeout_s
        self._limits = limits
        self._min_trainable = min_trainable
        self._assembler = GroupAssembler()
        self._untrainable_in_a_row = 0
        self._must_reread = True

    def next_batch(
        self, version: int, *, progress: Progress, is_stopped: Callable[[], bool], is_paused: Callable[[], bool] = lambda: False
    ) -> Selection | None:
        """A selection whose batch the update of `version` trains on; None once stopped.

        Args: is_paused: asked while waiting; the time that it is True does not count.

        Raises: TrainingError after `timeout_s` without a batch, or when none can come, with the reason.
        """
        deadline = time.monotonic() + self._timeout_s
        batch_groups = self._rollout.rollout_batch_size
        next_look = -math.inf
        complete_since: float | None = None
        while not is_stopped():
            self._receive()
            if is_paused():
                deadline = time.monotonic() + self._timeout_s
            now, books = time.monotonic(), self._ledger.books()
            progress(min(books.ready, batch_groups), batch_groups)
            if books.ready < batch_groups and now < next_look:
                continue
            next_look = now + LOOK_S
            selection = self._select(version)
            if selection.batch:
                complete_since = complete_since or now
                if not selection.awaited or now > complete_since + self._rollout.stale_wait_s:
                    return selection
            elif problem := why_no_batch(books, self._rollout, is_late=now > deadline, timeout_s=self._timeout_s):
                raise TrainingError(problem)
        return None

    def give_up_stale(self, version: int) -> None:
        """Discards what the update of `version` or a later one cannot train, so that its episodes end now."""
        self._select(version)

    def _receive(self) -> None:
        try:
            if self._must_reread:
                self._take(self._consumer.redelivered())
                self._must_reread = False
            self._take(self._consumer.read(block_ms=POLL_MS))
        except (redis.ConnectionError, redis.TimeoutError):
            self._must_reread = True
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            raise TrainingError(
                "Redis must keep the run's stream and books while training goes on, and has lost them; start Redis with "
                "persistence (appendonly yes), and the run again under another run.id"
            ) from error

    def _take(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            problem = why_untrainable(delivery.trajectory, self._limits) if delivery.trajectory.outcome.is_trainable else None
            if problem is None:
                self._untrainable_in_a_row = 0
                self._assembler.add(Episode.of(delivery))
            else:
                self._ledger.bury(delivery.entry_id, problem)
                self._count_untrainable(problem)

    def _count_untrainable(self, problem: str) -> None:
        """Raises: TrainingError when a whole batch of records in a row cannot be trained on: that is no accident."""
        self._untrainable_in_a_row += 1
        batch_records = self._rollout.rollout_batch_size * self._rollout.num_return_sequences_in_group
        if self._untrainable_in_a_row >= batch_records:
            raise TrainingError(
                f"records must be such that the model can be trained on them, and the last {self._untrainable_in_a_row} in a row "
                f"are not; they are kept as dead letters. The last one's reason: {problem}"
            )

    def _select(self, version: int) -> Selection:
        live = self._ledger.live_groups()
        self._assembler.retain(live.ids)
        selection = select(
            self._assembler.groups(),
            live,
            version=version,
            on_stale=self._rollout.on_stale,
            batch_groups=self._rollout.rollout_batch_size,
            min_trainable=self._min_trainable,
            redundant_groups=self._rollout.redundant_groups,
        )
        if selection.stale:
            self._ledger.discard(selection.stale, DiscardReason.STALE, requeue=self._rollout.on_stale != "drop")
        if selection.failed:
            # Not run again: a task that always fails would come back for ever, and first.
            self._ledger.discard(selection.failed, DiscardReason.FAILED, requeue=False)
        return selection


def why_no_batch(books: Books, rollout: RolloutSection, *, is_late: bool, timeout_s: float) -> str | None:
    """Why training must stop waiting for a batch; None if it may go on."""
    if books.filtered_in_a_row >= rollout.max_filtered_groups:
        return all_filtered(books, rollout)
    num_places = int((1 + books.ratio_in_force) * books.batch_groups) + books.redundant_groups
    if 0 < num_places < rollout.rollout_batch_size:
        return (
            f"rollout.rollout_batch_size must be the same for trainer and agents, and the trainer's {rollout.rollout_batch_size} "
            f"groups can never be ready at once: the agents have {books.batch_groups} and α = {books.ratio_in_force:g}, "
            f"which admit {num_places}; start both with one run file"
        )
    return stuck(books, rollout, timeout_s) if is_late else None


def all_filtered(books: Books, rollout: RolloutSection) -> str:
    """What the filters discarded, and what to do about it."""
    counts = ", ".join(
        f"{count} by {reason.removeprefix(FILTERED)}"
        for reason, count in sorted(books.discarded.items())
        if reason.startswith(FILTERED)
    )
    return (
        f"rollout.group_filters must keep one of rollout.max_filtered_groups={rollout.max_filtered_groups} groups in a row, and "
        f"discarded {books.filtered_in_a_row} (in all: {counts}); rewards that do not differ within a group come from tasks that "
        "are too easy or too hard, or from a reward that is always the same: see GET /environments of the agents, or take the "
        "filter out"
    )


def stuck(books: Books, rollout: RolloutSection, timeout_s: float) -> str:
    """Where the episodes of a batch that does not come are, and where to look."""
    discarded = ", ".join(f"{count} {reason}" for reason, count in sorted(books.discarded.items())) or "none"
    where = (
        f"{books.ready} groups are ready, {books.running} run, {books.requeued} wait to run again, discarded: {discarded}, "
        f"{books.episodes_finished} episodes finished since the run began"
    )
    if books.running:
        remedy = "running episodes hang in generation or in their environment: see GET /status of the hub and of the agents"
    elif books.started == 0:
        remedy = "no episode ever started: check that the agents run, and that GET /environments lists one that is not paused"
    else:
        remedy = "no episode runs: check that the agents run, that an environment is not paused, and why groups were discarded"
    return (
        f"a batch of {rollout.rollout_batch_size} groups must be ready within trainer.generation_timeout_s={timeout_s:g}, "
        f"and is not: {where}; {remedy}"
    )
