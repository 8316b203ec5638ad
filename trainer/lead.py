"""What rank 0 does besides training: batches from the stream, weights to the engines, books, files. No other rank has a Lead."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared import versions
from shared.advantage_settings import AdvantageSection
from shared.configuration import Configuration
from shared.errors import ConfigurationError, LedgerError, TrainingError
from shared.ledger import Books, DiscardReason, TrainingLedger
from shared.trajectory import SUCCESS_REWARD
from trainer.advantages import advantage_estimator, planned_scores
from trainer.assembly import Episode, Group, Selection
from trainer.batching import BatchPlan, PlannedSequence, SequenceCost, mini_batches, plan_update
from trainer.checkpoints import LedgerState, RunState
from trainer.evaluation import Evaluations
from trainer.fallback import synchronous_until
from trainer.gathering import finish, is_collective, weight_source
from trainer.group_advantages import EpisodeRewards, overlong_penalty
from trainer.guards import SkippedStep
from trainer.learner import Learned
from trainer.model import Policy
from trainer.pipeline import MASKED, NO_REWARD, Stretch, tokens_by_lag
from trainer.pipeline_watch import PipelineWatch
from trainer.rollouts import RolloutReader
from trainer.stopping import StopSignal
from trainer.trackers.trackers import Trackers
from trainer.tracking import JsonLines, UpdateMetrics
from trainer.weight_buckets import WeightSource
from trainer.weight_push import PushTimes, WeightPusher

CATCH_UP_S = 2.0
"""Between two questions whether an engine lacks the weights, while there is no batch."""
SKIPPED_FILE = "skipped_updates.jsonl"


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
        tracker: Trackers,
        stop: StopSignal,
        cost: SequenceCost,
    ) -> None:
        """Args: cost: of a sequence to this model, by which ranks are balanced."""
        self._configuration = configuration
        self._cost = cost
        self._reader = reader
        self._ledger = ledger
        self._pusher = pusher
        self._evaluations = evaluations
        self._pipeline = pipeline
        self._tracker = tracker
        self._stop = stop
        self._pushed: tuple[WeightSource, int] | None = None
        self._gathers_alone = True
        self._next_catch_up = 0.0
        directory = Path(configuration.run.directory)
        self._lineage = JsonLines(directory / "lineage.jsonl")
        self._skipped = JsonLines(directory / SKIPPED_FILE)

    def restore(self, resumed: RunState | None) -> None:
        """Continues the books at the checkpoint `resumed`, or at the beginning; groups trained later are ready again."""
        version = resumed.version if resumed else 0
        self._ledger.create_consumer_group()
        try:
            if resumed is None:
                num_again = self._ledger.restore(0)
            else:
                books = resumed.ledger
                num_again = self._ledger.restore(version, resumed.group_ids, trained=books.trained, cursors=books.cursors)
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
            is_paused=self._bring_engines_up,
        )
        if selection is None:
            return None
        waited = time.perf_counter()
        self._tracker.training(version)
        plan = plan_batch(selection, version, self._configuration, num_ranks=num_ranks, cost=self._cost)
        return Batch(selection.batch, plan, wait_s=waited - started, plan_s=time.perf_counter() - waited)

    def push(self, policy: Policy, version: int) -> PushTimes:
        """Puts the policy's weights in force on the engines as `version`."""
        self._pushed = (weight_source(policy), version)
        self._gathers_alone = not is_collective(policy)
        try:
            return self._pusher.push(*self._pushed)
        finally:
            finish(policy)

    def _bring_engines_up(self) -> bool:
        """Brings engines up that joined or came back. Returns whether the run is paused because no engine can take calls."""
        if time.monotonic() < self._next_catch_up or self._pushed is None:
            return False
        can_generate = self._pusher.catch_up(*self._pushed)
        self._next_catch_up = time.monotonic() + CATCH_UP_S
        return not can_generate

    def publish(self, batch: Batch, learned: Learned, version: int) -> None:
        """Moves the books to `version`. Its lineage is on disk first: a version in the books always has a line."""
        self._fall_back_if_due(learned.kl_behaviour_before, version)
        line = {
            "version": version,
            "group_ids": batch.group_ids,
            "trajectory_ids": [episode.trajectory_id for episode in batch.episodes],
            "lag_max": max(batch.lags, default=0),
        }
        try:
            self._lineage.append(line)
        except OSError as error:
            directory = self._configuration.run.directory
            raise TrainingError(
                f"run.directory must have room for the lineage of every update, and {directory!r} took no line of version "
                f"{version}: {error.strerror}; free space there, and start again: the run resumes from its newest checkpoint"
            ) from error
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

    def ledger_state(self) -> LedgerState:
        """What a checkpoint keeps of the books."""
        return LedgerState(self._ledger.books().trained, self._ledger.cursors())

    def report_skipped(self, batch: Batch, skipped: SkippedStep, *, in_a_row: int) -> None:
        """Leaves the trajectories of a skipped step in a file, and gives up the groups of an update that taught nothing."""
        id_by_entry = {episode.entry_id: episode.trajectory_id for episode in batch.episodes}
        self._skipped.append(
            {
                "version": batch.plan.version,
                "cause": skipped.cause,
                "trajectory_ids": [id_by_entry[entry_id] for entry_id in skipped.entry_ids],
                "group_ids": batch.group_ids,
                "steps_taken": skipped.after_steps,
                "in_a_row": in_a_row,
                "time": time.time(),
            }
        )
        if skipped.after_steps == 0:
            self._ledger.discard(batch.group_ids, DiscardReason.NON_FINITE, requeue=False)
        self._tracker.note(
            f"update {batch.plan.version + 1}: the {skipped.cause} is not finite, so the step was skipped after "
            f"{skipped.after_steps} others of the update; {len(skipped.entry_ids)} trajectories in {SKIPPED_FILE}"
        )

    def acknowledge(self, version: int) -> None:
        """A checkpoint of `version` is on disk."""
        self._ledger.acknowledge(version)

    def log(
        self, batch: Batch, learned: Learned, pushed: PushTimes, *, fetch_s: float, train_s: float, skipped_updates: int
    ) -> None:
        books = self._ledger.books()
        stretch = self._pipeline.measure(
            books,
            wait_s=batch.wait_s,
            train_s=train_s,
            timings=[episode.timings for episode in batch.episodes],
            trained_tokens=batch.plan.num_sampled_tokens,
            unused_tokens=batch.unused_tokens,
        )
        self._tracker.update(
            update_metrics(
                batch,
                learned,
                pushed,
                books,
                stretch,
                fetch_s=fetch_s,
                skipped_updates=skipped_updates,
                tracker_failures=self._tracker.failures,
            )
        )
        self._pipeline.report(stretch, books)

    def evaluate_if_due(self, version: int) -> None:
        # The other ranks wait for the next batch meanwhile, and take part in a gathering there; after the last update they do not.
        can_gather = self._gathers_alone or version < self._configuration.trainer.num_updates
        self._evaluations.run_if_due(version, self._stop, meanwhile=self._bring_engines_up if can_gather else lambda: None)

    def note(self, text: str) -> None:
        self._tracker.note(text)

    def summarise(self) -> None:
        """Says how the pipeline went while this process trained."""
        self._pipeline.summarise()

    def close(self) -> None:
        self._evaluations.close()
        self._pusher.close()


def plan_batch(
    selection: Selection, version: int, configuration: Configuration, *, num_ranks: int, cost: SequenceCost
) -> BatchPlan:
    """The estimator's scores, then every episode with a token that carries loss into a micro-batch of a step and a rank.

    An episode without such a token still counts in what the others are compared with.
    """
    trainer = configuration.trainer
    are_rewards = advantage_estimator(trainer).by_token is not None
    rewards = [[_rewards(episode, trainer.advantage) for episode in group.trainable] for group in selection.batch]
    groups = [
        [
            _planned(episode, count, scores_K.tolist(), are_rewards=are_rewards)
            for episode, scores_K in zip(group.trainable, scores, strict=True)
            if (count := episode.num_sampled_since(selection.oldest_version))
        ]
        for group, scores in zip(selection.batch, planned_scores(rewards, trainer), strict=True)
    ]
    return plan_update(
        mini_batches(groups, size=trainer.ppo_mini_batch_size, unit=trainer.mini_batch_unit),
        version=version,
        oldest_version=selection.oldest_version,
        num_ranks=num_ranks,
        max_tokens=trainer.ppo_max_token_len_per_gpu,
        cost=cost,
    )


def _rewards(episode: Episode, settings: AdvantageSection) -> EpisodeRewards:
    """What the episode is scored by: its rewards, and the last turn pays for the length of all."""
    turn_rewards = list(episode.turn_rewards)
    if overlong := settings.overlong:
        turn_rewards[-1] += overlong_penalty(
            episode.num_sampled,
            max_tokens=overlong.max_tokens,
            buffer_tokens=overlong.buffer_tokens,
            penalty=overlong.penalty,
        )
    return EpisodeRewards(tuple(turn_rewards), episode.state_fingerprints)


def _planned(episode: Episode, num_sampled_tokens: int, scores: Sequence[float], *, are_rewards: bool) -> PlannedSequence:
    is_whole = not are_rewards and len(scores) == 1
    return PlannedSequence(
        episode.entry_id,
        episode.num_tokens,
        num_sampled_tokens,
        episode.reward,
        advantage=scores[0] if is_whole else 0.0,
        turn_advantages=() if is_whole or are_rewards else tuple(scores),
        turn_rewards=tuple(scores) if are_rewards else (),
    )


def update_metrics(
    batch: Batch,
    learned: Learned,
    pushed: PushTimes,
    books: Books,
    stretch: Stretch,
    *,
    fetch_s: float,
    skipped_updates: int = 0,
    tracker_failures: int = 0,
) -> UpdateMetrics:
    """One update in numbers. Args: books: after its publication. stretch: of this update alone. fetch_s: seconds of rank 0."""
    episodes, lags, measures, values = batch.episodes, batch.lags, learned.measures, learned.values
    unused = batch.unused_tokens
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
        correction_truncated_fraction=measures.truncated_fraction,
        correction_dropped_fraction=measures.dropped_fraction,
        correction_mean_weight=measures.mean_weight,
        mean_ratio=measures.mean_ratio,
        effective_sample_size=measures.effective_sample_size,
        kl_behaviour=measures.kl_behaviour,
        kl_reference=measures.kl_reference,
        kl_coefficient=learned.kl_coefficient,
        kl_behaviour_before=learned.kl_behaviour_before,
        async_generation_ratio=books.ratio_in_force,
        discarded_groups=books.discarded,
        discarded_tokens=books.discarded_tokens,
        masked_tokens=unused[MASKED],
        unrewarded_tokens=unused[NO_REWARD],
        surplus_episodes=books.episodes_surplus,
        dead_letters=books.dead_letters,
        skipped_updates=skipped_updates,
        tracker_failures=tracker_failures,
        logprob_mismatch_max=measures.logprob_mismatch_max,
        logprob_mismatch_mean=measures.logprob_mismatch_mean,
        num_groups=len(batch.groups),
        num_trajectories=len(episodes),
        num_tokens=sum(episode.num_tokens for episode in episodes),
        num_sampled_tokens=batch.plan.num_sampled_tokens,
        learning_rate=learned.learning_rate,
        value_loss=values.value_loss if values else None,
        value_explained_variance=values.explained_variance if values else None,
        value_clip_fraction=values.clip_fraction if values else None,
        value_grad_norm=values.grad_norm if values else None,
    )
