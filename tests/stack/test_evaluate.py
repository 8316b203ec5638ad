"""`headrace evaluate` as a user runs it: on a checkpoint, with a real engine, and nothing of it left afterwards."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.stack.standalone_run import run_file

NUM_EPISODES = 4

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_model: Path) -> Path:
    """As the trainer leaves it: the export, and what it is of."""
    directory = tmp_path / "checkpoints" / "v00003"
    shutil.copytree(tiny_model, directory / "model")
    (directory / "run_state.json").write_text('{"version": 3, "group_ids": [], "fingerprint": "x", "num_ranks": 1}')
    return directory


def test_checkpoint_is_evaluated_by_processes_of_its_own(tmp_path, tiny_model, checkpoint):
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(run_file(tmp_path / "run", tiny_model, num_updates=1, checkpoint_every=1)))
    output = tmp_path / "evaluated"
    command = [sys.executable, "-m", "services.standalone.command_line", "evaluate", "--config", str(mine)]
    command += ["--checkpoint", str(checkpoint), "--output", str(output), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr[-5000:]

    found = json.loads(ended.stdout)
    assert found == json.loads((output / "evaluation.json").read_text())
    assert (found["version"], found["model"], found["greedy"]) == (3, str(checkpoint / "model"), False)
    [(name, result)] = found["results"].items()
    assert (name, result["episodes"]) == ("guessing", NUM_EPISODES)
    assert sum(result["outcomes"].values()) == NUM_EPISODES
    low, high = result["success_interval"]
    assert 0 <= low <= result["success_rate"] <= high <= 1

    episodes = [json.loads(line) for line in (output / "trajectories.jsonl").read_text().splitlines()]
    assert sorted(episode["task_id"] for episode in episodes) == ["1000000", "1000001", "1000002", "1000003"]
    assert all(f"Say {episode['task_id']}." in episode["prompt"] for episode in episodes)
    assert sum(episode["num_sampled_tokens"] for episode in episodes) / NUM_EPISODES == result["mean_sampled_tokens"]
    assert f"guessing: {NUM_EPISODES} of {NUM_EPISODES} episodes" in ended.stderr
    assert not (tmp_path / "run").exists(), "the run's own directory is left alone"
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(output) in " ".join(process.info["cmdline"] or ())]
