"""The gradient of an update, against plain autograd, however the batch is cut; with one rank and with two."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shared.errors import TrainingError
from tests.trainer.conftest import DEPRECATED_BY_TORCH
from tests.trainer.learning import ADVANTAGES, batch, learn, plan, section
from trainer.batching import PlannedSequence, SequenceCost, plan_update
from trainer.learner import Learner
from trainer.losses import POLICY_LOSSES
from trainer.model import build_engine, load_policy

STAGES = [1, 2, pytest.param(3, marks=DEPRECATED_BY_TORCH)]


def ppo(ratio, advantage, logprob):
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def reference(model_path, *, token_loss=ppo):
    """Loss and gradients of a policy loss with token-mean, one sequence at a time, without DeepSpeed or any of our tensors."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    total = sum(token_losses(model, token_loss)) / sum(row.num_sampled_tokens for row in batch().values())
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def token_losses(model, token_loss):
    """By sampled token of the batch; `token_loss` gets ratio to the behaviour policy, advantage and log-probability."""
    for row, advantage in zip(batch().values(), ADVANTAGES, strict=True):
        tokens = torch.from_numpy(row.token_ids.astype("int64"))
        logprobs = torch.log_softmax(model(tokens[None]).logits[0] / row.temperature, dim=-1)
        for t in range(1, row.num_tokens):
            if row.loss_mask[t]:
                logprob = logprobs[t - 1, tokens[t]]
                yield token_loss((logprob - float(row.logprobs[t])).exp(), advantage, logprob)


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("max_tokens", [10_000, 70, 1])
def test_gradient_is_plain_autograds_in_one_micro_batch_or_seven(one_rank, model_path, stage, max_tokens):
    trainer = section(deepspeed={"zero_optimization": {"stage": stage}})
    learned, gradients, _ = learn(model_path, trainer, max_tokens=max_tokens)
    loss, expected = reference(model_path)
    assert learned.measures.loss == pytest.approx(loss, abs=1e-6)
    assert_same_gradients(gradients, expected)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    assert learned.grad_norm == pytest.approx(norm, rel=1e-5)


def test_gradient_checkpointing_changes_nothing(one_rank, model_path):
    _, gradients, _ = learn(model_path, section(gradient_checkpointing=True), max_tokens=70)
    assert_same_gradients(gradients, reference(model_path)[1])


@pytest.mark.parametrize(
    "settings",
    [
        *({"pg_variant": variant} for variant in POLICY_LOSSES),
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_norm_tokens": 30},
        {"pg_variant": "vanilla", "correction": {"action": "truncate", "level": "turn", "high": 1.1, "batch_normalise": True}},
        {"pg_variant": "decoupled_ppo", "ppo_epochs": 2, "learning_rate": 1e-3},
    ],
    ids=str,
)
def test_every_objective_is_the_same_however_the_batch_is_packed(one_rank, model_path, settings):
    whole, whole_gradients, _ = learn(model_path, section(**settings), max_tokens=10_000)
    cut, cut_gradients, _ = learn(model_path, section(**settings), max_tokens=70)
    assert cut.measures.loss == pytest.approx(whole.measures.loss, abs=1e-6)
    assert cut.measures.effective_sample_size == pytest.approx(whole.measures.effective_sample_size, rel=1e-5)
    assert_same_gradients(cut_gradients, whole_gradients)


def test_normalised_truncated_weights_and_kl_are_plain_autograds(one_rank, model_path, other_model_path):
    """-w·A·log π_θ / mean(w) + β·k3, with the weights of a first pass over the whole batch."""
    frozen = AutoModelForCausalLM.from_pretrained(other_model_path, dtype=torch.float32)
    behaving = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        reference_logprobs = list(token_losses(frozen, lambda ratio, advantage, logprob: logprob))
        weights = list(token_losses(behaving, lambda ratio, advantage, logprob: ratio.clamp(max=1.1)))
    mean_weight = sum(weights) / len(weights)
    places = iter(zip(reference_logprobs, weights, strict=True))

    def token_loss(ratio, advantage, logprob):
        reference_logprob, weight = next(places)
        log_ratio = reference_logprob - logprob
        return -weight / mean_weight * advantage * logprob + 0.2 * (log_ratio.exp() - 1 - log_ratio)

    loss, expected = reference(model_path, token_loss=token_loss)
    trainer = section(
        pg_variant="vanilla",
        correction={"action": "truncate", "high": 1.1, "batch_normalise": True},
        kl={"coefficient": 0.2, "reference_path": str(other_model_path), "offload_reference": True},
    )
    learned, gradients, learner = learn(model_path, trainer, max_tokens=70)
    assert learner.engine.training, "dropout and gradient checkpointing are on again after scoring"
    assert learned.measures.loss == pytest.approx(loss, abs=1e-6)
    assert learned.measures.mean_weight == pytest.approx(mean_weight.item(), rel=1e-5)
    assert_same_gradients(gradients, expected)


def test_adaptive_kl_coefficient_moves_after_the_update_that_measured_it(one_rank, model_path, other_model_path):
    kl = {"coefficient": 0.2, "controller": "adaptive", "target": 1e-4, "horizon": 70, "reference_path": str(other_model_path)}
    learned, _, learner = learn(model_path, section(kl=kl), max_tokens=70)
    assert learned.measures.kl_reference > 1e-3
    assert learned.kl_coefficient == 0.2
    assert learner.kl_controller.coefficient == pytest.approx(0.2 * (1 + 0.2 * len(ADVANTAGES) / 70))


def test_a_users_own_loss_trains(one_rank, model_path):
    trainer = section(pg_variant="tests.trainer.own_losses:half_vanilla", import_allowlist=["tests"])
    learned, gradients, _ = learn(model_path, trainer, max_tokens=70)
    loss, expected = reference(model_path, token_loss=lambda ratio, advantage, logprob: -0.5 * advantage * logprob)
    assert learned.measures.loss == pytest.approx(loss, abs=1e-6)
    assert_same_gradients(gradients, expected)


def test_later_epochs_measure_the_ratio_to_the_same_behaviour_policy(one_rank, model_path):
    once, _, _ = learn(model_path, section(learning_rate=1e-3), max_tokens=70)
    twice, _, _ = learn(model_path, section(learning_rate=1e-3, ppo_epochs=2), max_tokens=70)
    assert twice.measures.kl_behaviour != pytest.approx(once.measures.kl_behaviour, rel=1e-3)
    assert twice.kl_behaviour_before == pytest.approx(once.measures.kl_behaviour), "before the first step, whatever follows"
    assert once.measures.logprob_mismatch_mean > 0
    for name in ("logprob_mismatch_max", "logprob_mismatch_mean"):
        assert getattr(twice.measures, name) == pytest.approx(getattr(once.measures, name)), "the epochs' own steps do not count"


def test_each_mini_batch_is_a_step_with_its_own_normalisation(one_rank, model_path):
    """Two steps of one epoch are two updates of half the batch, one after the other."""
    rows, halves = batch(), ([0, 2, 4, 6], [1, 3, 5])
    trainer = section(learning_rate=1e-3, ppo_mini_batch_size=4)
    learned, _, learner = learn(model_path, trainer, max_tokens=70)
    whole = plan(rows, num_ranks=1, max_tokens=70, mini_batch_size=4)
    assert [step.num_sequences for step in whole.steps] == [4, 3]

    slow = Learner(build_engine(load_policy(model_path, trainer), trainer), trainer, seed=0, reference=None)
    losses = []
    for half in halves:
        sequences = [
            PlannedSequence(f"e{i}", rows[f"e{i}"].num_tokens, rows[f"e{i}"].num_sampled_tokens, 0.0, ADVANTAGES[i]) for i in half
        ]
        update = plan_update([sequences], version=0, oldest_version=-1, num_ranks=1, max_tokens=10**4, cost=SequenceCost())
        losses.append(slow.learn(update, rows).measures.loss)
    assert learned.measures.loss == pytest.approx(sum(losses) / 2, abs=1e-6)
    expected = dict(slow.policy.named_weights())
    for name, weight in learner.policy.named_weights():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_scheduler_of_deepspeeds_decides_the_rate(one_rank, model_path):
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
    trainer = section(learning_rate=1e-3, deepspeed={"scheduler": scheduler})
    _, _, learner = learn(model_path, trainer, max_tokens=70)
    rows = batch()
    rates = [learner.learn(plan(rows, num_ranks=1, max_tokens=70, version=v), rows).learning_rate for v in (0, 1, 1)]
    assert 0 < rates[1] < rates[2] < 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_optimizer_takes_the_same_step(one_rank, model_path, stage):
    def stepped(**zero):
        trainer = section(
            learning_rate=1e-3, deepspeed={"zero_optimization": {"stage": stage, **zero}, "zero_force_ds_cpu_optimizer": False}
        )
        return dict(learn(model_path, trainer, max_tokens=70)[2].policy.named_weights())

    expected = stepped()
    for name, weight in stepped(offload_optimizer={"device": "cpu"}).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def test_weights_move_by_the_warmed_up_learning_rate(one_rank, model_path):
    learned, _, learner = learn(model_path, section(learning_rate=1e-3, warmup_updates=4), max_tokens=70)
    assert learned.learning_rate == pytest.approx(2.5e-4)
    before = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    moved = max((weight - before[name]).abs().max().item() for name, weight in learner.policy.named_weights())
    assert moved == pytest.approx(2.5e-4, rel=1e-2), "Adam's first step is the learning rate wherever there is a gradient"


def test_a_second_update_starts_from_a_clean_gradient(one_rank, model_path):
    _, gradients, learner = learn(model_path, section(learning_rate=1e-12), max_tokens=70)
    first = {name: gradient.clone() for name, gradient in gradients.items()}
    rows = batch()
    learner.learn(plan(rows, num_ranks=1, max_tokens=10_000, version=1), rows)
    assert_same_gradients(gradients, first)


def test_disagreement_with_the_engine_stops_before_the_step(one_rank, model_path):
    before = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    with pytest.raises(TrainingError, match=r"differ by .* on average .* over 66 tokens of the first rollouts; no token"):
        learn(model_path, section(max_logprob_mismatch=1e-6, learning_rate=1.0), max_tokens=70)
    after = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def learned_on_two_ranks(run_on_two_ranks, model_path, tmp_path):
    """What tests/trainer/learning.py saves for each of the settings."""

    def learned(settings):
        output = tmp_path / "results.pt"
        run_on_two_ranks("learning.py", model_path, json.dumps(settings), "70", output, timeout_s=280)
        return torch.load(output)

    return learned


@pytest.mark.stack
@pytest.mark.timeout(300)
@DEPRECATED_BY_TORCH
def test_two_ranks_and_every_stage_have_the_gradient_and_the_weights_of_one(one_rank, model_path, tmp_path, learned_on_two_ranks):
    settings = [{"learning_rate": 1e-3, "deepspeed": {"zero_optimization": {"stage": stage}}} for stage in (1, 2, 3)]
    loss, expected = reference(model_path)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    weights = dict(learn(model_path, section(**settings[0]), max_tokens=70)[2].policy.named_weights())
    alone = [dict(learn(model_path, section(**each), max_tokens=70)[2].policy.named_weights()) for each in settings[1:]]
    results = learned_on_two_ranks(settings)
    for result in results:
        assert result["loss"] == pytest.approx(loss, abs=1e-6)
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert_same_gradients(result["gradients"], expected)
    for index, result in enumerate(results):
        exported = load_file(tmp_path / str(index) / "checkpoints" / "v00001" / "model" / "model.safetensors")
        assert all(torch.equal(exported[name], weight) for name, weight in result["weights"].items())
    for other in [*alone, *(result["weights"] for result in results)]:
        assert other.keys() == weights.keys()
        for name, weight in weights.items():
            # Adam's first step is the learning rate whatever the gradient's size, so rounding shows where that is nearly 0.
            assert (other[name] - weight).abs().max() <= 2e-3
            assert ((other[name] - weight).abs() > 1e-6).float().mean() < 1e-3, name


@pytest.mark.stack
@pytest.mark.timeout(300)
@DEPRECATED_BY_TORCH
def test_two_ranks_have_the_objective_of_one(one_rank, model_path, other_model_path, tmp_path, learned_on_two_ranks):
    objectives = [
        *({"pg_variant": variant} for variant in POLICY_LOSSES),
        {"loss_agg_mode": "seq-mean-token-mean", "kl": {"coefficient": 0.1, "reference_path": str(other_model_path)}},
        {"pg_variant": "vanilla", "correction": {"action": "truncate", "level": "sequence", "batch_normalise": True}},
        {
            "pg_variant": "decoupled_ppo",
            "ppo_epochs": 2,
            "learning_rate": 1e-3,
            "correction": {"action": "mask", "level": "turn", "low": 0.6, "high": 1.5, "batch_normalise": True},
            "kl": {"coefficient": 0.1, "estimator": "k2", "reference_path": str(other_model_path)},
            "deepspeed": {"zero_optimization": {"stage": 3}},
        },
    ]
    results = learned_on_two_ranks(objectives)
    for each, result in zip(objectives, results, strict=True):
        learned, gradients, _ = learn(model_path, section(**{**each, "deepspeed": {}}), max_tokens=10_000)
        assert result["loss"] == pytest.approx(learned.measures.loss, abs=1e-6), each
        assert_same_gradients(result["gradients"], gradients)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_stays_close_to_float32(one_rank, model_path, stage):
    trainer = section(dtype="bfloat16", deepspeed={"zero_optimization": {"stage": stage}})
    learned, gradients, learner = learn(model_path, trainer, max_tokens=70)
    loss, expected = reference(model_path)
    assert learned.measures.loss == pytest.approx(loss, abs=2e-2)
    assert {weight.dtype for _, weight in learner.policy.named_weights()} == {torch.bfloat16}
    for name, gradient in expected.items():
        similarity = torch.nn.functional.cosine_similarity(gradients[name].float().flatten(), gradient.flatten(), dim=0)
        assert similarity > 0.98, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradient_on_a_gpu_is_plain_autograds(one_rank, model_path):
    learned, gradients, _ = learn(model_path, section(), max_tokens=70)
    loss, expected = reference(model_path)
    assert learned.measures.loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name].cpu(), gradient, rtol=1e-3, atol=1e-5)
