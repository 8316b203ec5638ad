"""Policy losses as a user would write them, good and bad."""

import torch

from trainer.losses import PolicyLoss

NOT_A_FUNCTION = 3


def half_vanilla(inputs, settings):
    return PolicyLoss(-0.5 * inputs.advantages_BT * inputs.logprobs_BT, torch.zeros_like(inputs.loss_mask_BT))


def returns_a_tensor(inputs, settings):
    return -inputs.logprobs_BT


def returns_a_mean(inputs, settings):
    return PolicyLoss(inputs.logprobs_BT.mean(), torch.zeros_like(inputs.loss_mask_BT))


def returns_float_flags(inputs, settings):
    return PolicyLoss(-inputs.logprobs_BT, torch.zeros_like(inputs.logprobs_BT))


def takes_nothing():
    return None
