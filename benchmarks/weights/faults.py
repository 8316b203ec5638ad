"""What breaks an update, done to real processes, and the seconds from the fault to the next update that succeeds."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from torch import Tensor

from benchmarks.waiting import wait_until
from benchmarks.weights.fleet import Fleet, end, num_ready
from benchmarks.weights.models import Size
from benchmarks.weights.pushes import Weights, open_pusher
from trainer.weight_buckets import WeightSource
from trainer.weight_push import WeightPusher

CATCH_UP_S = 60.0


def recoveries(fleet: Fleet, size: Size, weights: Weights) -> dict[str, float]:
    """Buckets are small, so that a fault can come between two."""
    source = WeightSource.of(weights)
    seconds: dict[str, float] = {}
    settings = {"bucket_mib": size.bucket_mib, "timeout_s": size.push_timeout_s}
    with open_pusher(fleet.hub_url, **settings) as (pusher, _):
        pusher.push(source, 0)
        seconds["hub_restarted_s"] = _push_with(pusher, weights, 1, fleet.restart_hub, at=0.5)
        seconds["engine_hangs_s"] = _push_with(pusher, weights, 2, lambda: os.killpg(fleet.victim.pid, signal.SIGSTOP), at=0.5)
        os.killpg(fleet.victim.pid, signal.SIGCONT)
        _bring_all_up(fleet, pusher, source, 2)
        seconds["engine_killed_before_s"] = _push_with(pusher, weights, 3, lambda: end(fleet.victim), at=0.0)
        fleet.restart_engine()
        _bring_all_up(fleet, pusher, source, 3)
        seconds["engine_killed_during_s"] = _push_with(pusher, weights, 4, lambda: end(fleet.victim), at=0.5)
        fleet.restart_engine()
        _bring_all_up(fleet, pusher, source, 4)
        end(fleet.victim)
        killed_at = time.perf_counter()
        pusher.push(source, 5)
        seconds["engine_killed_after_s"] = time.perf_counter() - killed_at
    command = [
        sys.executable,
        "-m",
        "benchmarks.weights.killed_trainer",
        fleet.hub_url,
        str(fleet.model_path),
        str(size.bucket_mib),
    ]
    status = subprocess.run(command, check=False).returncode
    if status != -signal.SIGKILL:
        raise RuntimeError(f"the trainer should have been killed in the middle of its push, and ended with status {status}")
    killed_at = time.perf_counter()
    with open_pusher(fleet.hub_url, **settings) as (pusher, _):
        pusher.push(source, 7)
        seconds["trainer_killed_s"] = time.perf_counter() - killed_at
    return seconds


def faulty(weights: Weights, fault: Callable[[], None], *, at: float) -> WeightSource:
    """The weights; the fault comes once, when this share of them was gathered."""
    pending = [fault]

    def gather() -> Iterator[tuple[str, Tensor]]:
        for index, named in enumerate(weights):
            if index >= at * len(weights) and pending:
                pending.pop()()
            yield named

    return WeightSource(gather, sum(weight.numel() for _, weight in weights))


def _push_with(pusher: WeightPusher, weights: Weights, version: int, fault: Callable[[], None], *, at: float) -> float:
    happened_at: list[float] = []

    def timed() -> None:
        happened_at.append(time.perf_counter())
        fault()

    pusher.push(faulty(weights, timed, at=at), version)
    return time.perf_counter() - happened_at[0]


def _bring_all_up(fleet: Fleet, pusher: WeightPusher, source: WeightSource, version: int) -> None:
    """As the trainer does while it waits for data."""

    def is_up() -> bool:
        pusher.catch_up(source, version)
        return num_ready(fleet.hub_url) == len(fleet.engines)

    wait_until(is_up, "every engine was brought up", timeout_s=CATCH_UP_S)
