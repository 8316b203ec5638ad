"""The policy loss that a run file names: one of ours, or a user's own function, loaded by import path and held to the contract."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.errors import ConfigurationError, TrainingError
from shared.loss_settings import PolicyLossSection
from trainer import named
from trainer.losses import POLICY_LOSSES, LossInputs, PolicyLoss, PolicyLossFunction


def load_policy_loss(pg_variant: str, *, import_allowlist: Sequence[str]) -> PolicyLossFunction:
    """The loss of `trainer.pg_variant`. Raises: ConfigurationError if it cannot be imported or called as a policy loss."""
    if pg_variant in POLICY_LOSSES:
        return POLICY_LOSSES[pg_variant]
    return OwnPolicyLoss(pg_variant, _imported(pg_variant, import_allowlist))


class OwnPolicyLoss:
    """A user's policy loss, whose results are checked before they reach the optimizer."""

    def __init__(self, import_path: str, function: PolicyLossFunction) -> None:
        self._import_path = import_path
        self._function = function

    def __call__(self, inputs: LossInputs, settings: PolicyLossSection) -> PolicyLoss:
        """Raises: TrainingError unless the function returns a PolicyLoss of [B, T] tensors of their types."""
        loss: Any = self._function(inputs, settings)
        wanted = f"a PolicyLoss of [B, T] = {list(inputs.logprobs_BT.shape)} floats and bools"
        if not isinstance(loss, PolicyLoss):
            raise TrainingError(f"{self._import_path} must return {wanted}, got a {type(loss).__name__}; see trainer/losses.py")
        tensors: dict[str, Any] = {"per_token_BT": loss.per_token_BT, "is_clipped_BT": loss.is_clipped_BT}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.shape != inputs.logprobs_BT.shape:
                found = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
                raise TrainingError(f"{self._import_path} must return {wanted}, got {name} of {found}; see trainer/losses.py")
        if loss.is_clipped_BT.dtype != torch.bool or not loss.per_token_BT.is_floating_point():
            raise TrainingError(
                f"{self._import_path} must return {wanted}, got {loss.per_token_BT.dtype} and {loss.is_clipped_BT.dtype}; see "
                "trainer/losses.py"
            )
        return loss


def _imported(import_path: str, import_allowlist: Sequence[str]) -> PolicyLossFunction:
    function = named.imported(import_path, key="trainer.pg_variant", noun="a function", import_allowlist=import_allowlist)
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"trainer.pg_variant must name a function of (inputs, settings), and {import_path!r} is none: {error}; see "
            "PolicyLossFunction in trainer/losses.py"
        ) from error
    loss: PolicyLossFunction = function
    return loss
