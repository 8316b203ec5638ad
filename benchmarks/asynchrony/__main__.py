"""What asynchrony gains, under virtual time: hours on 128 GPUs in seconds on one core. The last line is a JSON object.

The rollout loop, the environment agents, the ledger in a Redis and the trainer's choice of batches are the product's; engines,
environments and the optimiser's step are models. With --real, instead: the whole stack at α = 1 against α = 0.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.asynchrony",
        description=__doc__,
        epilog="example:\n  python -m benchmarks.asynchrony --only replication",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="rows whose name contains this; 'stale' are those on waste (default: all)")
    parser.add_argument("--real", action="store_true", help="measure real_stack_speedup instead, in real time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of --real (default: 0)")
    parser.add_argument("--updates", type=int, default=16, help="of each run of --real, more than 3 (default: %(default)s)")
    parser.add_argument(
        "--on-stale",
        choices=["mask", "wait", "regenerate", "drop"],
        nargs="+",
        default=["mask"],
        help="of --real: a run at α = 1 for each, the first being the figure (default: mask)",
    )
    parser.add_argument("--keep", type=Path, help="where the runs of --real are left (default: they are removed)")
    arguments = parser.parse_args()
    if arguments.real:
        measure_real_stack(arguments.seeds, arguments.updates, arguments.on_stale, arguments.keep)
    else:
        simulate_all(arguments.only)


def measure_real_stack(seeds: Sequence[int], num_updates: int, policies: Sequence[str], keep: Path | None) -> None:
    from benchmarks.asynchrony import real_stack, report

    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            policy = real_stack.make_policy(folder, seed)
            for ratio, on_stale in [(0, policies[0]), *((1, on_stale) for on_stale in policies)]:
                runs.append(real_stack.play(folder, policy, ratio=ratio, on_stale=on_stale, seed=seed, num_updates=num_updates))
                _say(f"{runs[-1]}\n")
    print("\n".join(map(str, runs)))
    print(f"each tool call and score waits LogN(median {real_stack.MEDIAN_S:g} s, σ {real_stack.SIGMA:g})")
    for on_stale in policies:
        rewards = [real_stack.final_reward(runs, ratio=ratio, on_stale=on_stale) for ratio in (1, 0)]
        print(
            f"α = 1 with on_stale: {on_stale}: {real_stack.speedup(runs, on_stale):.2f} times as fast as α = 0, "
            f"final reward {rewards[0]:.3f} against {rewards[1]:.3f}"
        )
    print(report.json_line([], [], real_stack.speedup(runs, policies[0])))


def simulate_all(only: str) -> None:
    from benchmarks.asynchrony import experiments, report
    from benchmarks.asynchrony.outcome import Outcome
    from benchmarks.asynchrony.stack import simulate
    from benchmarks.asynchrony.system import System
    from benchmarks.asynchrony.virtual_time import run
    from benchmarks.asynchrony.workloads import Workload
    from benchmarks.redis_server import served_redis

    began = time.monotonic()
    rows, wasted = [], []
    known: dict[tuple[System, Workload, int], Outcome] = {}
    with served_redis() as url:

        def measure(system: System, workload: Workload, num_updates: int, name: str) -> Outcome:
            """Systems that occur in several rows run once."""
            key = (system, workload, num_updates)
            if key not in known:
                progress = _progress(f"{time.monotonic() - began:4.0f} s  {name}", num_updates)
                known[key] = run(simulate(system, workload, url, num_updates=num_updates, progress=progress))
            return known[key]

        for each in experiments.comparisons():
            if only in each.name:
                synchronous = measure(each.synchronous, each.workload, each.synchronous_updates, f"{each.name}: synchronous")
                ours = measure(each.ours, each.workload, each.ours_updates, f"{each.name}: ours")
                rows.append(report.row(each, synchronous, ours))
                _say(report.line(rows[-1]) + "\n")
        for case in experiments.waste():
            if only in f"stale {case.name}":
                wasted.append((case, measure(case.system, case.workload, case.num_updates, case.name)))
                _say(report.waste_line(*wasted[-1]) + "\n")
    print(f"\n{report.table(rows)}\n\n{report.waste_table(wasted)}\n")
    print(f"{time.monotonic() - began:.0f} s; real_stack_speedup is measured with --real")
    print(report.json_line(rows, wasted, None))


def _progress(name: str, num_updates: int) -> Callable[[int], None]:
    """Shows the update under way on a terminal's one line."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda update: _say(f"\r{name}, update {update} of {num_updates}\033[K" + ("\r\033[K" if update == num_updates else ""))


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    main()
