"""An update of our trainer against a step of TRL's GRPOTrainer, on the same model and batch, and what a checkpoint costs.

Each contestant is a process of its own; their rounds alternate, and medians are compared. Peak memory is what a process holds at
most beyond what it held with its libraries imported. Float32, SDPA, one thread each. The last line is a JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_EPISODES = 16
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Entry:
    """A contestant by name: what it runs and with which settings."""

    name: str
    module: str
    arguments: tuple[str, ...]


@dataclass
class Result:
    tokens: int
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.median("seconds")

    @property
    def peak(self) -> int:
        return max(int(answer["peak"]) for answer in self.answers)

    def median(self, name: str) -> float:
        return statistics.median(answer[name] for answer in self.answers)


def ours(name: str, *, tokens: int, gradient_checkpointing: bool, redis_url: str) -> Entry:
    flags = ("--tokens", str(tokens), "--gradient-checkpointing", str(int(gradient_checkpointing)), "--redis", redis_url)
    return Entry(name, "benchmarks.trainer.ours", flags)


def theirs(name: str, *, rows: int, gradient_checkpointing: bool) -> Entry:
    flags = ("--rows", str(rows), "--gradient-checkpointing", str(int(gradient_checkpointing)))
    return Entry(name, "benchmarks.trainer.theirs", flags)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer",
        description=__doc__,
        epilog="example:\n  python -m benchmarks.trainer --seconds 120",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=360.0, help="for rounds; at least one of each (default: %(default)g)")
    parser.add_argument("--more", action="store_true", help="also both without recomputing activations, and TRL row by row")
    parser.add_argument("--keep", type=Path, help="where models and logs are left (default: they are removed)")
    arguments = parser.parse_args()
    from benchmarks.redis_server import served_redis
    from benchmarks.trainer import workload

    with tempfile.TemporaryDirectory() as temporary, served_redis() as redis_url:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = measure_checkpoint(folder)
        workload.STEP_MODEL.save(folder / "model")
        entries = [
            ours("headrace", tokens=4096, gradient_checkpointing=True, redis_url=redis_url),
            theirs("TRL, its defaults", rows=8, gradient_checkpointing=True),
        ]
        if arguments.more:
            entries += [
                ours("headrace, no recomputing", tokens=4096, gradient_checkpointing=False, redis_url=redis_url),
                theirs("TRL, no recomputing", rows=8, gradient_checkpointing=False),
                theirs("TRL, row by row", rows=1, gradient_checkpointing=True),
            ]
        results = play(entries, folder, seconds=arguments.seconds)
    print(table(results))
    print(json.dumps(report(results, checkpoint)))


def play(entries: list[Entry], folder: Path, *, seconds: float) -> dict[str, Result]:
    """Rounds in turn until `seconds` are over, one of each contestant at least, after one that is not counted.

    The first update of a process is slower: memory is new, and ours scores its first batch once more to compare engine and trainer.
    """
    from benchmarks.trainer.channel import Contestant

    deadline = time.monotonic() + seconds
    results: dict[str, Result] = {}
    with ExitStack() as stack:
        contestants = {}
        for index, entry in enumerate(entries):
            shared = [str(folder / "model"), "--episodes", str(NUM_EPISODES)]
            log = folder / f"contestant-{index}.log"
            contestant = Contestant(entry.module, [*shared, *entry.arguments], log=log, environment=environment())
            contestants[entry.name] = stack.enter_context(contestant)
            results[entry.name] = Result(tokens=contestant.wait()["tokens"])
        for contestant in contestants.values():
            contestant.ask()
        while not all(result.answers for result in results.values()) or time.monotonic() < deadline:
            for name, contestant in contestants.items():
                answer = contestant.ask()
                results[name].answers.append(answer)
                print(f"{name}: {answer['seconds']:.2f} s, {answer['cpu_s']:.2f} s of CPU", flush=True)
    return results


def measure_checkpoint(folder: Path) -> dict[str, float]:
    """Seconds that a save blocks, and that a new process takes from its start to the first step."""
    from benchmarks.trainer import workload
    from benchmarks.trainer.channel import Contestant

    model = folder / "checkpoint-model"
    workload.CHECKPOINT_MODEL.save(model)
    paths = [str(model), str(folder / "run")]
    with Contestant("benchmarks.trainer.checkpointing", paths, log=folder / "save.log", environment=environment()) as saving:
        saved = saving.wait()
    started = time.monotonic()
    arguments = [*paths, "--resume"]
    with Contestant(
        "benchmarks.trainer.checkpointing", arguments, log=folder / "resume.log", environment=environment()
    ) as resuming:
        resumed = resuming.wait()
        resume_s = time.monotonic() - started
    print(
        f"checkpoint: training stands still for {saved['block_s']:.2f} s ({saved['block_cpu_s']:.2f} s of CPU), it is durable "
        f"after {saved['durable_s']:.1f} s; a new process has it after {resume_s:.1f} s ({resumed['cpu_s']:.1f} s of CPU)",
        flush=True,
    )
    return {"block_s": saved["block_s"], "durable_s": saved["durable_s"], "resume_s": resume_s}


def environment() -> Mapping[str, str]:
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))}


def table(results: Mapping[str, Result]) -> str:
    rows = [f"{'':26}{'tokens/s':>10}{'s, median':>11}{'CPU s':>9}{'rounds':>8}{'peak MB':>9}"]
    for name, result in results.items():
        times = f"{result.median('seconds'):11.2f}{result.median('cpu_s'):9.2f}{len(result.answers):8}"
        rows.append(f"{name:26}{result.tokens_per_s:10.0f}{times}{result.peak / 1e6:9.0f}")
    return "\n".join(rows)


def report(results: Mapping[str, Result], checkpoint: Mapping[str, float]) -> dict[str, float]:
    own, other, *_ = results.values()
    return {
        "tokens_per_s_vs_trl": round(own.tokens_per_s / other.tokens_per_s, 2),
        "peak_memory_vs_trl": round(own.peak / other.peak, 3),
        "padding_share": round(own.median("padding_share"), 4),
        "rank_imbalance": round(own.median("rank_imbalance"), 4),
        "overhead_share": round(own.median("overhead_share"), 4),
        "checkpoint_block_s": round(checkpoint["block_s"], 2),
        "resume_s": round(checkpoint["resume_s"], 1),
    }


if __name__ == "__main__":
    main()
