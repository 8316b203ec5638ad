"""What an update scores before its first epoch."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.errors import ConfigurationError
from tests.trainer.learning import batch, plan, section
from trainer.corrections import correct
from trainer.kl import KlController
from trainer.model import build_engine, load_policy
from trainer.preparation import Preparation, needs_proximal
from trainer.reference import load_reference


@pytest.fixture
def prepare(one_rank, model_path):
    """Prepares the batch of `learning` under some settings."""

    def prepare(max_tokens=70, **settings):
        trainer = section(**settings)
        engine = build_engine(load_policy(model_path, trainer), trainer)
        reference = load_reference(trainer, model_path=model_path, device=engine.device)
        rows = batch()
        preparation = Preparation(engine, trainer, reference=reference, controller=KlController(trainer.kl))
        prepared = preparation.prepare(plan(rows, num_ranks=1, max_tokens=max_tokens), rows)
        return prepared, plan(rows, num_ranks=1, max_tokens=max_tokens).shares[0], rows

    return prepare


def scored(model_path, row):
    """[T] log-probabilities of a trajectory's sampled tokens, 0 elsewhere, from a plain model."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokens = torch.from_numpy(row.token_ids.astype("int64"))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens[None]).logits[0] / row.temperature, dim=-1)
    taken = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), torch.where(torch.from_numpy(row.loss_mask[1:] == 1), taken, 0.0)])


def test_a_penalty_in_the_reward_is_scored_by_token(prepare, model_path, other_model_path):
    kl = {"coefficient": 0.3, "place": "reward", "estimator": "k1", "reference_path": str(other_model_path)}
    prepared, share, rows = prepare(kl=kl, adv_estimator="reinforce_plus_plus")
    assert len(prepared) == len(share) > 1
    for each, planned in zip(prepared, share, strict=True):
        for index, sequence in enumerate(planned):
            row = rows[sequence.entry_id]
            proximal, reference = scored(model_path, row), scored(other_model_path, row)
            ours = [
                tensor[index, : row.num_tokens]
                for tensor in (each.proximal_logprobs_BT, each.reference_logprobs_BT, each.reward_penalties_BT)
            ]
            for actual, expected in zip(ours, (proximal, reference, 0.3 * (proximal - reference)), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_penalty_in_the_loss_leaves_rewards_alone(prepare, other_model_path):
    prepared, _, _ = prepare(kl={"coefficient": 0.3, "reference_path": str(other_model_path)})
    assert all(each.reward_penalties_BT is None and each.proximal_logprobs_BT is None for each in prepared)
    assert all(each.reference_logprobs_BT is not None for each in prepared)


def test_a_reference_that_is_no_model_is_refused(tmp_path):
    trainer = section(kl={"coefficient": 0.1, "reference_path": str(tmp_path / "nowhere")})
    with pytest.raises(
        ConfigurationError, match=r"trainer.kl.reference_path must be a directory .* got '.*nowhere' without config"
    ):
        load_reference(trainer, model_path=tmp_path, device=torch.device("cpu"))


@pytest.mark.parametrize("max_tokens", [70, 10_000])
def test_normalised_weights_have_the_mean_one(prepare, max_tokens):
    settings = {"action": "truncate", "level": "sequence", "high": 1.5, "batch_normalise": True}
    trainer = section(pg_variant="vanilla", correction=settings)
    prepared, _, _ = prepare(max_tokens, pg_variant="vanilla", correction=settings)
    weights = torch.cat(
        [
            correct(each.proximal_logprobs_BT, each.rows, trainer.correction, version=0).weights_BT[each.rows.loss_mask_BT]
            / each.mean_weight
            for each in prepared
        ]
    )
    assert weights.mean().item() == pytest.approx(1.0, rel=1e-6)
    assert weights.std().item() > 0.1


def test_when_every_token_is_dropped_nothing_is_divided_by_zero(prepare):
    prepared, _, _ = prepare(correction={"action": "mask", "low": 1e-6, "high": 1e-6, "batch_normalise": True})
    assert {each.mean_weight for each in prepared} == {1.0}


@pytest.mark.parametrize(
    ("settings", "by_number_of_steps"),
    [
        ({}, (False, False)),
        ({"pg_variant": "decoupled_ppo"}, (False, True)),
        ({"pg_variant": "decoupled_ppo", "policy_loss": {"proximal": "interpolated"}}, (False, False)),
        ({"pg_variant": "package.module:loss"}, (False, True)),
        ({"correction": {"action": "mask"}}, (False, True)),
        ({"correction": {"max_age": 1}}, (False, False)),
        ({"correction": {"reject_by": "k1"}}, (False, True)),
        ({"correction": {"batch_normalise": True}}, (True, True)),
        ({"kl": {"coefficient": 0.1}}, (False, False)),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, (True, True)),
    ],
    ids=str,
)
def test_the_proximal_policy_is_scored_only_where_it_is_not_the_one_in_the_loss(settings, by_number_of_steps):
    assert tuple(needs_proximal(section(**settings), num_steps=steps) for steps in (1, 2)) == by_number_of_steps
