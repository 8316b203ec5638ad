"""What rank 0 does besides training: batches from the stream, weights to the engines, books, files. No other rank has a Lead."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared import versions
from shared.configuration import Configuration
from shared.errors import ConfigurationError, LedgerError
from shared.ledger import Books, TrainingLedger
from shared.trajectory import SUCCESS_REWARD
from trainer.advantages import ADVANTAGE_ESTIMATORS
from trainer.assembly import Episode, Group, Selection
from trainer.batching import BatchPlan, PlannedSequence, plan_shares
from trainer.evaluation import Evaluations
from trainer.fallback import synchronous_until
from trainer.gathering import finish, weight_source
from trainer.learner import Learned
from trainer.model import Policy
from trainer.pipeline import MASKED, NO_REWARD, Stretch, tokens_by_lag
from trainer.pipeline_watch import PipelineWatch
from trainer.rollouts import RolloutReader
from trainer.stopping import StopSignal
from trainer.tracking import JsonLines, Tracker, UpdateMetrics
from trainer.weight_buckets import WeightSource
from trainer.weight_push import PushTimes, WeightPusher

CATCH_UP_S = 2.0
"""Between two questions whether an engine lacks the weights, while there is no batch."""


@dataclass(frozen=True)
class Batch:
    """The groups of one update, planned, and the seconds it took to get them."""

    groups: tuple[Group, ...]
    plan: BatchPlan
    wait_s: float
    plan_s: float

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return tuple(episode for group in self.groups for episode in group.trainable)

    @property
    def group_ids(self) -> tuple[str, ...]:
        return tuple(group.group_id for group in self.groups)

    @property
    def trained_by_version(self) -> list[tuple[int, int]]:
        """(policy version, tokens it sampled that carry loss), of all episodes."""
        sampled = (pair for episode in self.episodes for pair in episode.sampled_by_version)
        return [(version, count) for version, count in sampled if version >= self.plan.oldest_version]

    @property
    def unused_tokens(self) -> dict[str, int]:
        """Sampled tokens of its groups that carry no loss, by reason."""
        since = self.plan.oldest_version
        return {
            MASKED: sum(episode.num_sampled - episode.num_sampled_since(since) for episode in self.episodes),
            NO_REWARD: sum(episode.num_sampled for group in self.groups for episode in group.episodes if not episode.is_trainable),
        }

    @property
    def lags(self) -> list[int]:
        """Of every episode with a token that carries loss: of its oldest such token."""
        trained = [
            [version for version, _ in episode.sampled_by_version if version >= self.plan.oldest_version]
            for episode in self.episodes
        ]
        return [versions.lag(self.plan.version, sampled[0]) for sampled in trained if sampled]


class Lead:
    """Rank 0's errands, in the order in which one update needs them."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        reader: RolloutReader,
        ledger: TrainingLedger,
        pusher: WeightPusher,
        evaluations: Evaluations,
        pipeline: PipelineWatch,
        tracker: Tracker,
        stop: StopSignal,
    ) -> None:
        self._configuration = configuration
        self._reader = reader
        self._ledger = ledger
        self._pusher = pusher
        self._evaluations = evaluations
        self._pipeline = pipeline
        self._tracker = tracker
        self._stop = stop
        self._pushed: tuple[WeightSource, int] | None = None
        self._next_catch_up = 0.0
        directory = Path(configuration.run.directory)
        self._metrics = JsonLines(directory / "metrics.jsonl")
        self._lineage = JsonLines(directory / "lineage.jsonl")

    def restore(self, version: int, saved_group_ids: Sequence[str]) -> None:
        """Continues the books at the checkpoint of `version`, which taught `saved_group_ids`; later groups are ready again."""
        self._ledger.create_consumer_group()
        try:
            num_again = self._ledger.restore(version, saved_group_ids)
        except LedgerError as error:
            run = self._configuration.run
            found = f"that of version {version}" if version else "none"
            raise ConfigurationError(
                f"run.directory must hold the newest checkpoint of run {run.id!r}, and {run.directory!r} has {found} ({error}); "
                "give the directory that has it, or begin a new run with another run.id"
            ) from error
        self._evaluations.resume(version)
        if version or num_again:
            again = f"; {num_again} groups trained after it are trained again" if num_again else ""
            self._tracker.note(f"resuming from the checkpoint of version {version}{again}")

    def next_batch(self, version: int, num_ranks: int) -> Batch | None:
        """The batch of the update of `version`; None once stopped."""
        started = time.perf_counter()
        self._pipeline.begin()
        selection = self._reader.next_batch(
            version,
            progress=lambda ready, needed: self._tracker.waiting(version, ready, needed),
            is_stopped=lambda: self._stop.is_set,
            is_paused=self._is_paused,
        )
        if selection is None:
            return None
        waited = time.perf_counter()
        self._tracker.training(version)
        plan = plan_batch(selection, version, self._configuration, num_ranks)
        return Batch(selection.batch, plan, wait_s=waited - started, plan_s=time.perf_counter() - waited)

    def push(self, policy: Policy, version: int) -> PushTimes:
        """Puts the policy's weights in force on the engines as `version`."""
        self._pushed = (weight_source(policy), version)
        try:
            return self._pusher.push(*self._pushed)
        finally:
            finish(policy)

    def _is_paused(self) -> bool:
        """Brings engines up that joined or came back. Whether the run is paused because no engine can take calls."""
        if time.monotonic() < self._next_catch_up or self._pushed is None:
            return False
        can_generate = self._pusher.catch_up(*self._pushed)
        self._next_catch_up = time.monotonic() + CATCH_UP_S
        return not can_generate

    def publish(self, batch: Batch, learned: Learned, version: int) -> None:
        """Moves the books to `version`. Its lineage is on disk first: a version in the books always has a line."""
        self._fall_back_if_due(learned.kl_behaviour_before, version)
        self._lineage.append(
            {
                "version": version,
                "group_ids": batch.group_ids,
                "trajectory_ids": [episode.trajectory_id for episode in batch.episodes],
                "lag_max": max(batch.lags, default=0),
            }
        )
        self._ledger.publish(version, batch.group_ids)
        self._reader.give_up_stale(version)

    def _fall_back_if_due(self, kl_behaviour: float, version: int) -> None:
        """Before the places of `version` open, so that none is given that a fallback would not have given."""
        rollout, books = self._configuration.rollout, self._ledger.books()
        until = synchronous_until(
            books.synchronous_until,
            version=version,
            kl_behaviour=kl_behaviour,
            threshold=rollout.kl_fallback_threshold,
            num_updates=rollout.kl_fallback_updates,
        )
        if until == books.synchronous_until:
            return
        self._ledger.make_synchronous(until)
        if books.ratio_in_force > 0:
            self._tracker.note(
                f"falling back to synchronous until version {until}: KL(behaviour ‖ trained) is {kl_behaviour:.3g}, over "
                f"rollout.kl_fallback_threshold={rollout.kl_fallback_threshold:g}"
            )

    def acknowledge(self, version: int) -> None:
        """A checkpoint of `version` is on disk."""
        self._ledger.acknowledge(version)

    def log(self, batch: Batch, learned: Learned, pushed: PushTimes, *, fetch_s: float, train_s: float) -> None:
        books = self._ledger.books()
        stretch = self._pipeline.measure(
            books,
            wait_s=batch.wait_s,
            train_s=train_s,
            timings=[episode.timings for episode in batch.episodes],
            trained_tokens=batch.plan.num_sampled_tokens,
            unused_tokens=batch.unused_tokens,
        )
        metrics = update_metrics(batch, learned, pushed, books, stretch, fetch_s=fetch_s)
        self._metrics.append(metrics)
        self._tracker.update(metrics)
        self._pipeline.report(stretch, books)

    def evaluate_if_due(self, version: int) -> None:
        self._evaluations.run_if_due(version, self._stop)

    def note(self, text: str) -> None:
        self._tracker.note(text)

    def summarise(self) -> None:
        """Says how the pipeline went while this process trained."""
        self._pipeline.summarise()

    def close(self) -> None:
        self._evaluations.close()
        self._pusher.close()


def plan_batch(selection: Selection, version: int, configuration: Configuration, num_ranks: int) -> BatchPlan:
    """Advantages within each group, then every episode with a token that carries loss into a micro-batch of a rank."""
    trainer = configuration.trainer
    estimate = ADVANTAGE_ESTIMATORS[trainer.adv_estimator]
    sequences: list[PlannedSequence] = []
    num_sampled_tokens = 0
    for group in selection.batch:
        rewards_G = np.array([episode.reward for episode in group.trainable])
        advantages_G = estimate(rewards_G, scale_by_std=trainer.scale_by_std)
        for episode, advantage in zip(group.trainable, advantages_G, strict=True):
            if count := episode.num_sampled_since(selection.oldest_version):
                sequences.append(PlannedSequence(episode.entry_id, episode.num_tokens, float(advantage)))
                num_sampled_tokens += count
    return BatchPlan(
        version=version,
        oldest_version=selection.oldest_version,
        num_sequences=len(sequences),
        num_sampled_tokens=num_sampled_tokens,
        shares=plan_shares(sequences, num_ranks=num_ranks, max_tokens=trainer.ppo_max_token_len_per_gpu),
    )


def update_metrics(
    batch: Batch, learned: Learned, pushed: PushTimes, books: Books, stretch: Stretch, *, fetch_s: float
) -> UpdateMetrics:
    """One update in numbers. Args: books: after its publication. stretch: of this update alone. fetch_s: seconds of rank 0."""
    episodes, lags, measures, unused = batch.episodes, batch.lags, learned.measures, batch.unused_tokens
    return UpdateMetrics(
        update=batch.plan.version + 1,
        version=batch.plan.version + 1,
        time=time.time(),
        reward_mean=sum(episode.reward for episode in episodes) / len(episodes),
        success_rate=sum(episode.reward >= SUCCESS_REWARD for episode in episodes) / len(episodes),
        lag_max=max(lags, default=0),
        lag_mean=sum(lags) / max(1, len(lags)),
        tokens_by_lag=tokens_by_lag(batch.trained_by_version, batch.plan.version),
        trajectories_by_lag=dict(sorted(Counter(lags).items())),
        update_s=stretch.update_s,
        wait_prev_gen_s=batch.wait_s,
        wait_share=stretch.wait_share,
        trainer_idle_share=stretch.trainer_idle_share,
        engine_idle_share=stretch.engines.idle_share,
        engine_utilisation=stretch.engines.utilisation,
        episode_s_mean=stretch.episode_s,
        episode_shares=stretch.episode_shares,
        assemble_s=batch.plan_s + fetch_s,
        train_s=stretch.train_s,
        weight_sync_s=pushed.total_s,
        weight_gather_s=pushed.gather_s,
        weight_pause_s=pushed.pause_s,
        weight_load_s=pushed.load_s,
        loss=measures.loss,
        clip_fraction=measures.clip_fraction,
        grad_norm=learned.grad_norm,
        mean_ratio=measures.mean_ratio,
        effective_sample_size=measures.effective_sample_size,
        kl_behaviour=measures.kl_behaviour,
        kl_behaviour_before=learned.kl_behaviour_before,
        async_generation_ratio=books.ratio_in_force,
        discarded_groups=books.discarded,
        discarded_tokens=books.discarded_tokens,
        masked_tokens=unused[MASKED],
        unrewarded_tokens=unused[NO_REWARD],
        surplus_episodes=books.episodes_surplus,
        dead_letters=books.dead_letters,
        logprob_mismatch_max=measures.logprob_mismatch_max,
        logprob_mismatch_mean=measures.logprob_mismatch_mean,
        num_groups=len(batch.groups),
        num_trajectories=len(episodes),
        num_tokens=sum(episode.num_tokens for episode in episodes),
        num_sampled_tokens=batch.plan.num_sampled_tokens,
        learning_rate=learned.learning_rate,
    )
