"""What a weight update costs on real SGLang engines on the CPU, against a bare broadcast and against the common way.

For each size of model: engines and a hub are started, calls run through the hub all the time, and the trainer's own pusher updates
the weights in place. Then faults: an engine is killed, one hangs, the hub is restarted, each in the middle of an update. The last
line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.weights.fleet import Fleet, Load
    from benchmarks.weights.models import Size
    from trainer.weight_buckets import WeightSource
    from trainer.weight_push import WeightPusher

    Weights = list[tuple[str, Tensor]]

Figures = dict[str, float]

STEP_TIMEOUT_S = 20.0
CATCH_UP_S = 60.0
DEFAULT_BUCKET_MIB = 512
AFTER_COMMON_WAY = 99
"""Pushed after it, so that calls which it left waiting are answered."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights",
        description=__doc__,
        epilog="example:\n  python -m benchmarks.weights --sizes 25 --updates 3",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 250, 1000], help="models, MB of float32 (default 25 250 1000)")
    parser.add_argument("--updates", type=int, default=5, help="updates measured for each size (default 5)")
    parser.add_argument("--engines", type=int, default=2, help="engines (default 2)")
    parser.add_argument("--callers", type=int, default=8, help="calls that run at a time (default 8)")
    arguments = parser.parse_args()

    from benchmarks.weights.models import SIZES

    report: dict[str, Figures] = {}
    for megabytes in arguments.sizes:
        is_smallest = megabytes == min(arguments.sizes)
        with tempfile.TemporaryDirectory() as folder:
            report[str(megabytes)] = figures = measure(SIZES[megabytes], Path(folder), arguments, has_faults=is_smallest)
        print(f"{megabytes} MB: {json.dumps(figures)}", flush=True)
    print(json.dumps(summary(report)))


def measure(size: Size, folder: Path, arguments: argparse.Namespace, *, has_faults: bool) -> Figures:
    """The figures of one size of model."""
    from benchmarks.weights.broadcasts import bare_broadcast_s
    from benchmarks.weights.fleet import Load, started
    from benchmarks.weights.models import make_model

    model_path = make_model(size, folder)
    with started(model_path, folder, num_engines=arguments.engines, timeout_s=STEP_TIMEOUT_S) as fleet:
        with Load(fleet.hub_url, arguments.callers).running() as load:
            with open_pusher(fleet, bucket_mib=DEFAULT_BUCKET_MIB) as (pusher, weights):
                figures = in_place(pusher, weights, load, arguments.updates)
                num_bytes = sum(weight.numel() * 4 for _, weight in weights)
                bare_s = statistics.median(bare_broadcast_s(num_bytes, arguments.engines, count=arguments.updates))
                figures |= {"bare_broadcast_s": bare_s, "pause_vs_broadcast": figures["pause_s_p50"] / bare_s}
                figures |= common_way(fleet, weights, load, ours_s=figures["pause_s_p50"])
                pusher.push(source_of(weights), AFTER_COMMON_WAY)
            if has_faults:
                with open_pusher(fleet, bucket_mib=size.bucket_mib) as (pusher, weights):
                    figures |= recoveries(fleet, pusher, weights, first_version=100)
        figures |= {"requests_failed": load.num_failed, "requests_recomputed": load.num_recomputed}
    return figures


def common_way(fleet: Fleet, weights: Weights, load: Load, *, ours_s: float) -> Figures:
    """The hub finds the engines with a version that it does not know, and holds calls until the next push."""
    from benchmarks.weights.broadcasts import common_way_s

    began = time.perf_counter()
    pause_s = common_way_s(fleet.engine_urls, weights, version=98)
    ended = time.perf_counter()
    lost = 1 - load.tokens_between(began, ended) / max(1, load.tokens_between(2 * began - ended, began))
    return {"common_pause_s": pause_s, "pause_vs_common_way": ours_s / pause_s, "common_tokens_lost": lost}


@contextmanager
def open_pusher(fleet: Fleet, *, bucket_mib: int) -> Iterator[tuple[WeightPusher, Weights]]:
    """The trainer's own, and the weights of its model."""
    import torch
    from transformers import AutoModelForCausalLM

    from shared.configuration import WeightPushSection
    from trainer.hub_client import HubClient
    from trainer.model import start_ranks
    from trainer.weight_push import WeightPusher

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        start_ranks(timeout=timedelta(seconds=60))
    model = AutoModelForCausalLM.from_pretrained(fleet.model_path, dtype=torch.float32)
    pusher = WeightPusher(
        HubClient(fleet.hub_url, timeout_s=120),
        WeightPushSection(backend="gloo", timeout_s=STEP_TIMEOUT_S, bucket_mib=bucket_mib, verify_every=10_000),
        dtype=torch.float32,
        device=torch.device("cpu"),
        patience_s=120,
        notice=lambda text: print(f"  {text[:200]}", flush=True),
        can_check_values=True,
    )
    yield pusher, [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    pusher.close()


def source_of(weights: Weights) -> WeightSource:
    from trainer.weight_buckets import WeightSource

    return WeightSource.of(weights)


def in_place(pusher: WeightPusher, weights: Weights, load: Load, num_updates: int) -> Figures:
    """The first push forms the group and is verified; it is not measured."""
    from trainer.weight_buckets import WeightSource

    source = WeightSource.of(weights)
    pusher.push(source, 0)
    pauses, kept = [], []
    for version in range(1, num_updates + 1):
        time.sleep(1.0)
        began = time.perf_counter()
        times = pusher.push(source, version)
        window_s = time.perf_counter() - began
        pauses.append(times.pause_s)
        time.sleep(1.0)
        # The windows without update lie before and after, so that the machine's drift is in both.
        around = load.tokens_between(began - window_s / 2, began) + load.tokens_between(began + window_s, began + 1.5 * window_s)
        kept.append((load.tokens_between(began, began + window_s), around))
    return {
        "pause_s_p50": statistics.median(pauses),
        "tokens_kept_share": sum(during for during, _ in kept) / max(1, sum(around for _, around in kept)),
    }


def recoveries(fleet: Fleet, pusher: WeightPusher, weights: Weights, *, first_version: int) -> Figures:
    """Seconds from each fault to the end of the update under way. An engine that hung comes back, a killed one does not."""
    from benchmarks.weights.fleet import num_ready
    from trainer.weight_buckets import WeightSource

    def push_with(fault: Callable[[], None], version: int) -> float:
        happened_at: list[float] = []

        def gather() -> Iterator[tuple[str, Tensor]]:
            for index, named in enumerate(weights):
                if index == len(weights) // 2 and not happened_at:
                    happened_at.append(time.perf_counter())
                    fault()
                yield named

        pusher.push(WeightSource(gather, sum(weight.numel() for _, weight in weights)), version)
        return time.perf_counter() - happened_at[0]

    *_, victim = fleet.engines
    seconds = {
        "hub_restarted_s": push_with(fleet.restart_hub, first_version),
        "engine_hangs_s": push_with(lambda: stop(victim), first_version + 1),
    }
    cont(victim)
    caught_up = time.perf_counter()
    while num_ready(fleet.hub_url) < len(fleet.engines) and time.perf_counter() - caught_up < CATCH_UP_S:
        pusher.catch_up(WeightSource.of(weights), first_version + 1)
        time.sleep(0.5)
    seconds["engine_killed_s"] = push_with(lambda: kill(victim), first_version + 2)
    return {"recovery_s_max": max(seconds.values()), **seconds}


def stop(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGSTOP)


def cont(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGCONT)


def kill(process: subprocess.Popen[bytes]) -> None:
    from benchmarks.weights.fleet import end

    end(process)


def summary(report: Mapping[str, Figures]) -> dict[str, object]:
    """The figures by the names that they are tracked by."""
    sizes = sorted(report, key=int)
    return {
        "pause_vs_broadcast": {size: round(report[size]["pause_vs_broadcast"], 2) for size in sizes},
        "pause_ms_250mb_p50": round(report["250"]["pause_s_p50"] * 1e3, 1) if "250" in report else None,
        "tokens_kept_share": {size: round(report[size]["tokens_kept_share"], 3) for size in sizes},
        "requests_failed": sum(report[size]["requests_failed"] for size in sizes),
        "requests_recomputed": sum(report[size]["requests_recomputed"] for size in sizes),
        "recovery_s_max": round(report[sizes[0]]["recovery_s_max"], 2),
        "trajectories_lost": sum(report[size]["requests_failed"] for size in sizes),
        "pause_vs_common_way": {size: round(report[size]["pause_vs_common_way"], 3) for size in sizes},
        "common_way_tokens_lost": {size: round(report[size]["common_tokens_lost"], 3) for size in sizes},
    }


if __name__ == "__main__":
    main()
