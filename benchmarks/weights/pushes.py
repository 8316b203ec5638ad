"""Pushes by the trainer's own pusher, with what each took and what the engines generated meanwhile."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.weights.broadcasts import BareBroadcast
from benchmarks.weights.load import SETTLED, Call, Load
from shared.configuration import WeightPushSection
from trainer.hub_client import CommitReply, HubClient
from trainer.model import start_ranks
from trainer.weight_buckets import WeightSource
from trainer.weight_push import WeightPusher

Weights = list[tuple[str, Tensor]]

NEVER = 10_000


class ObservedHub(HubClient):
    """Keeps the reports of committed updates."""

    def __init__(self, address: str) -> None:
        super().__init__(address, timeout_s=120)
        self.reports: list[CommitReply] = []

    def load_last_bucket(self, update_id: str, bucket: Mapping[str, Any], checksums: Mapping[str, str] | None) -> CommitReply:
        self.reports.append(super().load_last_bucket(update_id, bucket, checksums))
        return self.reports[-1]


@dataclass(frozen=True)
class Push:
    """One push, in seconds, with the tokens of its whole window and of an equal one around it without a push."""

    gather_s: float
    window_s: float
    pause_s: float
    """Summed over the groups of a rolling push: each engine pauses for its own group's alone."""
    step_s: float
    """Of the pause, until every engine had ended the step that it was in."""
    load_s: float
    """Of the pause, for broadcasts and loads."""
    tokens: int
    tokens_without: int


@dataclass
class Pushes:
    """Of one way."""

    pushes: list[Push] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    quiet_bare_s: list[float] = field(default_factory=list)
    """The same broadcast, while no engine generates."""

    @property
    def pause_s(self) -> float:
        return statistics.median(push.pause_s for push in self.pushes)

    @property
    def tokens_kept(self) -> float:
        return sum(push.tokens for push in self.pushes) / max(1, sum(push.tokens_without for push in self.pushes))

    @property
    def lost_s(self) -> float:
        """Seconds of generation that one push costs, on average, wherever in its window it does."""
        window_s = statistics.mean(push.window_s for push in self.pushes)
        return (1 - self.tokens_kept) * window_s

    def figures(self) -> dict[str, float]:
        medians = {
            name: statistics.median(getattr(push, name) for push in self.pushes)
            for name in ("gather_s", "window_s", "pause_s", "step_s", "load_s")
        }
        figures = {"pushes": len(self.pushes), **medians, "tokens_kept": self.tokens_kept, "lost_s": self.lost_s}
        if self.bare_s:
            bare_s, quiet_s = statistics.median(self.bare_s), statistics.median(self.quiet_bare_s)
            figures |= {"bare_s": bare_s, "quiet_bare_s": quiet_s, "pause_vs_bare": self.pause_s / bare_s}
            figures |= {"pause_vs_quiet_bare": self.pause_s / quiet_s}
        return {name: round(value, 4) for name, value in figures.items()}


def weights_of(model_path: Path) -> Weights:
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        start_ranks(timeout=timedelta(seconds=60))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def source_of(weights: Weights) -> WeightSource:
    return WeightSource.of(weights)


@contextmanager
def open_pusher(hub_url: str, **settings: object) -> Iterator[tuple[WeightPusher, ObservedHub]]:
    """The trainer's own."""
    hub = ObservedHub(hub_url)
    section = {"backend": "gloo", "verify_every": NEVER} | settings
    pusher = WeightPusher(
        hub,
        WeightPushSection(**section),  # type: ignore[arg-type]
        dtype=torch.float32,
        device=torch.device("cpu"),
        patience_s=120,
        notice=lambda text: print(f"  {text[:200]}", flush=True),
        can_check_values=True,
    )
    try:
        yield pusher, hub
    finally:
        pusher.close()


def measured(
    hub_url: str,
    weights: Weights,
    load: Load,
    *,
    seconds: float,
    at_least: int,
    gap_s: float,
    bare: BareBroadcast | None = None,
    **settings: object,
) -> Pushes:
    """Pushes by one way for so many seconds, `at_least` so often, by turns with bare broadcasts if there is one to compare with.

    The first push, which is verified, is not counted.
    """
    source = source_of(weights)
    found = Pushes()
    with open_pusher(hub_url, **settings) as (pusher, hub):
        pusher.push(source, 0)
        ends_at = time.perf_counter() + seconds
        for version in count(1):
            if len(found.pushes) >= at_least and time.perf_counter() > ends_at:
                break
            time.sleep(gap_s)
            if bare is not None:
                found.bare_s.append(bare.seconds())
                with load.held():
                    found.quiet_bare_s.append(bare.seconds())
                time.sleep(gap_s)
            hub.reports.clear()
            began = time.perf_counter()
            times = pusher.push(source, version)
            window_s = time.perf_counter() - began
            time.sleep(max(gap_s, window_s))
            found.pushes.append(
                Push(
                    times.gather_s,
                    window_s,
                    times.pause_s,
                    sum(report.pause_call_s for report in hub.reports),
                    times.load_s,
                    load.tokens_between(began, began + window_s),
                    tokens_around(load, began, window_s),
                )
            )
    return found


def tokens_around(load: Load, began: float, window_s: float) -> int:
    """Half a window before the push, and half of one after it and a rest, so that the machine's drift is in both."""
    ended = began + window_s
    return load.tokens_between(began - window_s / 2, began) + load.tokens_between(ended + window_s / 2, ended + window_s)


def hit_rates(calls: Sequence[Call]) -> dict[str, float | None]:
    """How much of what a session left in the cache its next call found, on average, by turns since an update."""

    def mean(rates: Sequence[float]) -> float | None:
        return round(statistics.mean(rates), 3) if rates else None

    rated = [(call.turns_since_update, call.hit_rate) for call in calls if call.hit_rate is not None]
    turns = {"first_turn_after": 0, "second_turn_after": 1, "otherwise": SETTLED}
    return {name: mean([rate for turn, rate in rated if turn == number]) for name, number in turns.items()}
