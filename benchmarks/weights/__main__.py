"""What a weight update costs on real SGLang engines on the CPU, against a bare broadcast and against the common way.

For each size of model: engines and a hub are started, sessions of several turns run through the hub all the time, and the
trainer's own pusher updates the weights: in place beside bare broadcasts of the same bytes, with retraction, in two groups by
turns, through shared memory, and by the common way. On the smallest, faults: an engine is killed before, during and after an
update, one hangs, the hub is restarted and the trainer killed in the middle. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.weights.fleet import Fleet
    from benchmarks.weights.load import Load
    from benchmarks.weights.models import Size
    from benchmarks.weights.pushes import Weights

Figures = dict[str, Any]

GAP_S = 1.0
OTHER_WAYS_SHARE = 0.4
"""Of the seconds of the way that is compared with the broadcast."""
COMMON_WAY_VERSION = 98
"""One that the hub does not know: it holds calls until the next push."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights",
        description=__doc__,
        epilog="example:\n  python -m benchmarks.weights --sizes 25 --seconds 10",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 250, 1000], help="models, MB of float32 (default 25 250 1000)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=15,
        help="of updates in place for each size, and two at least; less for other ways (default 15)",
    )
    parser.add_argument("--engines", type=int, default=2, help="engines (default 2)")
    parser.add_argument("--callers", type=int, default=8, help="calls that run at a time (default 8)")
    parser.add_argument("--no-faults", action="store_true", help="leave the faults out")
    arguments = parser.parse_args()
    # Engines are processes of their own, which only the way out of this one ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    from benchmarks.weights.models import SIZES

    report: dict[str, Figures] = {}
    for megabytes in arguments.sizes:
        has_faults = megabytes == min(arguments.sizes) and not arguments.no_faults
        with tempfile.TemporaryDirectory() as folder:
            report[str(megabytes)] = measure(SIZES[megabytes], Path(folder), arguments, has_faults=has_faults)
    print(json.dumps(summary(report)))


def measure(size: Size, folder: Path, arguments: argparse.Namespace, *, has_faults: bool) -> Figures:
    """The figures of one size of model."""
    from benchmarks.weights.faults import recoveries
    from benchmarks.weights.fleet import started
    from benchmarks.weights.load import Load
    from benchmarks.weights.models import make_model
    from benchmarks.weights.pushes import weights_of

    figures: Figures = {}

    def note(name: str, found: Figures) -> None:
        figures[name] = found
        print(f"{size.megabytes} MB {name}: {json.dumps(found)}", flush=True)

    with started(make_model(size, folder), folder, num_engines=arguments.engines, timeout_s=size.timeout_s) as fleet:
        weights = weights_of(fleet.model_path)
        with Load(fleet.hub_url, arguments.callers).running() as load:
            for name, found in ways(fleet, size, weights, load, arguments):
                note(name, found)
            note("common_way", common_way(fleet, weights, load))
            if has_faults:
                note("faults", recoveries(fleet, size, weights))
        note(
            "calls", {"answered": len(load.calls), "failed": load.num_failed, "cut": sum(not call.is_whole for call in load.calls)}
        )
    return figures


def ways(fleet: Fleet, size: Size, weights: Weights, load: Load, arguments: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Each way of a push, after the others, on the same engines."""
    from benchmarks.weights.broadcasts import BareBroadcast
    from benchmarks.weights.pushes import hit_rates, measured

    num_bytes = sum(weight.numel() * weight.element_size() for _, weight in weights)
    settings: dict[str, dict[str, Any]] = {
        "in_place": {},
        "retract": {"mode": "retract"},
        "rolling": {"rolling_groups": 2},
        "tensor": {"transport": "tensor"},
    }
    for name, section in settings.items():
        since = len(load.calls)
        bare = BareBroadcast(num_bytes, arguments.engines) if name == "in_place" else None
        is_compared = bare is not None
        seconds = arguments.seconds if is_compared else arguments.seconds * OTHER_WAYS_SHARE
        section["timeout_s"] = size.push_timeout_s
        pushes = measured(
            fleet.hub_url, weights, load, seconds=seconds, at_least=1 + is_compared, gap_s=GAP_S, bare=bare, **section
        )
        if bare is not None:
            bare.close()
        calls = load.calls[since:]
        yield (
            name,
            {
                **pushes.figures(),
                "recomputed": sum(call.num_retractions > 0 for call in calls),
                "cut": sum(not call.is_whole for call in calls),
                "hit_rate": hit_rates(calls),
            },
        )


def common_way(fleet: Fleet, weights: Weights, load: Load) -> Figures:
    """The window ends when the callers whose calls were aborted are answered again, by new weights."""
    from benchmarks.weights.broadcasts import common_way_s
    from benchmarks.weights.pushes import open_pusher, source_of

    began = time.perf_counter()
    pause_s = common_way_s(fleet.engine_urls, weights, version=COMMON_WAY_VERSION)
    window_s = time.perf_counter() - began
    tokens = load.tokens_between(began, began + window_s)
    with open_pusher(fleet.hub_url) as (pusher, _):
        pusher.push(source_of(weights), 0)
        time.sleep(max(GAP_S, window_s))
    without = load.tokens_between(began - window_s, began)
    return {"pause_s": pause_s, "tokens": tokens, "tokens_without": without}


def summary(report: dict[str, Figures]) -> dict[str, object]:
    """The figures by the names that they are tracked by."""
    sizes = sorted(report, key=int)

    def of(way: str, figure: str) -> dict[str, float]:
        return {size: report[size][way][figure] for size in sizes}

    faults = report[sizes[0]].get("faults")
    return {
        "pause_vs_broadcast": of("in_place", "pause_vs_bare"),
        "pause_vs_quiet_broadcast": of("in_place", "pause_vs_quiet_bare"),
        "pause_ms_250mb_p50": round(report["250"]["in_place"]["pause_s"] * 1e3, 1) if "250" in report else None,
        "broadcast_ms_250mb_p50": round(report["250"]["in_place"]["bare_s"] * 1e3, 1) if "250" in report else None,
        "tokens_kept_share": of("in_place", "tokens_kept"),
        "tokens_kept_share_rolling": of("rolling", "tokens_kept"),
        "lost_s_by_way": {way: of(way, "lost_s") for way in ("in_place", "retract", "rolling", "tensor")},
        "requests_failed": sum(report[size]["calls"]["failed"] for size in sizes),
        "requests_aborted": sum(report[size]["in_place"]["cut"] for size in sizes),
        "requests_recomputed": sum(report[size]["in_place"]["recomputed"] for size in sizes),
        "recovery_s_max": round(max(faults.values()), 2) if faults else None,
        "trajectories_lost": sum(report[size]["calls"]["failed"] for size in sizes),
        "pause_vs_common_way": {
            size: round(report[size]["in_place"]["pause_s"] / report[size]["common_way"]["pause_s"], 3) for size in sizes
        },
    }


if __name__ == "__main__":
    main()
