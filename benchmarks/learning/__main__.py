"""Does it learn as well from stale data? The demo's task, every policy loss at lags 1, 2 and 4, against synchronous training.

Agents, environment, advantages, batch plan, loss and DeepSpeed step are the product's. Sampling is torch in the same process, so
that all data of an update has the same lag, and every run sees the same number of samples. The last line is a JSON object.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from benchmarks.learning.experiment import Arm

LAGS = (1, 2, 4)
CORRECTED = ("ppo", "tis", "cispo", "topr", "decoupled_ppo")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__,
        epilog="examples:\n  python -m benchmarks.learning --output runs/learning\n"
        "  python -m benchmarks.learning --seeds 0 --only ppo --updates 10",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--updates", type=int, default=20, help="of each run, of 16 groups of 8 (default: %(default)s)")
    parser.add_argument("--only", default="", help="arms whose name contains this; synchronous always runs (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once, of one thread each (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where curves.json and learning.png go (default: nowhere)")
    arguments = parser.parse_args()
    measure(arguments.seeds, arguments.updates, arguments.only, arguments.jobs, arguments.output)


def measure(seeds: Sequence[int], num_updates: int, only: str, jobs: int, output: Path | None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # Of the processes too; torch in threads of two runs would wait for itself.
    from benchmarks.learning import report
    from benchmarks.learning.experiment import Curve, Scale, learn

    scale = Scale(num_updates)
    curves: list[Curve] = []
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress, _processes(jobs) as processes:
        policies = {seed: Path(folder) / f"policy-{seed}" for seed in seeds}
        for seed in progress.track(seeds, description="policies"):
            _make_policy(policies[seed], seed)
        runs = {processes.submit(learn, arm, seed, policies[seed], scale): arm for arm in arms(only) for seed in seeds}
        for run in progress.track(as_completed(runs), total=len(runs), description="runs"):
            curves.append(run.result())
            console.print(report.line(curves[-1]))
    curves.sort(key=lambda curve: (curve.arm.lag, curve.arm.name, curve.seed))
    print(report.table(curves, scale))
    if output:
        report.write(curves, output)
    print(report.json_line(curves))


def arms(only: str) -> list["Arm"]:
    """Synchronous first, then those whose name contains `only`."""
    from benchmarks.learning.experiment import Arm

    stale = [Arm(variant, lag) for lag in LAGS for variant in (*CORRECTED, "vanilla")]
    return [Arm("ppo", 0), *(arm for arm in stale if only in arm.name)]


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A process for each run, because each joins a process group of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as processes:
        try:
            yield processes
        finally:
            processes.shutdown(cancel_futures=True)


def _make_policy(folder: Path, seed: int) -> None:
    command = [sys.executable, "-m", "examples.tiny_policy", "--output", str(folder), "--seed", str(seed)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
