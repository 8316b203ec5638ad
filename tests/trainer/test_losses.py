"""Policy losses: hand-computed numbers, a slow reference, and gradients that are zero where they must be."""

import dataclasses
import math

import msgspec
import pytest
import torch

from shared.loss_settings import POLICY_LOSS_NAMES, PolicyLossSection
from trainer.aggregation import AGGREGATIONS, BatchSize
from trainer.losses import POLICY_LOSSES, LossInputs, interpolated_proximal

BOUNDS = PolicyLossSection(clip_low=0.2, clip_high=0.3, tis_cap=2.0, kimi_tau=0.1, clamp_low=0.5, clamp_high=2.0)


def loss_inputs(logprobs, behaviour, advantages, *, proximal=None, rewards=None, mask=None, versions=None, version=0):
    logprobs = torch.as_tensor(logprobs).clone().requires_grad_()
    behaviour = torch.as_tensor(behaviour)
    return LossInputs(
        logprobs_BT=logprobs,
        behaviour_logprobs_BT=behaviour,
        proximal_logprobs_BT=behaviour if proximal is None else torch.as_tensor(proximal),
        advantages_BT=torch.as_tensor(advantages),
        rewards_B1=torch.ones(len(logprobs), 1) if rewards is None else torch.as_tensor(rewards),
        loss_mask_BT=torch.ones_like(behaviour, dtype=torch.bool) if mask is None else torch.as_tensor(mask),
        versions_BT=torch.zeros_like(behaviour, dtype=torch.int64) if versions is None else torch.as_tensor(versions),
        version=version,
    )


def evaluate(variant, inputs, settings=BOUNDS):
    """The loss, and its gradient by log-probability when tokens are summed."""
    result = POLICY_LOSSES[variant](inputs, settings)
    result.per_token_BT.sum().backward()
    return result, inputs.logprobs_BT.grad


def log(*values):
    return [[math.log(value) for value in values]]


def ratios(*values):
    """Log-probabilities whose ratios to `log(0.1, …)` are `values`, and those."""
    return log(*(0.1 * value for value in values)), log(*(0.1 for _ in values))


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_every_name_of_the_run_file_has_its_function():
    assert tuple(POLICY_LOSSES) == POLICY_LOSS_NAMES


def test_ppo_by_hand():
    inputs = loss_inputs(*ratios(1.0, 1.25, 2.0, 0.5, 2.0), [[1.0, 1.0, 1.0, -1.0, -1.0]])
    result, gradient = evaluate("ppo", inputs)
    close(result.per_token_BT, [[-1.0, -1.25, -1.3, 0.8, 2.0]])
    close(result.is_clipped_BT, [[False, False, True, True, False]])
    close(gradient, [[-1.0, -1.25, 0.0, 0.0, 2.0]])


def test_ppo_with_dual_clip_by_hand():
    settings = msgspec.structs.replace(BOUNDS, dual_clip=3.0)
    inputs = loss_inputs(*ratios(2.0, 5.0, 5.0, 0.5), [[-1.0, -1.0, 1.0, -1.0]])
    result, gradient = evaluate("ppo", inputs, settings)
    close(result.per_token_BT, [[2.0, 3.0, -1.3, 0.8]])
    close(result.is_clipped_BT, [[False, True, True, True]])
    close(gradient, [[2.0, 0.0, 0.0, 0.0]])


def test_tis_by_hand():
    result, gradient = evaluate("tis", loss_inputs(*ratios(1.0, 2.0, 4.0), [[1.0, -0.5, 2.0]]))
    close(result.per_token_BT, [[-math.log(0.1), math.log(0.2), -4 * math.log(0.4)]])
    close(result.is_clipped_BT, [[False, False, True]])
    close(gradient, [[-1.0, 1.0, -4.0]])


def test_cispo_by_hand():
    result, gradient = evaluate("cispo", loss_inputs(*ratios(1.1, 0.5, 4.0), [[1.0, -1.0, 2.0]]))
    close(result.per_token_BT, [[-1.1 * math.log(0.11), 0.8 * math.log(0.05), -2.6 * math.log(0.4)]])
    close(result.is_clipped_BT, [[False, True, True]])
    close(gradient, [[-1.1, 0.8, -2.6]])


def test_topr_by_hand():
    # The first episode was rewarded: no ratio. The second was not: its ratio is cut at 1, whatever the sign of its advantage.
    (logprobs,), (behaviour,) = ratios(4.0, 0.5)
    inputs = loss_inputs([logprobs] * 2, [behaviour] * 2, [[1.0, 1.0], [-1.0, 2.0]], rewards=[[0.5], [0.0]])
    result, gradient = evaluate("topr", inputs)
    close(result.per_token_BT, [[-math.log(0.4), -math.log(0.05)], [math.log(0.4), -math.log(0.05)]])
    close(result.is_clipped_BT, [[False, False], [True, False]])
    close(gradient, [[-1.0, -1.0], [1.0, -1.0]])


def test_kimi15_by_hand():
    result, gradient = evaluate("kimi15", loss_inputs(*ratios(1.0, math.e**2), [[1.0, -2.0]]))
    close(result.per_token_BT, [[-math.log(0.1), 2 * (math.log(0.1) + 2) + 0.05 * 4]])
    close(gradient, [[-1.0, 2.0 + 0.1 * 2]])
    assert not result.is_clipped_BT.any()


def test_decoupled_ppo_by_hand():
    # Behaviour 0.1; proximal 0.2, 0.4, 0.1 and 0.1, so w = 2, 2 (cut from 4), 1 and 1; ρ = 1.25, 1.1, 1.5 and 0.5.
    inputs = loss_inputs(
        log(0.25, 0.44, 0.15, 0.05), log(0.1, 0.1, 0.1, 0.1), [[1.0, -1.0, -1.0, -1.0]], proximal=log(0.2, 0.4, 0.1, 0.1)
    )
    result, gradient = evaluate("decoupled_ppo", inputs)
    close(result.per_token_BT, [[-2 * 1.25, 2 * 1.1, 1.5, 0.8]])
    close(result.is_clipped_BT, [[False, True, False, True]])
    close(gradient, [[-2.5, 2.2, 1.5, 0.0]])


def test_proximal_is_interpolated_by_version():
    # The update of version 5 makes 6: of age 0 the proximal policy is the behaviour policy, of age 1 halfway to π_θ, of age 3 ¾.
    inputs = loss_inputs([[-1.0] * 4], [[-3.0] * 4], [[1.0] * 4], versions=[[5, 4, 2, 7]], version=5)
    proximal = interpolated_proximal(inputs)
    close(proximal, [[-3.0, -2.0, -1.5, -3.0]])
    assert not proximal.requires_grad


def test_decoupled_ppo_with_interpolated_proximal_by_hand():
    # log r = log 4 at age 1: π_prox / μ = ρ = 2, both bounds active.
    settings = msgspec.structs.replace(BOUNDS, proximal="interpolated", tis_cap=1.5)
    inputs = loss_inputs(*ratios(4.0, 4.0), [[1.0, -1.0]], versions=[[0, 0]], version=1)
    result, gradient = evaluate("decoupled_ppo", inputs, settings)
    close(result.per_token_BT, [[-1.5 * 1.3, 1.5 * 2.0]])
    close(gradient, [[0.0, 3.0]])


def test_gspo_by_hand():
    # Sequence ratios exp(mean(log 1, log 1.44)) = 1.2 and exp(mean(log 4, log 1)) = 2; the masked token counts in neither.
    logprobs = [*log(0.1, 0.144, 0.9), *log(0.4, 0.1, 0.9)]
    mask = [[True, True, False]] * 2
    inputs = loss_inputs(logprobs, [*log(0.1, 0.1, 0.1)] * 2, [[1.0] * 3, [1.0] * 3], mask=mask)
    result = POLICY_LOSSES["gspo"](inputs, BOUNDS)
    close(result.per_token_BT[:, :2], [[-1.2, -1.2], [-1.3, -1.3]])
    close(result.is_clipped_BT[:, :2], [[False, False], [True, True]])
    weights = AGGREGATIONS["seq-mean-token-mean"](inputs.loss_mask_BT, BatchSize(2, 4), norm_tokens=None)
    (weights * result.per_token_BT).sum().backward()
    close(inputs.logprobs_BT.grad, [[-0.3, -0.3, 0.0], [0.0, 0.0, 0.0]])


def test_gspo_has_the_gradient_of_the_sequence_objective():
    generator = torch.Generator().manual_seed(1)
    logprobs, noise = -torch.rand(3, 6, generator=generator), 0.2 * torch.randn(3, 6, generator=generator)
    mask = torch.rand(3, 6, generator=generator) < 0.7
    advantages = torch.tensor([[1.0], [-0.5], [2.0]]).expand(3, 6)
    inputs = loss_inputs(logprobs, logprobs + noise, advantages, mask=mask)
    weights = AGGREGATIONS["seq-mean-token-mean"](mask, BatchSize(3, int(mask.sum())), norm_tokens=None)
    (weights * POLICY_LOSSES["gspo"](inputs, BOUNDS).per_token_BT).sum().backward()

    plain = logprobs.clone().requires_grad_()
    total = torch.zeros(())
    for row in range(3):
        ratio = (plain - logprobs - noise)[row][mask[row]].mean().exp()
        advantage = advantages[row, 0]
        total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage) / 3
    total.backward()
    torch.testing.assert_close(inputs.logprobs_BT.grad, plain.grad, rtol=1e-5, atol=1e-7)


def test_clamped_is_by_hand():
    result, gradient = evaluate("clamped_is", loss_inputs(*ratios(0.25, 1.5, 4.0), [[1.0, -1.0, -1.0]]))
    close(result.per_token_BT, [[-0.5, 1.5, 2.0]])
    close(result.is_clipped_BT, [[True, False, True]])
    close(gradient, [[0.0, 1.5, 0.0]])


def test_vanilla_by_hand():
    result, gradient = evaluate("vanilla", loss_inputs(log(0.25, 0.5), log(0.9, 0.01), [[2.0, -1.0]]))
    close(result.per_token_BT, [[-2 * math.log(0.25), math.log(0.5)]])
    close(gradient, [[-2.0, 1.0]])
    assert not result.is_clipped_BT.any()


def test_vanilla_is_torchs_weighted_cross_entropy():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 10, generator=generator)
    tokens, advantages = torch.tensor([1, 5, 0, 9]), torch.tensor([1.0, -0.5, 2.0, 0.3])
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).T
    result = POLICY_LOSSES["vanilla"](loss_inputs(logprobs, logprobs, advantages[None]), BOUNDS)
    expected = advantages * torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    torch.testing.assert_close(result.per_token_BT[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_extreme_ratios_stay_finite(variant):
    result, gradient = evaluate(variant, loss_inputs([[-1e4, -1e-9, 0.0]], [[-1e-9, -1e4, -5e3]], [[1.0, -1.0, 1.0]]))
    assert torch.isfinite(result.per_token_BT).all()
    assert torch.isfinite(gradient).all()


def clip(value, low, high):
    return max(low, min(high, value))


def pessimistic(ratio, advantage):
    return -min(ratio * advantage, clip(ratio, 1 - BOUNDS.clip_low, 1 + BOUNDS.clip_high) * advantage)


def reference(variant, *, logprob, behaviour, proximal, advantage, reward, sequence_ratio):
    """One token's loss in float64."""
    log_ratio = clip(logprob - behaviour, -20.0, 20.0)
    ratio = math.exp(log_ratio)
    log_gradient = {
        "vanilla": 1.0,
        "tis": min(ratio, BOUNDS.tis_cap),
        "cispo": clip(ratio, 1 - BOUNDS.clip_low, 1 + BOUNDS.clip_high),
        "topr": 1.0 if reward > 0 else clip(ratio, 0, 1),
    }
    if variant in log_gradient:
        return -log_gradient[variant] * advantage * logprob
    if variant == "kimi15":
        return -advantage * logprob + BOUNDS.kimi_tau / 2 * log_ratio**2
    if variant == "clamped_is":
        return -clip(ratio, BOUNDS.clamp_low, BOUNDS.clamp_high) * advantage
    if variant == "decoupled_ppo":
        weight = min(math.exp(clip(proximal - behaviour, -20.0, 20.0)), BOUNDS.tis_cap)
        return weight * pessimistic(math.exp(clip(logprob - proximal, -20.0, 20.0)), advantage)
    return pessimistic({"ppo": ratio, "gspo": sequence_ratio}[variant], advantage)


def random_inputs(seed=3):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(5, 9, generator=generator)
    mask = torch.rand(5, 9, generator=generator) < 0.5
    mask[0] = False
    return loss_inputs(
        logprobs,
        logprobs + torch.randn(5, 9, generator=generator),
        torch.randn(5, 9, generator=generator),
        proximal=logprobs + 0.3 * torch.randn(5, 9, generator=generator),
        rewards=torch.tensor([[1.0], [0.0], [-1.0], [0.5], [0.0]]),
        mask=mask,
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_agrees_with_a_loop_over_tokens(variant, mode):
    inputs = random_inputs()
    mask = inputs.loss_mask_BT
    size = BatchSize(num_sequences=4, num_sampled_tokens=int(mask.sum()))
    actual = (AGGREGATIONS[mode](mask, size, norm_tokens=16) * POLICY_LOSSES[variant](inputs, BOUNDS).per_token_BT).sum()

    expected = 0.0
    for row in range(5):
        tokens = [t for t in range(9) if mask[row, t]]
        log_ratios = [(inputs.logprobs_BT - inputs.behaviour_logprobs_BT)[row, t].item() for t in tokens]
        losses = [
            reference(
                variant,
                logprob=inputs.logprobs_BT[row, t].item(),
                behaviour=inputs.behaviour_logprobs_BT[row, t].item(),
                proximal=inputs.proximal_logprobs_BT[row, t].item(),
                advantage=inputs.advantages_BT[row, t].item(),
                reward=inputs.rewards_B1[row, 0].item(),
                sequence_ratio=math.exp(sum(log_ratios) / len(log_ratios)),
            )
            for t in tokens
        ]
        if losses:
            expected += {
                "token-mean": sum(losses) / size.num_sampled_tokens,
                "seq-mean-token-mean": sum(losses) / len(losses) / size.num_sequences,
                "seq-mean-token-sum": sum(losses) / size.num_sequences,
                "seq-mean-token-sum-norm": sum(losses) / size.num_sequences / 16,
            }[mode]
    assert actual.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_gradient_is_zero_where_the_mask_is_zero(variant, mode):
    mask = torch.tensor([[False, True, False, True]])
    inputs = loss_inputs([[-1.0, -2.0, -0.5, -0.1]], [[-1.1, -1.9, 0.0, -0.2]], torch.ones(1, 4), mask=mask)
    result = POLICY_LOSSES[variant](inputs, BOUNDS)
    (AGGREGATIONS[mode](mask, BatchSize(1, 2), norm_tokens=16) * result.per_token_BT).sum().backward()
    assert (inputs.logprobs_BT.grad[~mask] == 0).all()
    assert (inputs.logprobs_BT.grad[mask] != 0).any()


@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_masked_tokens_change_nothing(variant):
    inputs = random_inputs()
    mask = inputs.loss_mask_BT
    elsewhere = dataclasses.replace(
        inputs,
        logprobs_BT=torch.where(mask, inputs.logprobs_BT, -7.0),
        behaviour_logprobs_BT=torch.where(mask, inputs.behaviour_logprobs_BT, -0.01),
        advantages_BT=torch.where(mask, inputs.advantages_BT, 50.0),
    )
    ours, others = (POLICY_LOSSES[variant](each, BOUNDS).per_token_BT[mask] for each in (inputs, elsewhere))
    torch.testing.assert_close(ours, others)
