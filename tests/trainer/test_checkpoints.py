"""Checkpoints appear whole or not at all, and come back as they were."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.errors import ConfigurationError
from tests.trainer.conftest import DEPRECATED_BY_TORCH
from tests.trainer.learning import batch, learn, plan, section
from trainer.checkpoints import Checkpoints, atomic_directory


def checkpoints(directory, model_path, *, keep=2, fingerprint="model"):
    return Checkpoints(directory, keep=keep, fingerprint=fingerprint, model_path=model_path)


SETTINGS = {
    "ZeRO-1": {},
    "ZeRO-3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "LoRA": {"lora": {"rank": 4}},
    "LoRA, ZeRO-3": {"lora": {"rank": 4}, "deepspeed": {"zero_optimization": {"stage": 3}}},
}


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
    saved.save(learner.engine, 1, ["g0", "g1"])
    rows = batch()
    learner.learn(plan(rows, num_ranks=1, max_tokens=100, version=1), rows)
    expected = weights(learner)

    other = learn(model_path, trainer, max_tokens=1000)[2]
    state = checkpoints(tmp_path, model_path).newest()
    assert state is not None
    assert (state.version, state.group_ids) == (1, ("g0", "g1"))
    saved.load(other.engine, state)
    other.learn(plan(rows, num_ranks=1, max_tokens=100, version=1), rows)
    for name, weight in weights(other).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-7)


@DEPRECATED_BY_TORCH
@in_every_form
def test_the_export_is_a_hugging_face_model_with_the_tokenizers_files(learner, model_path, tmp_path):
    (model_path / "tokenizer_config.json").write_text("{}")
    checkpoints(tmp_path, model_path).save(learner.engine, 3, [])
    export = tmp_path / "checkpoints" / "v00003" / "model"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in learner.policy.named_weights())
    assert (export / "tokenizer_config.json").read_text() == "{}"
    (model_path / "tokenizer_config.json").unlink()


def test_only_the_newest_are_kept(learner, model_path, tmp_path):
    saved = checkpoints(tmp_path, model_path, keep=2)
    for version in (8, 9, 10, 11):
        saved.save(learner.engine, version, [])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["v00010", "v00011"]


def test_a_crash_before_the_rename_leaves_the_older_one_usable(learner, model_path, tmp_path, monkeypatch):
    saved = checkpoints(tmp_path, model_path)
    saved.save(learner.engine, 1, [])
    with monkeypatch.context() as crash:
        crash.setattr("pathlib.Path.rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            saved.save(learner.engine, 2, [])
    state = checkpoints(tmp_path, model_path).newest()
    assert state is not None
    assert state.version == 1
    saved.save(learner.engine, 2, [])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["v00001", "v00002"]


def test_a_folder_appears_only_when_complete(tmp_path):
    final = tmp_path / "v1"

    def fill_the_disk():
        with atomic_directory(final) as partial:
            (partial / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill_the_disk()
    assert not final.exists()
    with atomic_directory(final) as partial:
        assert list(partial.iterdir()) == []
        (partial / "whole").write_text("x")
    assert [path.name for path in final.iterdir()] == ["whole"]


def test_a_checkpoint_of_another_model_is_refused(learner, model_path, tmp_path):
    checkpoints(tmp_path, model_path).save(learner.engine, 1, [])
    with pytest.raises(ConfigurationError, match=r"must be of the model in run.model_path, another, got model"):
        checkpoints(tmp_path, model_path, fingerprint="another").newest()


def test_starting_anew_over_checkpoints_is_refused(learner, model_path, tmp_path):
    saved = checkpoints(tmp_path, model_path)
    saved.require_none()
    saved.save(learner.engine, 1, [])
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
