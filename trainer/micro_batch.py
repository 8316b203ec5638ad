"""The tensors of one forward and backward pass: trajectories as rows, padded on the right.

Padding needs no attention mask: under causal attention no token looks at what comes after it, and padding has loss mask 0.

Shapes: B sequences, T tokens of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.trajectory import Trajectory
from trainer.batching import PlannedSequence

NOT_SAMPLED = -1


@dataclass(frozen=True)
class MicroBatch:
    """[B, T] by token, [B, 1] or [B] by sequence."""

    token_ids_BT: Tensor
    """int64, 0 in the padding."""
    loss_mask_BT: Tensor
    """bool, True where the policy sampled the token, recently enough."""
    behaviour_logprobs_BT: Tensor
    """float32, 0 where nothing was sampled."""
    advantages_BT: Tensor
    """float32, 0 where nothing was sampled."""
    turn_index_BT: Tensor
    """int64, the turn that sampled the token; NOT_SAMPLED elsewhere."""
    versions_BT: Tensor
    """int64, the policy version that sampled the token; NOT_SAMPLED elsewhere."""
    rewards_B1: Tensor
    """float32, of whole episodes."""
    temperatures_B: Tensor
    """float32, what each sequence was sampled at."""
    is_on_policy_B1: Tensor
    """bool: every sampled token is of the version being trained, so engine and trainer must agree on its log-probability."""

    @property
    def is_sampled_BT(self) -> Tensor:
        """bool, also where the token is too old to carry loss."""
        return self.versions_BT != NOT_SAMPLED


def collate(
    trajectories: Sequence[Trajectory],
    planned: Sequence[PlannedSequence],
    *,
    version: int,
    oldest_version: int,
    device: torch.device,
) -> MicroBatch:
    """Rows in the order given. With no trajectory, one row without sampled tokens, whose gradient is 0.

    Args: planned: what the plan says of each. version: the one being trained. oldest_version: tokens that older ones sampled
        carry no loss.
    """
    num_rows = max(1, len(trajectories))
    longest = max([2, *(trajectory.num_tokens for trajectory in trajectories)])
    token_ids = np.zeros((num_rows, longest), dtype=np.int64)
    loss_mask = np.zeros((num_rows, longest), dtype=np.bool_)
    logprobs = np.zeros((num_rows, longest), dtype=np.float32)
    advantages = np.zeros((num_rows, longest), dtype=np.float32)
    turn_index = np.full((num_rows, longest), NOT_SAMPLED, dtype=np.int64)
    versions = np.full((num_rows, longest), NOT_SAMPLED, dtype=np.int64)
    rewards = np.zeros((num_rows, 1), dtype=np.float32)
    temperatures = np.ones(num_rows, dtype=np.float32)
    is_on_policy = np.zeros((num_rows, 1), dtype=np.bool_)
    for row, (trajectory, sequence) in enumerate(zip(trajectories, planned, strict=True)):
        length = trajectory.num_tokens
        token_ids[row, :length] = trajectory.token_ids
        logprobs[row, :length] = trajectory.logprobs
        versions[row, :length] = trajectory.token_versions
        turn_index[row, :length] = turn_indices(trajectory)
        advantages[row, :length] = token_advantages(sequence, turn_index[row, :length])
        rewards[row] = sequence.reward
        temperatures[row] = trajectory.temperature
        is_on_policy[row] = all(span.version == version for span in trajectory.version_spans)
    loss_mask = (versions != NOT_SAMPLED) & (versions >= oldest_version)
    assert not loss_mask[:, 0].any(), "the first token of an episode comes from its prompt"
    arrays = (token_ids, loss_mask, logprobs, advantages, turn_index, versions, rewards, temperatures, is_on_policy)
    return MicroBatch(*(torch.from_numpy(array).to(device) for array in arrays))


def turn_indices(trajectory: Trajectory) -> npt.NDArray[np.int64]:
    """[T] which turn sampled each token, NOT_SAMPLED elsewhere. A record without turns is one turn."""
    indices = np.full(trajectory.num_tokens, 0 if not trajectory.turns else NOT_SAMPLED, dtype=np.int64)
    for index, turn in enumerate(trajectory.turns):
        indices[turn.start : turn.end] = index
    indices[trajectory.loss_mask == 0] = NOT_SAMPLED
    return indices


def token_advantages(planned: PlannedSequence, turn_index_T: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[T] the advantage of each token's episode, or of its turn where the plan has those; 0 where nothing was sampled."""
    by_turn = np.asarray(planned.turn_advantages or (planned.advantage,), dtype=np.float64)
    turn_T = turn_index_T if planned.turn_advantages else np.zeros_like(turn_index_T)
    return np.where(turn_index_T == NOT_SAMPLED, 0.0, by_turn[turn_T])
