"""DeepSpeed's JSON is passed through, completed, and never contradicted silently."""

import json

import pytest

from shared.errors import ConfigurationError
from tests.trainer.learning import section
from trainer.deepspeed_settings import deepspeed_settings


def settings(user=None, **trainer):
    return deepspeed_settings(section(deepspeed=user or {}, **trainer), is_cpu=True)


def test_defaults_are_zero_1_and_torch_adam_on_a_cpu():
    complete = settings(learning_rate=3e-4, max_grad_norm=0.5)
    assert complete["zero_optimization"] == {"stage": 1}
    assert complete["optimizer"]["params"] == {"torch_adam": True, "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.0}
    assert complete["gradient_clipping"] == 0.5
    assert complete["bf16"] == {"enabled": False}


def test_unknown_settings_pass_through():
    user = {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"params": {"eps": 1e-6}},
        "wall_clock_breakdown": True,
    }
    complete = settings(user)
    assert complete["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert complete["optimizer"]["params"]["eps"] == 1e-6
    assert complete["wall_clock_breakdown"] is True


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        ({"optimizer": {"params": {"lr": 0.1}}}, r"trainer.deepspeed.optimizer.params.lr is 0.1 where .* make it 1e-06"),
        ({"bf16": {"enabled": True}}, r"trainer.deepspeed.bf16.enabled is True where .* make it False"),
        ({"gradient_clipping": 2.0}, r"gradient_clipping is 2.0 where .* make it 1.0"),
        ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps is 4 where .* make it 1"),
        ({"zero_optimization": {"stage": 0}}, r"stage must be 1, 2 or 3, got 0"),
    ],
)
def test_a_contradiction_names_both_values(user, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        settings(user)


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        ({"warmup_updates": 3}, r"scheduler is \{'type': 'WarmupLR'\} where trainer.warmup_updates=3 makes a schedule too"),
        ({"learning_rate_schedule": "cosine"}, r"where trainer.learning_rate_schedule='cosine' makes a schedule too"),
    ],
)
def test_two_schedules_contradict_each_other(ours, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        settings({"scheduler": {"type": "WarmupLR"}}, **ours)


def test_a_scheduler_of_deepspeeds_passes_through_where_ours_is_constant():
    assert settings({"scheduler": {"type": "WarmupLR"}})["scheduler"] == {"type": "WarmupLR"}


def test_agreement_and_auto_are_no_contradiction():
    complete = settings({"gradient_clipping": "auto", "bf16": "auto", "optimizer": {"params": {"lr": 1e-6}}})
    assert complete["gradient_clipping"] == 1.0
    assert complete["bf16"] == {"enabled": False}


def test_settings_from_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert settings(str(path))["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("text", "sentence"), [(None, "No such file"), ("{", "is not JSON"), ("[1]", "must hold an object, got list")]
)
def test_a_bad_file_is_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=sentence):
        settings(str(path))
