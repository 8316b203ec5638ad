"""The trainer as a process: its command line, its files, and what it leaves when it is stopped or killed."""

import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import redis

from shared.errors import EngineError
from shared.ledger import TrainingLedger
from tests.trainer.run_support import BATCH_GROUPS, GROUP_SIZE, finished, lines, living_lineage
from trainer import train


def wait_for_update(process, number):
    """Reads the console until the line of update `number`."""
    for line in process.stdout:
        if line.startswith(f"update {number}/"):
            return
    pytest.fail(f"the trainer ended before update {number}: {process.stderr.read()}")


def test_help_shows_examples(repository):
    command = [sys.executable, str(repository / "trainer" / "train.py"), "--help"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "deepspeed trainer/train.py --config run.yaml" in completed.stdout


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.learning_rat=1", "unknown key 'trainer.learning_rat'; did you mean 'learning_rate'?"),
        ("redis.url=redis://127.0.0.1:1/0", "redis.url must be a reachable Redis, got 'redis://127.0.0.1:1/0'"),
        ("trainer.deepspeed={gradient_clipping: 7}", "trainer.deepspeed.gradient_clipping is 7"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(start, run_file, override, sentence):
    status, _, errors = finished(start(run_file, override))
    said = [line for line in errors.splitlines() if not line.startswith("[")]
    assert status == 2
    assert len(said) == 1
    assert sentence in said[0]


@pytest.mark.parametrize("error", [redis.ConnectionError("gone"), redis.TimeoutError("gone"), EngineError("gone")])
def test_what_was_there_and_went_away_is_no_bad_input_and_worth_another_start(run_file, monkeypatch, capsys, error):
    @contextmanager
    def training(run, stop):
        raise error
        yield

    monkeypatch.setattr("trainer.startup.training", training)
    monkeypatch.setattr("trainer.stopping.StopSignal.install", lambda stop: None)
    assert train.main(["--config", str(run_file)]) == train.FAILED == 1
    assert capsys.readouterr().err == "trainer: gone\n"


@pytest.mark.stack
@pytest.mark.timeout(240)
def test_a_run_with_a_critic_is_stopped_and_goes_on_with_it(start, run_file, agents):
    settings = ("trainer.adv_estimator=gae", "trainer.critic={warmup_updates: 1}", "trainer.kl={coefficient: 0.1, place: reward}")
    status, _, errors = finished(start(run_file, *settings, "trainer.num_updates=2"))
    assert status == 0, errors
    folder = run_file.parent / "checkpoints" / "v00002" / "deepspeed"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"policy", "critic"}
    status, _, errors = finished(start(run_file, *settings, "trainer.num_updates=3"))
    assert status == 0, errors
    metrics = lines(run_file.parent / "metrics.jsonl")
    assert [line["version"] for line in metrics] == [1, 2, 3]
    assert [line["learning_rate"] for line in metrics] == [0, 1e-4, 1e-4], "the first update warms the critic up"
    assert all(line["value_loss"] > 0 and line["value_grad_norm"] > 0 for line in metrics)
    status, _, errors = finished(start(run_file, "trainer.num_updates=4"))
    assert status == 2
    assert "must be of the model" in errors


@pytest.mark.stack
@pytest.mark.timeout(240)
def test_a_run_with_corrections_and_an_adaptive_kl_goes_on_with_its_coefficient(start, run_file, agents):
    settings = (
        "trainer.pg_variant=decoupled_ppo",
        "trainer.ppo_epochs=2",
        "trainer.correction={action: mask, level: geometric, low: 0.01, high: 100, batch_normalise: true}",
        "trainer.kl={coefficient: 0.1, controller: adaptive, target: 100, horizon: 40}",
    )
    status, _, errors = finished(start(run_file, *settings, "trainer.num_updates=2"))
    assert status == 0, errors
    status, _, errors = finished(start(run_file, *settings, "trainer.num_updates=3"))
    assert status == 0, errors
    metrics = lines(run_file.parent / "metrics.jsonl")
    factor = 1 - 0.2 * BATCH_GROUPS * GROUP_SIZE / 40
    assert [line["kl_coefficient"] for line in metrics] == pytest.approx([0.1, 0.1 * factor, 0.1 * factor**2])
    assert all(0 < line["kl_reference"] < 100 for line in metrics)


@pytest.mark.stack
@pytest.mark.timeout(240)
def test_a_run_of_two_ranks_leaves_metrics_lineage_and_checkpoints(
    start, run_file, agents, hub, redis_client, keys, deepspeed_on_two_ranks
):
    status, _, errors = finished(start(run_file, launcher=deepspeed_on_two_ranks))
    assert status == 0, errors
    assert hub.versions == [0, 1, 2, 3, 4]
    metrics = lines(run_file.parent / "metrics.jsonl")
    assert [line["version"] for line in metrics] == [1, 2, 3, 4]
    assert {line["num_trajectories"] for line in metrics} == {BATCH_GROUPS * GROUP_SIZE}
    assert all(line["lag_max"] <= 1 for line in metrics)
    assert sorted(path.name for path in (run_file.parent / "checkpoints").iterdir()) == ["v00002", "v00004"]
    assert Counter(len(groups) for groups in living_lineage(run_file.parent).values()) == {BATCH_GROUPS: 4}
    books = TrainingLedger(redis_client, keys).books()
    assert books.is_balanced
    assert (books.version, books.trained, books.unsaved) == (4, 4 * BATCH_GROUPS, 0)


@pytest.mark.stack
@pytest.mark.timeout(240)
def test_stopped_it_saves_killed_it_resumes_and_no_group_trains_twice(start, run_file, agents, redis_client, keys):
    endless = "trainer.num_updates=1000"
    process = start(run_file, endless, "trainer.checkpoint.every_updates=1000")
    wait_for_update(process, 3)
    process.send_signal(signal.SIGTERM)
    status, _, errors = finished(process)
    assert status == 0, errors
    (stopped_at,) = [int(path.name[1:]) for path in (run_file.parent / "checkpoints").iterdir()]
    assert stopped_at >= 3

    process = start(run_file, endless, "trainer.checkpoint.every_updates=1000")
    wait_for_update(process, stopped_at + 2)
    process.kill()
    process.wait()

    last = stopped_at + 6
    status, output, errors = finished(start(run_file, f"trainer.num_updates={last}"))
    assert status == 0, errors
    assert f"resuming from the checkpoint of version {stopped_at}" in output
    trained = living_lineage(run_file.parent)
    assert sorted(trained) == list(range(1, last + 1))
    counts = Counter(group for groups in trained.values() for group in groups)
    assert set(counts.values()) == {1}
    books = TrainingLedger(redis_client, keys).books()
    assert books.is_balanced
    assert (books.version, books.trained, books.discarded) == (last, last * BATCH_GROUPS, {})
