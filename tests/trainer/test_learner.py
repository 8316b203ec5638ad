"""The gradient of an update, against plain autograd, however the batch is cut; with one rank and with two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.errors import TrainingError
from tests.trainer.learning import ADVANTAGES, batch, learn, plan, section
from trainer.learner import warmed_up


def reference(model_path, *, clip=0.2):
    """Loss and gradients of PPO with token-mean, one sequence at a time, without DeepSpeed or any of our tensors."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = list(batch().values())
    num_tokens = sum(row.num_sampled_tokens for row in rows)
    total = torch.zeros(())
    for row, advantage in zip(rows, ADVANTAGES, strict=True):
        tokens = torch.from_numpy(row.token_ids.astype("int64"))
        logprobs = torch.log_softmax(model(tokens[None]).logits[0] / row.temperature, dim=-1)
        for t in range(1, row.num_tokens):
            if row.loss_mask[t]:
                ratio = (logprobs[t - 1, tokens[t]] - float(row.logprobs[t])).exp()
                objective = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
                total = total - objective / num_tokens
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("stage", [1, 2])
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


@pytest.mark.parametrize("variant", ["ppo", "tis", "vanilla"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_every_loss_is_the_same_however_the_batch_is_packed(one_rank, model_path, variant, mode):
    trainer = section(pg_variant=variant, loss_agg_mode=mode)
    whole, whole_gradients, _ = learn(model_path, trainer, max_tokens=10_000)
    cut, cut_gradients, _ = learn(model_path, trainer, max_tokens=70)
    assert cut.measures.loss == pytest.approx(whole.measures.loss, abs=1e-6)
    assert cut.measures.effective_sample_size == pytest.approx(whole.measures.effective_sample_size, rel=1e-5)
    assert_same_gradients(cut_gradients, whole_gradients)


def test_later_epochs_measure_the_ratio_to_the_same_behaviour_policy(one_rank, model_path):
    once, _, _ = learn(model_path, section(learning_rate=1e-3), max_tokens=70)
    twice, _, _ = learn(model_path, section(learning_rate=1e-3, ppo_epochs=2), max_tokens=70)
    assert twice.measures.kl_behaviour != pytest.approx(once.measures.kl_behaviour, rel=1e-3)
    assert twice.kl_behaviour_before == pytest.approx(once.measures.kl_behaviour), "before the first step, whatever follows"


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
    with pytest.raises(TrainingError, match="likely causes: the engine samples at another temperature"):
        learn(model_path, section(max_logprob_mismatch=1e-6, learning_rate=1.0), max_tokens=70)
    after = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.stack
@pytest.mark.timeout(300)
def test_two_ranks_have_the_gradient_of_one(model_path, tmp_path, repository, free_port):
    output = tmp_path / "results.pt"
    settings = json.dumps([{"deepspeed": {"zero_optimization": {"stage": stage}}} for stage in (1, 2)])
    script = repository / "tests" / "trainer" / "learning.py"
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", str(free_port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    environment.pop("LOCAL_RANK", None)
    completed = subprocess.run(
        [*launcher, str(script), str(model_path), settings, "70", str(output)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    loss, expected = reference(model_path)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    for result in torch.load(output):
        assert result["loss"] == pytest.approx(loss, abs=1e-6)
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert_same_gradients(result["gradients"], expected)


def test_warm_up_is_linear_and_ends_at_the_learning_rate():
    assert [warmed_up(1.0, version, warmup_updates=4) for version in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmed_up(1.0, 0, warmup_updates=0) == 1.0


@pytest.mark.parametrize("stage", [1, 2])
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
