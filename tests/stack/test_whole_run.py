"""DESIGN's invariants, checked from outside on the whole system: what it wrote to its files, to Redis, and to the process table."""

import msgspec
import numpy as np
import pytest

from tests.stack.standalone_run import StandaloneRun

MAX_MISMATCH = 1e-4
"""Between the engine's and the trainer's log-probabilities, both float32 on a CPU."""

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def check_lineage(run: StandaloneRun, *, num_updates: int) -> None:
    """Nothing stale, nothing trained twice, nothing lost; every sampled token with its logprob and version."""
    history = run.stream_history()
    lineage = run.lineage
    assert [line.version for line in lineage] == list(range(1, num_updates + 1))
    trained = [trajectory_id for line in lineage for trajectory_id in line.trajectory_ids]
    assert len(trained) == len(set(trained)), "a trajectory was trained twice in one lineage"
    assert set(trained) <= history.entered.keys()
    given_up = {history.entered[trajectory_id].group_id for trajectory_id in history.left - set(trained)}
    assert len(given_up) == history.num_discarded_groups, "a finished trajectory left the stream neither trained nor discarded"

    ratio = run.configuration.rollout.async_generation_ratio
    for line in lineage:
        oldest_trained = []
        for trajectory_id in line.trajectory_ids:
            trajectory = history.entered[trajectory_id]
            is_sampled = trajectory.loss_mask == 1
            assert is_sampled.any()
            assert (trajectory.token_versions[is_sampled] >= 0).all()
            assert (trajectory.logprobs[is_sampled] < 0).all()
            assert np.isfinite(trajectory.logprobs).all()
            assert (trajectory.logprobs[~is_sampled] == 0).all()
            lags = line.version - 1 - trajectory.token_versions[is_sampled]
            assert (lags >= 0).all()
            oldest_trained += lags[lags <= ratio].tolist()
        assert line.lag_max == max(oldest_trained), "tokens over the bound are masked, all others are trained"


def test_whole_system_trains_and_keeps_its_invariants(new_run):
    run = new_run(num_updates=4, checkpoint_every=4)
    run.start()
    run.wait_until((run.directory / "run.yaml").is_file, description="its resolved run file")
    seen = []

    def has_trained() -> bool:
        if books := run.books():
            seen.append(books)
        return len(run.lineage) == 4

    run.wait_until(has_trained, description="four updates")
    assert run.wait() == 0, run.output[-5000:]
    assert run.left_processes() == []

    assert len(seen) > 10
    assert all(books.is_balanced for books in seen)
    for books in seen:
        discarded = sum(books.discarded.values())
        assert books.started - discarded <= (books.version + 1 + books.async_generation_ratio) * books.batch_groups
    check_lineage(run, num_updates=4)
    first_update = msgspec.json.decode((run.directory / "metrics.jsonl").read_bytes().splitlines()[0])
    assert first_update["logprob_mismatch_max"] <= MAX_MISMATCH
    assert {path.name for path in (run.directory / "logs").iterdir()} == {
        f"{name}.log" for name in ("redis", "engine-0", "hub", "agents", "trainer")
    }


def test_killed_trainer_is_started_again_loses_nothing_and_trains_nothing_twice(new_run, timeline):
    run = new_run(num_updates=6, checkpoint_every=2)
    run.start()
    run.wait_until(lambda: len(run.lineage) >= 3, description="an update after the first checkpoint")
    timeline.fault("trainer", "SIGKILL to rank 0")
    run.kill_trainer()
    trained_before = {trajectory_id for line in run.lineage for trajectory_id in line.trajectory_ids}
    run.wait_until(lambda: "it is started again" in run.output, description="headrace up has noticed")
    timeline.noticed("headrace", "starts the trainer again")
    assert run.wait() == 0, run.output[-5000:]
    timeline.recovered("trainer", "made the remaining updates")
    assert "trainer exited with status 137 (killed by SIGKILL); it is started again in 0.5 s" in run.output
    assert run.left_processes() == []
    check_lineage(run, num_updates=6)
    trained = {trajectory_id for line in run.lineage for trajectory_id in line.trajectory_ids}
    assert trained_before <= trained | run.stream_history().remaining


def test_run_that_may_restart_nothing_ends_with_its_trainer_and_goes_on_when_started_again(new_run, timeline):
    run = new_run(num_updates=6, checkpoint_every=2, max_restarts=0)
    run.start()
    run.wait_until(lambda: len(run.lineage) >= 3, description="an update after the first checkpoint")
    timeline.fault("trainer", "SIGKILL to rank 0")
    run.kill_trainer()
    assert run.wait() == 1
    timeline.noticed("headrace", "ended the run, as it may restart nothing")
    assert "trainer exited with status 137 (killed by SIGKILL)" in run.output
    assert run.left_processes() == []
    trained_before = {trajectory_id for line in run.lineage for trajectory_id in line.trajectory_ids}

    run.start()
    assert run.wait() == 0, run.output[-5000:]
    timeline.recovered("run", "was started again and made the remaining updates")
    assert run.left_processes() == []
    check_lineage(run, num_updates=6)
    trained = {trajectory_id for line in run.lineage for trajectory_id in line.trajectory_ids}
    assert trained_before <= trained | run.stream_history().remaining
