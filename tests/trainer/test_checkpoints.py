"""Checkpoints appear whole or not at all, and come back as they were."""

import random
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.errors import ConfigurationError
from tests.trainer.conftest import DEPRECATED_BY_TORCH
from tests.trainer.learning import batch, learn, plan, section
from trainer.checkpoints import POLICY, Checkpoints, LedgerState
from trainer.guards import SkippedUpdates
from trainer.snapshots import SnapshotFile

NO_BOOKS = LedgerState(0, {})


def checkpoints(directory, model_path, *, keep=2, fingerprint="model"):
    return Checkpoints(directory, keep=keep, fingerprint=fingerprint, model_path=model_path)


SETTINGS = {
    "ZeRO-1": {},
    "ZeRO-3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "LoRA": {"lora": {"rank": 4}},
    "LoRA, ZeRO-3": {"lora": {"rank": 4}, "deepspeed": {"zero_optimization": {"stage": 3}}},
}


def begin(saved, learner, version, group_ids=(), *, ledger=NO_BOOKS, components=None):
    saved.save({POLICY: learner.engine}, version, group_ids, ledger=ledger, components=components or {})


def save(saved, learner, version, group_ids=(), **more):
    begin(saved, learner, version, group_ids, **more)
    return saved.wait()


def names(run_directory):
    return sorted(path.name for path in (run_directory / "checkpoints").iterdir())


@pytest.fixture
def trainer():
    return section(learning_rate=1e-3)


@pytest.fixture
def learner(one_rank, model_path, trainer):
    return learn(model_path, trainer, max_tokens=100)[2]


in_every_form = pytest.mark.parametrize(
    "trainer", [section(learning_rate=1e-3, **each) for each in SETTINGS.values()], ids=SETTINGS
)


def weights(learner):
    return {name: weight.clone() for name, weight in learner.policy.named_weights()}


@DEPRECATED_BY_TORCH
@in_every_form
def test_training_continues_from_a_checkpoint_as_if_never_stopped(learner, trainer, model_path, tmp_path):
    saved = checkpoints(tmp_path, model_path)
    save(saved, learner, 1, ["g0", "g1"])
    rows = batch()
    learner.learn(plan(rows, num_ranks=1, max_tokens=100, version=1), rows)
    expected = weights(learner)

    other = learn(model_path, trainer, max_tokens=1000)[2]
    state = checkpoints(tmp_path, model_path).newest()
    assert state is not None
    assert (state.version, state.group_ids) == (1, ("g0", "g1"))
    saved.load({POLICY: other.engine}, state, {})
    other.learn(plan(rows, num_ranks=1, max_tokens=100, version=1), rows)
    for name, weight in weights(other).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-7)


@DEPRECATED_BY_TORCH
@in_every_form
def test_the_export_is_a_hugging_face_model_with_the_tokenizers_files(learner, model_path, tmp_path):
    (model_path / "tokenizer_config.json").write_text("{}")
    save(checkpoints(tmp_path, model_path), learner, 3)
    export = tmp_path / "checkpoints" / "v00003" / "model"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in learner.policy.named_weights())
    assert (export / "tokenizer_config.json").read_text() == "{}"
    (model_path / "tokenizer_config.json").unlink()


def test_only_the_newest_are_kept(learner, model_path, tmp_path):
    saved = checkpoints(tmp_path, model_path, keep=2)
    for version in (8, 9, 10, 11):
        save(saved, learner, version)
    assert names(tmp_path) == ["v00010", "v00011"]


def test_training_goes_on_while_the_checkpoint_of_the_version_before_is_written(learner, model_path, tmp_path, monkeypatch):
    may_write = threading.Event()
    write = SnapshotFile.write
    monkeypatch.setattr(SnapshotFile, "write", lambda file: (may_write.wait(60), write(file)))
    saved = checkpoints(tmp_path, model_path)
    at_save = weights(learner)
    begin(saved, learner, 1, ["g0"])
    rows = batch()
    learner.learn(plan(rows, num_ranks=1, max_tokens=100, version=1), rows)
    assert saved.result() is None
    assert saved.newest() is None
    may_write.set()
    result = saved.wait()
    assert (result.version, result.group_ids, result.problem) == (1, ("g0",), None)
    other = learn(model_path, section(learning_rate=1e-3), max_tokens=1000)[2]
    saved.load({POLICY: other.engine}, saved.newest(), {})
    assert all(torch.equal(weight, at_save[name]) for name, weight in weights(other).items())
    assert not all(torch.equal(weight, at_save[name]) for name, weight in weights(learner).items())


def test_random_numbers_and_small_states_continue(learner, model_path, tmp_path):
    saved = checkpoints(tmp_path, model_path)
    skipped = SkippedUpdates(max_in_a_row=5)
    skipped.count(is_skipped=True)
    save(saved, learner, 1, components={"skipped": skipped}, ledger=LedgerState(7, {"calculator": 12}))

    def draws():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()

    expected = draws()
    state = saved.newest()
    other = SkippedUpdates(max_in_a_row=5)
    saved.load({POLICY: learner.engine}, state, {"skipped": other, "unknown": SkippedUpdates(max_in_a_row=1)})
    assert draws() == expected
    assert (other.in_a_row, other.total) == (1, 1)
    assert state.ledger == LedgerState(7, {"calculator": 12})


def test_a_checkpoint_without_a_models_state_is_refused(learner, model_path, tmp_path):
    saved = checkpoints(tmp_path, model_path)
    save(saved, learner, 1)
    with pytest.raises(ConfigurationError, match="must hold the critic's state, and does not"):
        saved.load({POLICY: learner.engine, "critic": learner.engine}, saved.newest(), {})


def test_an_unreadable_run_state_is_one_sentence(learner, model_path, tmp_path):
    saved = checkpoints(tmp_path, model_path)
    save(saved, learner, 1)
    (tmp_path / "checkpoints" / "v00001" / "run_state.json").write_text('{"version": 1')
    with pytest.raises(ConfigurationError, match=r"v00001 must have a readable run_state.json"):
        saved.newest()


def test_what_a_crash_left_unfinished_is_removed_and_the_older_one_stays(learner, model_path, tmp_path):
    save(checkpoints(tmp_path, model_path), learner, 1)
    half = tmp_path / "checkpoints" / ".v00002.partial"
    half.mkdir()
    (half / "run_state.json").write_text("{}")
    saved = checkpoints(tmp_path, model_path)
    assert saved.newest().version == 1
    assert not half.exists()
    save(saved, learner, 2)
    assert names(tmp_path) == ["v00001", "v00002"]


def test_a_crash_before_the_rename_leaves_the_older_one_usable(learner, model_path, tmp_path, monkeypatch):
    saved = checkpoints(tmp_path, model_path)
    save(saved, learner, 1)
    with monkeypatch.context() as crash:
        crash.setattr("pathlib.Path.rename", lambda *_: (_ for _ in ()).throw(SystemExit))
        begin(saved, learner, 2)
        with pytest.raises(SystemExit):
            saved.wait()
    assert names(tmp_path) == [".v00002.partial", "v00001"]
    assert checkpoints(tmp_path, model_path).newest().version == 1


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_on_a_full_disk_the_older_checkpoint_survives_and_a_sentence_says_what_is_missing(
    learner, model_path, small_disk, is_foreseen, monkeypatch
):
    disk = small_disk("2500k")
    saved = checkpoints(disk.path, model_path)
    assert save(saved, learner, 1, ["g0"]).problem is None
    size = sum(path.stat().st_size for path in disk.path.rglob("*") if path.is_file())
    assert 1_250_000 < size < 2_500_000
    with monkeypatch.context() as misled:
        if not is_foreseen:  # As when something else fills the disk meanwhile.
            misled.setattr("trainer.checkpoints._free_bytes", lambda path: 2**40)
        result = save(saved, learner, 2, ["g1"])
    assert result.group_ids == ("g1",)
    assert f"{disk.path / 'checkpoints' / 'v00002'} needs" in result.problem
    assert "No space left on device" in result.problem
    assert "; that of version 1 stays the newest; free space there" in result.problem
    assert names(disk.path) == ["v00001"]
    saved.load({POLICY: learner.engine}, saved.newest(), {})
    (disk.path / "checkpoints" / "v00001" / "model" / "model.safetensors").unlink()
    (disk.path / "checkpoints" / "v00001").rename(disk.path / "elsewhere")
    disk.grow("10m")
    assert save(saved, learner, 3, ["g1", "g2"]).problem is None
    assert saved.newest().version == 3


def test_a_checkpoint_of_another_model_is_refused(learner, model_path, tmp_path):
    save(checkpoints(tmp_path, model_path), learner, 1)
    with pytest.raises(ConfigurationError, match=r"must be of the model in run.model_path, another, got model"):
        checkpoints(tmp_path, model_path, fingerprint="another").newest()


def test_starting_anew_over_checkpoints_is_refused(learner, model_path, tmp_path):
    saved = checkpoints(tmp_path, model_path)
    saved.require_none()
    save(saved, learner, 1)
    with pytest.raises(ConfigurationError, match=r"must hold no checkpoint with trainer.checkpoint.resume=never"):
        saved.require_none()


def test_without_a_checkpoint_there_is_nothing_to_resume(one_rank, model_path, tmp_path):
    assert checkpoints(tmp_path, model_path).newest() is None


def test_models_that_differ_in_a_shape_differ_in_fingerprint(learner, model_factory):
    from trainer.model import Policy

    policy = Policy(model_factory(1))
    assert policy.fingerprint() == learner.policy.fingerprint()
    policy.causal_lm.resize_token_embeddings(64)
    assert policy.fingerprint() != learner.policy.fingerprint()
