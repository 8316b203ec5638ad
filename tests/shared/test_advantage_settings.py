"""Settings of advantages and critic that contradict each other are refused, with rule, value and remedy."""

import msgspec
import pytest

from shared.configuration import Configuration

BASE = {"run": {"id": "run", "directory": "d", "model_path": "m"}}


def decode(*, rollout=None, **trainer):
    content = {**BASE, "rollout": rollout or {}, "trainer": {"num_updates": 10, **trainer}}
    return msgspec.convert(content, Configuration)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"adv_estimator": "ppo"}, "must be one of grpo, rloo, .*, or package.module:name of one's own, got 'ppo'"),
        ({"adv_estimator": "gae"}, "trainer.critic must be given with adv_estimator 'gae', got none; add `critic: {}`"),
        ({"critic": {}}, "trainer.critic must not be given with adv_estimator 'grpo', .* got one; remove it, or set .* to gae"),
        ({"advantage": {"discount": 0.9}}, "discount must be left at 1.0 with adv_estimator 'grpo', .* got 0.9; remove it"),
        ({"adv_estimator": "rloo", "advantage": {"scale_by_std": False}}, "left at True with adv_estimator 'rloo'.* grpo or gigpo"),
        ({"advantage": {"gae_lambda": 1.0}}, "gae_lambda must be left at 0.95"),
        ({"adv_estimator": "step_reinforce", "advantage": {"step_weight": 2.0}}, "step_weight must be left at 1.0"),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, "trainer.kl.place must be 'loss' with trainer.adv_estimator 'grpo'"),
        (
            {"adv_estimator": "gae", "critic": {"warmup_updates": 10}},
            "warmup_updates must be < trainer.num_updates=10, got 10; the policy would never be trained",
        ),
        ({"advantage": {"overlong": {"max_tokens": 8, "buffer_tokens": 9}}}, "buffer_tokens must be <= max_tokens=8, got 9"),
        ({"advantage": {"discount": 1.1}}, "<= 1"),
        ({"advantage": {"clip": 0}}, "> 0"),
    ],
)
def test_contradictions_are_refused(trainer, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        decode(**trainer)


@pytest.mark.parametrize("name", ["grpo", "rloo", "lite_ppo", "gigpo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("key", ["num_return_sequences_in_group", "min_group_size"])
def test_a_group_of_one_is_a_configuration_error_where_siblings_are_compared(name, key):
    rollout = {"num_return_sequences_in_group": 4, "min_group_size": 2, key: 1}
    with pytest.raises(
        msgspec.ValidationError, match=f"rollout.{key} must be >= 2 with the group-relative estimator '{name}', got 1; raise it"
    ):
        decode(rollout=rollout, adv_estimator=name)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "step_reinforce", "my.module:estimator"])
def test_a_group_of_one_is_fine_elsewhere(name):
    configuration = decode(rollout={"num_return_sequences_in_group": 1, "min_group_size": 1}, adv_estimator=name)
    assert configuration.rollout.num_return_sequences_in_group == 1


@pytest.mark.parametrize(
    "trainer",
    [
        {
            "adv_estimator": "gae",
            "critic": {"warmup_updates": 2},
            "advantage": {"discount": 0.99, "gae_lambda": 0.9, "whiten": True},
        },
        {"adv_estimator": "gigpo", "advantage": {"scale_by_std": False, "discount": 0.95, "step_weight": 0.5}},
        {"adv_estimator": "reinforce_plus_plus", "kl": {"coefficient": 0.01, "place": "reward"}},
        {"advantage": {"clip": 5.0, "overlong": {"max_tokens": 100, "buffer_tokens": 20}}},
    ],
)
def test_what_fits_is_accepted(trainer):
    assert decode(**trainer).trainer.adv_estimator == trainer.get("adv_estimator", "grpo")
