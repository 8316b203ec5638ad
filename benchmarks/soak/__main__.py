"""Runs the whole stack under load for a long time and says what grew: memory, connections, files, threads, tasks, Redis keys.

Redis, two SGLang engines on the CPU, the hub, two agent processes and the trainer under `headrace up`, training the demo's policy.
Nothing is killed. Memory is compared under load, between the medians of the first and the last fifth of the samples after the
warm-up; what follows the load, between two rests, one after the warm-up and one at the end, in which nothing runs and idle
connections are closed. The samples, a plot and everything that the processes wrote stay in --directory. The last line is a JSON
object.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import live_options

if TYPE_CHECKING:
    from benchmarks.live_run import LiveRun
    from benchmarks.soak.sampling import Sample
    from shared.configuration import Configuration
    from shared.ledger import Books

EXAMPLES = """\
examples:
  python -m benchmarks.soak
  python -m benchmarks.soak --minutes 240 --warm-up 30
  python -m benchmarks.soak --minutes 5 | tail -n 1 | jq .growth_max

The exit status is 1 if something grew by more than it may, or is left when nothing runs any more.
"""
SETTLE_S = 120.0
REST_S = 90.0
"""Longer than anybody keeps a connection that is idle, but for Redis's."""
LONGEST_WARM_UP = 10.0
WARM_UP_SHARE = 1 / 3
SHOWN_EVERY = 12
"""Samples."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of load, warm-up included (default 30)")
    parser.add_argument("--warm-up", type=float, help="minutes (default: a third of --minutes, at most 10)")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two samples (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the run (default 0)")
    live_options.add_arguments(parser, directory="runs/soak")
    options = parser.parse_args()
    if options.warm_up is None:
        options.warm_up = min(LONGEST_WARM_UP, WARM_UP_SHARE * options.minutes)
    if options.warm_up >= options.minutes:
        parser.error(f"--warm-up must be less than --minutes, got {options.warm_up:g} and {options.minutes:g}; play longer")
    folder, policy = live_options.prepare(options)
    report = soak(folder, policy, options)
    print(json.dumps(report))
    return 0 if report["is_sound"] else 1


@dataclass(frozen=True)
class Observed:
    """What a run showed: samples under load, and one in each rest."""

    configuration: "Configuration"
    samples: "list[Sample]"
    rests: "tuple[Sample, Sample]"
    books: "Books"
    has_settled: bool


def soak(folder: Path, policy: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run, from its start to its report."""
    from benchmarks.live_run import LiveRun, run_file

    live = LiveRun(folder, run_file(folder / "run", policy, seed=options.seed, lease_s=30.0), lambda name, text: None)
    print(f"starting; everything goes to {folder}", flush=True)
    live.start()
    try:
        observed = observe(live, folder, options)
    finally:
        live.stop()
    return reported(observed, folder, minutes=options.minutes, warm_up_s=60 * options.warm_up)


def observe(live: "LiveRun", folder: Path, options: argparse.Namespace) -> Observed:
    """Samples a run while it trains, and when it has come to rest."""
    import msgspec
    import redis

    from benchmarks.soak.sampling import sample
    from shared.keys import Keys
    from shared.ledger import TrainingLedger

    live.wait_until(lambda: (folder / "run" / "metrics.jsonl").is_file(), "it trains")
    configuration = live.configuration
    metrics_urls = {"hub": configuration.inference_hub.address, "agents": configuration.env_agents.address}
    samples: list[Sample] = []
    began = time.monotonic()
    with redis.Redis.from_url(configuration.redis.url) as client, (folder / "samples.jsonl").open("wb") as file:
        ledger = TrainingLedger(client, Keys(configuration.run.id))

        def load(seconds: float) -> None:
            begins_at = time.monotonic()
            while (since_s := time.monotonic() - begins_at) < seconds:
                samples.append(sample(live, client, metrics_urls, began=began))
                file.write(msgspec.json.encode(samples[-1]) + b"\n")
                file.flush()
                if len(samples) % SHOWN_EVERY == 1:
                    memory = ", ".join(f"{part} {one.rss_mb:.0f}" for part, one in samples[-1].processes.items())
                    progress = f"[{samples[-1].at_s:5.0f} s of {60 * options.minutes + REST_S:.0f}]"
                    print(f"{progress} version {samples[-1].version}; MB: {memory}", flush=True)
                live.pause(max(0.0, since_s + options.interval - (time.monotonic() - begins_at)))

        def rest() -> "tuple[Sample, bool]":
            has_settled = live.settle(ledger.books, timeout_s=SETTLE_S)
            live.pause(REST_S)
            return sample(live, client, metrics_urls, began=began), has_settled

        load(60 * options.warm_up)
        first, _ = rest()
        live.resume()
        load(60 * (options.minutes - options.warm_up))
        last, has_settled = rest()
        return Observed(configuration, samples, (first, last), ledger.books(), has_settled)


def reported(observed: Observed, folder: Path, *, minutes: float, warm_up_s: float) -> dict[str, Any]:
    """Prints and plots what grew and what is left; the figures."""
    from benchmarks.soak import growth
    from benchmarks.soak.plot import plot
    from shared.keys import Keys

    samples, at_rest, books = observed.samples, observed.rests[-1], observed.books
    growths = growth.all_growth(growth.after_warm_up(samples, warm_up_s), observed.rests)
    leaked = growth.leaked(growths)
    known = {name for name in dir(Keys) if isinstance(getattr(Keys, name), property)} | {"recent"}
    left = growth.leaked_keys(
        at_rest,
        observed.configuration.rollout,
        num_live_groups=books.ready + books.unsaved,
        num_environments=len(observed.configuration.env_agents.environments),
    )
    left += growth.unknown_keys(at_rest, sorted(known))
    plot(samples, folder / "memory.png", warm_up_s=warm_up_s)
    print(f"\n{'process':<10}{'quantity':<18}{'after warm-up':>14}{'at the end':>12}{'growth':>9}")
    for one in growths:
        mark = "  !" if one in leaked else ""
        print(f"{one.part:<10}{one.quantity:<18}{one.first:>14.1f}{one.last:>12.1f}{one.share:>9.1%}{mark}")
    print(f"\nkeys at rest: {dict(at_rest.sizes)}")
    for problem in left:
        print(f"problem: {problem}")
    memory_growth = {one.part: round(one.share, 4) for one in growths if one.quantity == "rss_mb"}
    return {
        "minutes": minutes,
        "warm_up_minutes": warm_up_s / 60,
        "versions": samples[-1].version,
        "growth_max": max(memory_growth.values()),
        "growth": memory_growth,
        "leaked": [f"{one.part} {one.quantity}: {one.first:g} → {one.last:g}" for one in leaked],
        "leaked_keys": left,
        "is_sound": observed.has_settled and not leaked and not left,
    }


if __name__ == "__main__":
    sys.exit(main())
