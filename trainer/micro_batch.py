"""The tensors of one forward and backward pass: trajectories as rows, padded on the right.

Padding needs no attention mask: under causal attention no token looks at what comes after it, and padding has loss mask 0.

Shapes: B sequences, T tokens of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.trajectory import Trajectory


@dataclass(frozen=True)
class MicroBatch:
    token_ids_BT: Tensor
    """int64, 0 in the padding."""
    loss_mask_BT: Tensor
    """bool, True where the policy sampled the token, recently enough."""
    behaviour_logprobs_BT: Tensor
    """float32, 0 where the mask is 0."""
    advantages_B1: Tensor
    """float32."""
    temperatures_B: Tensor
    """float32, what each sequence was sampled at."""
    is_on_policy_B1: Tensor
    """bool: every sampled token is of the version being trained, so engine and trainer must agree on its log-probability."""


def collate(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], *, version: int, oldest_version: int, device: torch.device
) -> MicroBatch:
    """Rows in the order given. With no trajectory, one row without sampled tokens, whose gradient is 0.

    Args: version: the one being trained. oldest_version: tokens that older ones sampled carry no loss.
    """
    num_rows = max(1, len(trajectories))
    longest = max([2, *(trajectory.num_tokens for trajectory in trajectories)])
    token_ids = np.zeros((num_rows, longest), dtype=np.int64)
    loss_mask = np.zeros((num_rows, longest), dtype=np.bool_)
    logprobs = np.zeros((num_rows, longest), dtype=np.float32)
    temperatures = np.ones(num_rows, dtype=np.float32)
    is_on_policy = np.zeros((num_rows, 1), dtype=np.bool_)
    for row, trajectory in enumerate(trajectories):
        length = trajectory.num_tokens
        token_ids[row, :length] = trajectory.token_ids
        loss_mask[row, :length] = (trajectory.loss_mask == 1) & (trajectory.token_versions >= oldest_version)
        logprobs[row, :length] = trajectory.logprobs
        temperatures[row] = trajectory.temperature
        is_on_policy[row] = all(span.version == version for span in trajectory.version_spans)
    assert not loss_mask[:, 0].any(), "the first token of an episode comes from its prompt"
    padded_advantages = np.zeros((num_rows, 1), dtype=np.float32)
    padded_advantages[: len(advantages), 0] = advantages
    arrays = (token_ids, loss_mask, logprobs, padded_advantages, temperatures, is_on_policy)
    return MicroBatch(*(torch.from_numpy(array).to(device) for array in arrays))
