"""The whole stack at α = 1 against α = 0 in real time: SGLang on the CPU, Redis, hub, agents and DeepSpeed, on the demo's policy.

Its environment waits as a web shop or a test suite does. Both runs make as many updates, from the same policy and seed.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MEDIAN_S, SIGMA = 1.0, 1.0
"""Of a tool call and of a score."""
WARM_UP = 3
"""Updates that are not timed: the processes start one after the other, and at α = 1 a batch is ready when the trainer is."""
RUN_FILE = Path(__file__).parents[2] / "examples" / "demo.yaml"


@dataclass(frozen=True)
class RealRun:
    """One run, from the end of its `WARM_UP`-th update to that of its last."""

    ratio: float
    on_stale: str
    seed: int
    seconds: float
    num_updates: int
    wait_s: float
    """Of those, in which the trainer waited for data."""
    reward: float
    """Mean of the last quarter of the updates."""

    def __str__(self) -> str:
        return (
            f"seed {self.seed}, α={self.ratio:g}, {self.on_stale}: {self.seconds:.1f} s for {self.num_updates} updates "
            f"after the first {WARM_UP}, waited {self.wait_s:.1f} s, final reward {self.reward:.3f}"
        )


def make_policy(folder: Path, seed: int) -> Path:
    """The demo's policy and tasks."""
    policy = folder / f"policy-{seed}"
    command = [sys.executable, "-m", "examples.tiny_policy", "--output", str(policy), "--seed", str(seed)]
    subprocess.run(command, check=True)
    return policy


def play(folder: Path, policy: Path, *, ratio: float, on_stale: str, seed: int, num_updates: int) -> RealRun:
    """Raises: CalledProcessError if the run fails; its logs are in the run's directory."""
    directory = folder / f"seed-{seed}-ratio-{ratio:g}-{on_stale}"
    run_file = folder / f"{directory.name}.yaml"
    run_file.write_text(
        yaml.safe_dump(_run_file(directory, policy, ratio=ratio, on_stale=on_stale, seed=seed, num_updates=num_updates))
    )
    command = [sys.executable, "-m", "services.standalone.command_line", "up", "--config", str(run_file)]
    with (folder / f"{directory.name}.txt").open("wb") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=True)
    return read(directory, ratio=ratio, on_stale=on_stale, seed=seed)


def read(directory: Path, *, ratio: float, on_stale: str, seed: int) -> RealRun:
    """What a run's metrics.jsonl says; it has more than `WARM_UP` updates."""
    updates = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    last = updates[-max(1, len(updates) // 4) :]
    return RealRun(
        ratio=ratio,
        on_stale=on_stale,
        seed=seed,
        seconds=updates[-1]["time"] - updates[WARM_UP - 1]["time"],
        num_updates=len(updates) - WARM_UP,
        wait_s=sum(update["wait_prev_gen_s"] for update in updates[WARM_UP:]),
        reward=sum(update["reward_mean"] for update in last) / len(last),
    )


def speedup(runs: list[RealRun], on_stale: str) -> float:
    """Seconds at α = 0 / seconds at α = 1 with that policy, over all seeds."""
    synchronous_s = sum(run.seconds for run in runs if run.ratio == 0)
    return synchronous_s / sum(run.seconds for run in runs if run.ratio == 1 and run.on_stale == on_stale)


def _run_file(directory: Path, policy: Path, *, ratio: float, on_stale: str, seed: int, num_updates: int) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(RUN_FILE.read_text())
    raw["run"] = {"id": directory.name, "directory": str(directory), "model_path": str(policy), "seed": seed}
    raw["rollout"] = {
        "rollout_batch_size": 8,
        "num_return_sequences_in_group": 8,
        "async_generation_ratio": ratio,
        "on_stale": on_stale,
        # The tiny policy's updates are large: with the usual threshold the first ones at α = 1 would be synchronous too.
        "kl_fallback_threshold": None,
    }
    raw["redis"] = {"url": "redis://127.0.0.1:0/0"}
    raw["inference_hub"] = {"port": 0}
    agents = raw["env_agents"]
    agents |= {"port": 0, "import_allowlist": ["benchmarks.asynchrony"]}
    agents["environments"][0] |= {
        "import_path": "benchmarks.asynchrony.waiting_calculator:WaitingCalculator",
        "arguments": {"median_s": MEDIAN_S, "sigma": SIGMA, "seed": seed},
        "tasks": {"kind": "parquet", "path": str(policy / "train.parquet")},
    }
    del agents["environments"][0]["evaluation_tasks"]
    trainer = raw["trainer"]
    del trainer["evaluation"]
    trainer |= {"num_updates": num_updates, "checkpoint": {"every_updates": num_updates}}
    return raw
