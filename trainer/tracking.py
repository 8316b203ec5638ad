"""What a run says of its training: the metrics of an update, who may be told, and JSON lines."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from shared.evaluation import EpisodeStatistics

BLOCK_BYTES = 4096


class UpdateMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl. Seconds of wall clock, tokens and episodes of this update's batch."""

    update: int
    """Counts from 1 over the run's lineage."""
    version: int
    """The policy version that the update made."""
    time: float
    """Unix seconds."""
    reward_mean: float
    success_rate: float
    """Episodes with a reward of at least 1."""
    lag_max: int
    lag_mean: float
    tokens_by_lag: Mapping[int, int]
    """Trained tokens by lag."""
    trajectories_by_lag: Mapping[int, int]
    """Trained episodes by the lag of their oldest trained token."""
    update_s: float
    """From the end of the update before it, or from the start, to its own; with the checkpoint and the evaluation in between."""
    wait_prev_gen_s: float
    """The trainer waited for data."""
    wait_share: float
    """wait_prev_gen_s / update_s."""
    trainer_idle_share: float
    """1 - train_s / update_s."""
    engine_idle_share: float | None
    """Of the time in which engines were ready for calls, they had none; None if the hub did not tell."""
    engine_utilisation: float | None
    """Of what engines can hold at the same time, in calls or in tokens; None if they do not say."""
    episode_s_mean: float
    episode_shares: Mapping[str, float]
    """Of the trained episodes' lives: queued, generating, environment, reward. Empty if they took no time."""
    assemble_s: float
    train_s: float
    weight_sync_s: float
    weight_gather_s: float
    weight_pause_s: float
    weight_load_s: float
    loss: float
    clip_fraction: float
    """Share of tokens of which a bound of the policy loss was active."""
    correction_truncated_fraction: float
    correction_dropped_fraction: float
    correction_mean_weight: float
    grad_norm: float
    mean_ratio: float
    effective_sample_size: float
    kl_behaviour: float
    """Of the last epoch."""
    kl_reference: float
    """KL(trained ‖ reference) in nats a token; 0 without a reference policy."""
    kl_coefficient: float
    kl_behaviour_before: float
    """Before the first step; over rollout.kl_fallback_threshold the run falls back to synchronous."""
    async_generation_ratio: float
    """α in force after the update: 0 while fallen back."""
    discarded_groups: Mapping[str, int]
    """Since the run began, by reason."""
    discarded_tokens: Mapping[str, int]
    """Since the run began, by reason: sampled, and not trained."""
    masked_tokens: int
    """Of this batch: older than the bound, and without loss."""
    unrewarded_tokens: int
    """Of this batch's groups: in episodes that have no reward to learn from."""
    surplus_episodes: int
    """Since the run began: cancelled because their group was complete."""
    dead_letters: int
    """Since the run began: records that nobody could read."""
    skipped_updates: int
    """Since the run began: with a step left out because loss or gradient was not finite."""
    tracker_failures: int
    """Since this process began: calls to trackers that failed, and lines they were too slow for."""
    logprob_mismatch_max: float | None
    """None when no episode was sampled entirely by the version being trained."""
    logprob_mismatch_mean: float | None
    num_groups: int
    num_trajectories: int
    num_tokens: int
    num_sampled_tokens: int
    learning_rate: float
    value_loss: float | None = None
    """None without a critic, as the three below."""
    value_explained_variance: float | None = None
    """Of the returns, by the critic before the update; None also where returns do not vary."""
    value_clip_fraction: float | None = None
    value_grad_norm: float | None = None


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of evaluations.jsonl: held-out tasks under the weights of `version`."""

    version: int
    greedy: bool
    results: Mapping[str, EpisodeStatistics]
    """By environment."""
    time: float
    """Unix seconds."""


class Tracker(Protocol):
    """Who is told the numbers."""

    def update(self, metrics: UpdateMetrics) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...


class Progress(Protocol):
    """Who is told what happens meanwhile."""

    def waiting(self, version: int, ready: int, needed: int) -> None:
        """The update of `version` waits for data."""

    def training(self, version: int) -> None:
        """The update of `version` has its data."""

    def note(self, text: str) -> None: ...


class JsonLines:
    """A file of one JSON object a line. A last line that a crash cut short is dropped when the file is opened again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            with path.open("r+b") as file:
                file.truncate(_end_of_last_line(file))

    def append(self, record: msgspec.Struct | Mapping[str, Any]) -> None:
        """Writes a whole line, or raises OSError and leaves the file as it was."""
        with self._path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            line = memoryview(msgspec.json.encode(record) + b"\n")
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(end)
                raise

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [msgspec.json.decode(line) for line in self._path.read_bytes().splitlines()]


def _end_of_last_line(file: BinaryIO) -> int:
    """Bytes up to and with the last newline, found from the end, so that a long file costs no more than a short one."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - BLOCK_BYTES)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
