"""What a run leaves behind of its training: metrics and lineage as JSON lines, and a console to watch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console
from rich.status import Status


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
    grad_norm: float
    mean_ratio: float
    effective_sample_size: float
    kl_behaviour: float
    """Of the last epoch."""
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
    logprob_mismatch_max: float | None
    """None when no episode was sampled entirely by the version being trained."""
    logprob_mismatch_mean: float | None
    num_groups: int
    num_trajectories: int
    num_tokens: int
    num_sampled_tokens: int
    learning_rate: float


class Tracker(Protocol):
    """Where progress goes."""

    def waiting(self, version: int, ready: int, needed: int) -> None:
        """The update of `version` waits for data."""

    def training(self, version: int) -> None:
        """The update of `version` has its data."""

    def update(self, metrics: UpdateMetrics) -> None: ...

    def note(self, text: str) -> None: ...


class JsonLines:
    """A file of one JSON object a line. A last line that a crash cut short is dropped when the file is opened again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            whole, newline, _ = path.read_bytes().rpartition(b"\n")
            path.write_bytes(whole + newline)

    def append(self, record: msgspec.Struct | Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [msgspec.json.decode(line) for line in self._path.read_bytes().splitlines()]


class ConsoleTracker:
    """A line an update, and in a terminal a spinner that says what is awaited."""

    def __init__(self, num_updates: int) -> None:
        self._num_updates = num_updates
        self._console = Console(highlight=False, soft_wrap=True)
        self._status = Status("", console=self._console) if self._console.is_terminal else None

    def __enter__(self) -> "ConsoleTracker":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._status:
            self._status.stop()

    def waiting(self, version: int, ready: int, needed: int) -> None:
        self._say(f"update {version + 1}/{self._num_updates}: waiting for rollouts, {ready} of {needed} groups")

    def training(self, version: int) -> None:
        self._say(f"update {version + 1}/{self._num_updates}: training")

    def update(self, metrics: UpdateMetrics) -> None:
        self._console.print(summary(metrics, self._num_updates))

    def note(self, text: str) -> None:
        self._console.print(text)

    def _say(self, text: str) -> None:
        if self._status:
            self._status.update(text)


def summary(metrics: UpdateMetrics, num_updates: int) -> str:
    """One update in one line."""
    return (
        f"update {metrics.update}/{num_updates}  reward {metrics.reward_mean:.3f}  success {metrics.success_rate:.2f}  "
        f"lag {metrics.lag_max}  wait {metrics.wait_prev_gen_s:.1f} s  train {metrics.train_s:.1f} s  "
        f"push {metrics.weight_sync_s:.2f} s (paused {1000 * metrics.weight_pause_s:.0f} ms)  kl {metrics.kl_behaviour:.4f}  "
        f"clipped {metrics.clip_fraction:.1%}"
    )
