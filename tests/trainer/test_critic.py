"""The critic: its loss by hand, its gradient against plain autograd, with one rank and two, and that it learns."""

import json

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModel

from shared.errors import ConfigurationError
from tests.trainer.conftest import DEPRECATED_BY_TORCH
from tests.trainer.learning import section
from tests.trainer.records import VOCABULARY
from tests.trainer.valuing import episodes, gae, learn, make_critic, make_learner, plan
from trainer.batching import PlannedSequence
from trainer.checkpoints import Checkpoints, LedgerState
from trainer.critic import ValueMeasures, ValueTargets, load_value_model, value_loss
from trainer.kl import KlController
from trainer.preparation import Preparation

GAMMA, LAMBDA = 0.9, 0.8
ADVANTAGE = {"discount": GAMMA, "gae_lambda": LAMBDA}


def row(*values):
    return torch.tensor([values])


def test_value_loss_by_hand():
    # V_old = 0, clip 0.5. V = 0.25 is within; V = 2 for R = 3 counts as 0.5; V = -2 for R = 3 is worse than the clipped one.
    values = row(0.25, 2.0, -2.0).requires_grad_()
    loss = value_loss(values, ValueTargets(row(0.0, 0.0, 0.0), row(1.0, 3.0, 3.0)), value_clip=0.5)
    torch.testing.assert_close(loss.per_token_BT, row(0.5 * 0.75**2, 0.5 * 2.5**2, 0.5 * 25.0))
    assert loss.is_clipped_BT.tolist() == [[False, True, False]]
    loss.per_token_BT.sum().backward()
    torch.testing.assert_close(values.grad, row(-0.75, 0.0, -5.0))


def plain_critic(model_path):
    backbone = AutoModel.from_pretrained(model_path, dtype=torch.float32)
    head = torch.nn.Linear(64, 1)
    torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(5))
    torch.nn.init.zeros_(head.bias)
    return backbone, head


def plain_values(backbone, head, trajectory):
    """V before each sampled token, one sequence alone, without our tensors."""
    tokens = torch.from_numpy(trajectory.token_ids.astype("int64"))
    answers = head(backbone(tokens[None]).last_hidden_state[0])[:, 0]
    return torch.stack([answers[t - 1] for t in range(trajectory.num_tokens) if trajectory.loss_mask[t]])


def slow_gae(trajectory, values):
    """Advantages of the sampled tokens in order, by a loop from the last."""
    sampled = np.flatnonzero(trajectory.loss_mask)
    rewards = {turn.end - 1: turn.reward for turn in trajectory.turns}
    advantages, following, next_value = [], 0.0, 0.0
    for t, value in zip(reversed(sampled.tolist()), reversed(values), strict=True):
        following = rewards.get(t, 0.0) + GAMMA * next_value - value + GAMMA * LAMBDA * following
        advantages.append(following)
        next_value = value
    return advantages[::-1]


def reference(model_path):
    """Value loss and gradients of the critic, and the advantages of each episode, by plain autograd."""
    backbone, head = plain_critic(model_path)
    rows = episodes()
    num_tokens = sum(each.num_sampled_tokens for each in rows.values())
    total, advantages = torch.zeros(()), {}
    for entry, each in rows.items():
        values = plain_values(backbone, head, each)
        advantages[entry] = slow_gae(each, values.tolist())
        returns = torch.tensor(advantages[entry]) + values.detach()
        total = total + 0.5 * (values - returns).square().sum() / num_tokens
    total.backward()
    gradients = {f"critic.backbone.{name}": parameter.grad for name, parameter in backbone.named_parameters()}
    gradients |= {f"critic.head.{name}": parameter.grad for name, parameter in head.named_parameters()}
    return total.item(), gradients, advantages


def assert_gradients(actual, expected):
    assert {name for name in actual if name.startswith("critic.")} == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_values_are_of_the_state_before_the_token(one_rank, model_path):
    critic = make_critic(model_path, gae(), has_opinion=True)
    backbone, head = plain_critic(model_path)
    rows = episodes(count=3)
    (prepared,) = prepare(critic, model_path, rows)
    for index, sequence in enumerate(plan(rows).shares[0][0]):
        each = rows[sequence.entry_id]
        found = prepared.value_targets.values_BT[index, : each.num_tokens]
        torch.testing.assert_close(
            found[torch.from_numpy(each.loss_mask == 1)], plain_values(backbone, head, each).detach(), rtol=1e-4, atol=1e-5
        )
        assert not found[torch.from_numpy(each.loss_mask == 0)].any()


def prepare(critic, model_path, rows, *, max_tokens=10_000, **settings):
    trainer = gae(**settings)
    engine = make_learner(model_path, section())[0].engine
    preparation = Preparation(engine, trainer, reference=None, controller=KlController(trainer.kl), critic=critic)
    return preparation.prepare(plan(rows, max_tokens=max_tokens), rows)


@pytest.mark.parametrize("max_tokens", [10_000, 40, 1])
def test_advantages_are_those_of_a_slow_loop_in_one_micro_batch_or_nine(one_rank, model_path, max_tokens):
    critic = make_critic(model_path, gae(), has_opinion=True)
    rows = episodes()
    prepared = prepare(critic, model_path, rows, max_tokens=max_tokens, advantage=ADVANTAGE)
    share = plan(rows, max_tokens=max_tokens).shares[0]
    expected = reference(model_path)[2]
    for each, planned in zip(prepared, share, strict=True):
        for index, sequence in enumerate(planned):
            found = each.rows.advantages_BT[index][each.rows.is_sampled_BT[index]]
            np.testing.assert_allclose(found, expected[sequence.entry_id], rtol=1e-4, atol=1e-5)


def test_whitened_advantages_do_not_depend_on_micro_batches_and_are_clipped_last(one_rank, model_path):
    critic = make_critic(model_path, gae(), has_opinion=True)
    rows = episodes()
    every = torch.tensor([value for values in reference(model_path)[2].values() for value in values])
    expected = sorted(((every - every.mean()) / every.std()).clamp(-1.5, 1.5).tolist())
    assert max(expected) == 1.5
    for max_tokens in (10_000, 40):
        settings = {**ADVANTAGE, "whiten": True, "clip": 1.5}
        prepared = prepare(critic, model_path, rows, max_tokens=max_tokens, advantage=settings)
        found = sorted(value for each in prepared for value in each.rows.advantages_BT[each.rows.loss_mask_BT].tolist())
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=DEPRECATED_BY_TORCH)])
@pytest.mark.parametrize("max_tokens", [10_000, 40, 1])
def test_gradient_is_plain_autograds_in_one_micro_batch_or_nine(one_rank, model_path, stage, max_tokens):
    trainer = gae(critic={"deepspeed": {"zero_optimization": {"stage": stage}}}, advantage=ADVANTAGE)
    learned, gradients = learn(model_path, trainer, max_tokens=max_tokens)
    loss, expected, _ = reference(model_path)
    assert learned.values is not None
    assert learned.values.value_loss == pytest.approx(loss, rel=1e-4)
    assert_gradients(gradients, expected)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    assert learned.values.grad_norm == pytest.approx(norm, rel=1e-4)


def test_attention_that_does_not_pack_gives_the_same_gradient(one_rank, model_path):
    _, gradients = learn(model_path, gae(attention="unpacked", advantage=ADVANTAGE), max_tokens=40)
    assert_gradients(gradients, reference(model_path)[1])


@pytest.mark.parametrize("stage", [1, 2])
def test_bfloat16_stays_close_to_float32(one_rank, model_path, stage):
    critic = {"deepspeed": {"zero_optimization": {"stage": stage}}}
    learned, gradients = learn(model_path, gae(dtype="bfloat16", critic=critic, advantage=ADVANTAGE), max_tokens=40)
    loss, expected, _ = reference(model_path)
    assert learned.values.value_loss == pytest.approx(loss, rel=2e-2)
    for name, gradient in expected.items():
        similarity = torch.nn.functional.cosine_similarity(gradients[name].float().flatten(), gradient.flatten(), dim=0)
        assert similarity > 0.98, name


def test_gradient_checkpointing_changes_nothing(one_rank, model_path):
    _, gradients = learn(model_path, gae(gradient_checkpointing=True, advantage=ADVANTAGE), max_tokens=40)
    assert_gradients(gradients, reference(model_path)[1])


def test_each_mini_batch_is_a_step_and_measures_are_of_all(one_rank, model_path):
    trainer = gae(ppo_mini_batch_size=5, critic={"learning_rate": 1e-12}, advantage=ADVANTAGE)
    learner, critic = make_learner(model_path, trainer, has_opinion=True)
    rows = episodes()
    learned = learner.learn(plan(rows, mini_batch_size=5), rows)
    assert critic.engine.global_steps == 2
    whole, _ = learn(model_path, gae(advantage=ADVANTAGE))
    assert learned.values.explained_variance == pytest.approx(whole.values.explained_variance, rel=1e-5)


def test_a_value_loss_that_is_no_number_moves_no_weight_and_is_counted(one_rank, model_path):
    learner, critic = make_learner(model_path, gae(critic={"learning_rate": 1e-3}, learning_rate=1e-3))
    before = [weight.clone() for weight in critic.engine.module.parameters()]
    rows = episodes()
    whole = plan(rows)
    broken = PlannedSequence("e0", rows["e0"].num_tokens, rows["e0"].num_sampled_tokens, 0.0, 0.0, turn_rewards=(0.0, float("nan")))
    shares = (((*[each for each in whole.shares[0][0] if each.entry_id != "e0"], broken),),)
    learned = learner.learn(msgspec.structs.replace(whole, shares=shares), rows)
    assert learned.skipped is not None
    assert not learned.has_learnt, "the same number is in the policy's advantages"
    assert learned.values is None
    assert all(torch.equal(*pair) for pair in zip(critic.engine.module.parameters(), before, strict=True))


def test_a_critic_that_alone_is_no_number_is_counted_too(one_rank, model_path):
    learner, critic = make_learner(model_path, gae(critic={"learning_rate": 1e-3, "warmup_updates": 1}, num_updates=2))
    torch.nn.init.constant_(critic.engine.module.head.bias, torch.nan)
    before = [weight.clone() for weight in critic.engine.module.backbone.parameters()]
    rows = episodes()
    learned = learner.learn(plan(rows), rows)
    assert learned.skipped.cause == "gradient"
    assert not learned.has_learnt, "neither model took a step"
    assert set(learned.skipped.entry_ids) == set(rows)
    assert all(torch.equal(*pair) for pair in zip(critic.engine.module.backbone.parameters(), before, strict=True))


def test_explained_variance_is_of_the_values_before_the_update(one_rank, model_path):
    learned, _ = learn(model_path, gae(advantage=ADVANTAGE), max_tokens=40)
    backbone, head = plain_critic(model_path)
    values = {entry: plain_values(backbone, head, each).detach() for entry, each in episodes().items()}
    errors = torch.cat([torch.tensor(advantages) for advantages in reference(model_path)[2].values()])
    returns = errors + torch.cat(list(values.values()))
    expected = 1 - errors.var(correction=0) / returns.var(correction=0)
    assert learned.values.explained_variance == pytest.approx(expected.item(), rel=1e-3)
    assert learned.values.clip_fraction == 0


@pytest.mark.stack
@pytest.mark.timeout(300)
@DEPRECATED_BY_TORCH
def test_two_ranks_have_the_gradients_of_one(one_rank, model_path, tmp_path, run_on_two_ranks):
    output = tmp_path / "results.pt"
    settings = [
        {
            "adv_estimator": "gae",
            "critic": {"deepspeed": {"zero_optimization": {"stage": stage}}},
            "advantage": {**ADVANTAGE, "whiten": True},
        }
        for stage in (1, 2, 3)
    ]
    settings.append({"adv_estimator": "reinforce_plus_plus", "advantage": {"discount": GAMMA}})
    run_on_two_ranks("valuing.py", model_path, json.dumps(settings), "40", output, timeout_s=280)
    with torch.serialization.safe_globals([ValueMeasures]):
        results = torch.load(output)
    for each, result in zip(settings, results, strict=True):
        learned, gradients = learn(model_path, section(**each), max_tokens=10_000)
        assert result["loss"] == pytest.approx(learned.measures.loss, abs=1e-6)
        assert result["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        if learned.values:
            assert result["values"].value_loss == pytest.approx(learned.values.value_loss, rel=1e-5)
            assert result["values"].explained_variance == pytest.approx(learned.values.explained_variance, rel=1e-5)


def test_critic_learns_what_episodes_are_worth(one_rank, model_path):
    trainer = gae(
        critic={"learning_rate": 3e-3},
        advantage={"gae_lambda": 1.0},
        learning_rate=1e-12,
    )
    learner, _ = make_learner(model_path, trainer)
    measures = []
    for version in range(60):
        rows = episodes(seed=version, count=32)
        measures.append(learner.learn(plan(rows, version=version), rows).values)
    assert measures[0].explained_variance == pytest.approx(0, abs=1e-6), "it knows nothing yet"
    first = np.mean([each.value_loss for each in measures[:5]])
    last = np.mean([each.value_loss for each in measures[-5:]])
    assert last < 0.35 * first
    assert np.mean([each.explained_variance for each in measures[-5:]]) > 0.6


def test_while_the_critic_warms_up_the_policy_is_measured_and_stays(one_rank, model_path):
    trainer = gae(critic={"warmup_updates": 2, "learning_rate": 1e-3}, learning_rate=1e-3, warmup_updates=4, num_updates=9)
    learner, critic = make_learner(model_path, trainer)
    start = {name: weight.clone() for name, weight in learner.policy.named_weights()}
    learned, moved, norms = [], [], []
    for version in range(4):
        rows = episodes(seed=version)
        learned.append(learner.learn(plan(rows, version=version), rows))
        moved.append(any(not torch.equal(weight, start[name]) for name, weight in learner.policy.named_weights()))
        norms.append(critic.engine.module.head.weight.detach().norm().item())
    assert moved == [False, False, True, True]
    assert [each.learning_rate for each in learned] == pytest.approx([0, 0, 2.5e-4, 5e-4])
    assert [each.grad_norm > 0 for each in learned] == [False, False, True, True]
    assert 0 < norms[0] < norms[1]
    assert learned[0].measures.kl_behaviour == learned[0].kl_behaviour_before > 0


def test_each_epoch_is_a_step_of_the_critic_too(one_rank, model_path):
    losses = []
    for epochs in (1, 3):
        learner, critic = make_learner(model_path, gae(ppo_epochs=epochs, critic={"learning_rate": 1e-3}))
        rows = episodes()
        losses.append(learner.learn(plan(rows), rows).values.value_loss)
        assert critic.engine.global_steps == epochs
    assert losses[1] < 0.95 * losses[0], "the third step's loss, before it, after two steps"


def test_a_value_that_moved_too_far_is_held_back(one_rank, model_path):
    learner, _ = make_learner(model_path, gae(ppo_epochs=2, critic={"learning_rate": 1e-3, "value_clip": 1e-4}))
    rows = episodes()
    assert learner.learn(plan(rows), rows).values.clip_fraction > 0.2


def saved_checkpoint(directory, model_path, learner):
    saved = Checkpoints(directory, keep=2, fingerprint="both", model_path=model_path)
    saved.save(learner.engines, 1, [], ledger=LedgerState(0, {}), components={})
    assert saved.wait().problem is None
    return saved


def test_critic_continues_from_a_checkpoint_as_if_never_stopped(one_rank, model_path, tmp_path):
    trainer = gae(critic={"learning_rate": 1e-3}, learning_rate=1e-3)
    learner, critic = make_learner(model_path, trainer)
    rows = episodes()
    learner.learn(plan(rows), rows)
    saved = saved_checkpoint(tmp_path, model_path, learner)
    learner.learn(plan(rows, version=1), rows)
    other, other_critic = make_learner(model_path, trainer)
    saved.load(other.engines, saved.newest(), {})
    other.learn(plan(rows, version=1), rows)
    for left, right in ((critic, other_critic), (learner, other)):
        for weight, expected in zip(right.engine.module.parameters(), left.engine.module.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-7)


def test_a_checkpoint_without_a_critic_is_refused_in_words(one_rank, model_path, tmp_path):
    saved = saved_checkpoint(tmp_path, model_path, make_learner(model_path, section())[0])
    with pytest.raises(ConfigurationError, match="must hold the critic's state, and does not"):
        saved.load(make_learner(model_path, gae())[0].engines, saved.newest(), {})


def test_a_critic_of_another_vocabulary_is_refused(model_path):
    with pytest.raises(ConfigurationError, match=f"vocabulary of {VOCABULARY + 1}, got .* with {VOCABULARY}"):
        load_value_model(model_path, section(), vocabulary_size=VOCABULARY + 1)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"trainer.critic.model_path must hold a language model, got"):
        load_value_model(tmp_path, section(), vocabulary_size=VOCABULARY)


def test_contradicting_deepspeed_settings_are_named_by_the_critics_key(one_rank, model_path):
    trainer = gae(critic={"deepspeed": {"gradient_clipping": 7.0}})
    with pytest.raises(ConfigurationError, match=r"trainer.critic.deepspeed.gradient_clipping is 7.0 where .* make it 1.0"):
        make_critic(model_path, trainer)
