"""Writes what a run leaves in its directory, for tests of what reads it."""

import json
from pathlib import Path
from typing import Any


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def update(version: int, **changes: Any) -> dict[str, Any]:
    return {
        "update": version,
        "version": version,
        "time": 1.0,
        "reward_mean": 0.5,
        "success_rate": 0.5,
        "lag_max": 1,
        "wait_prev_gen_s": 0.25,
        "weight_pause_s": 0.1,
        "num_trajectories": 8,
        **changes,
    }


def evaluation(version: int, success_rate: float, *, greedy: bool = False) -> dict[str, Any]:
    result = {"episodes": 10, "mean_reward": success_rate, "success_rate": success_rate, "outcomes": {"completed": 10}}
    return {"version": version, "greedy": greedy, "results": {"calculator": result}, "time": 1.0}


def lineage(version: int, *groups: str, size: int = 2, lag_max: int = 1) -> dict[str, Any]:
    ids = [f"{group}:{index}" for group in groups for index in range(size)]
    return {"version": version, "group_ids": groups, "trajectory_ids": ids, "lag_max": lag_max}
