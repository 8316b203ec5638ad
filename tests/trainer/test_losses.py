"""Policy losses: hand-computed numbers, a slow reference, and gradients that are zero where they must be."""

import math

import pytest
import torch

from trainer.aggregation import AGGREGATIONS, BatchSize
from trainer.losses import POLICY_LOSSES, LossSettings, behaviour_log_ratio

BOUNDS = LossSettings(clip_low=0.2, clip_high=0.3, tis_cap=2.0)


def evaluate(variant, logprobs, behaviour, advantages):
    logprobs_BT = torch.tensor(logprobs, requires_grad=True)
    log_ratio_BT = behaviour_log_ratio(logprobs_BT, torch.tensor(behaviour))
    result = POLICY_LOSSES[variant](logprobs_BT, log_ratio_BT, torch.tensor(advantages), BOUNDS)
    result.per_token_BT.sum().backward()
    return result, logprobs_BT.grad


def log(*values):
    return [[math.log(value) for value in values]]


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_ppo_by_hand():
    # Ratios 1, 1.25 and 2 with A = 1; 0.5 and 2 with A = -1.
    result, gradient = evaluate("ppo", log(0.4, 0.5, 0.8, 0.2, 0.8), log(0.4, 0.4, 0.4, 0.4, 0.4), [[1.0, 1.0, 1.0, -1.0, -1.0]])
    close(result.per_token_BT, [[-1.0, -1.25, -1.3, 0.8, 2.0]])
    close(result.is_clipped_BT, [[False, False, True, True, False]])
    close(gradient, [[-1.0, -1.25, 0.0, 0.0, 2.0]])


def test_tis_by_hand():
    # Ratios 1, 2 and 4; the cap is 2 and carries no gradient.
    result, gradient = evaluate("tis", log(0.2, 0.4, 0.8), log(0.2, 0.2, 0.2), [[1.0, -0.5, 2.0]])
    close(result.per_token_BT, [[-math.log(0.2), math.log(0.4), -4 * math.log(0.8)]])
    close(result.is_clipped_BT, [[False, False, True]])
    close(gradient, [[-1.0, 1.0, -4.0]])


def test_vanilla_by_hand():
    result, gradient = evaluate("vanilla", log(0.25, 0.5), log(0.9, 0.01), [[2.0, -1.0]])
    close(result.per_token_BT, [[-2 * math.log(0.25), math.log(0.5)]])
    close(gradient, [[-2.0, 1.0]])
    assert not result.is_clipped_BT.any()


@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_extreme_ratios_stay_finite(variant):
    result, gradient = evaluate(variant, [[-1e4, -1e-9, 0.0]], [[-1e-9, -1e4, -5e3]], [[1.0, -1.0, 1.0]])
    assert torch.isfinite(result.per_token_BT).all()
    assert torch.isfinite(gradient).all()


def reference(variant, logprob, behaviour, advantage):
    ratio = math.exp(max(-20.0, min(20.0, logprob - behaviour)))
    if variant == "vanilla":
        return -advantage * logprob
    if variant == "tis":
        return -min(ratio, BOUNDS.tis_cap) * advantage * logprob
    return -min(ratio * advantage, max(1 - BOUNDS.clip_low, min(1 + BOUNDS.clip_high, ratio)) * advantage)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_agrees_with_a_loop_over_tokens(variant, mode):
    generator = torch.Generator().manual_seed(3)
    logprobs = -3 * torch.rand(5, 9, generator=generator)
    behaviour = logprobs + torch.randn(5, 9, generator=generator)
    advantages = torch.randn(5, 1, generator=generator)
    mask = torch.rand(5, 9, generator=generator) < 0.5
    mask[0] = False
    size = BatchSize(num_sequences=4, num_sampled_tokens=int(mask.sum()))

    loss = POLICY_LOSSES[variant](logprobs, behaviour_log_ratio(logprobs, behaviour), advantages, BOUNDS)
    actual = (AGGREGATIONS[mode](mask, size) * loss.per_token_BT).sum()

    expected = 0.0
    for row in range(5):
        tokens = [t for t in range(9) if mask[row, t]]
        losses = [reference(variant, logprobs[row, t].item(), behaviour[row, t].item(), advantages[row, 0].item()) for t in tokens]
        if mode == "token-mean":
            expected += sum(losses) / size.num_sampled_tokens
        elif losses:
            expected += sum(losses) / len(losses) / size.num_sequences
    assert actual.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_gradient_is_zero_where_the_mask_is_zero(variant, mode):
    logprobs = torch.tensor([[-1.0, -2.0, -0.5, -0.1]], requires_grad=True)
    mask = torch.tensor([[False, True, False, True]])
    loss = POLICY_LOSSES[variant](logprobs, behaviour_log_ratio(logprobs, torch.zeros(1, 4)), torch.tensor([[1.0]]), BOUNDS)
    (AGGREGATIONS[mode](mask, BatchSize(1, 2)) * loss.per_token_BT).sum().backward()
    assert (logprobs.grad[~mask] == 0).all()
    assert (logprobs.grad[mask] != 0).any()
