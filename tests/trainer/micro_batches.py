"""Micro-batches from plain lists, for tests of formulas."""

import torch

from trainer.micro_batch import NOT_SAMPLED, MicroBatch


def micro_batch(
    mask, *, behaviour=None, turns=None, versions=None, advantages=None, rewards=None, on_policy=None, temperatures=None
):
    """Rows with loss mask `mask`; what is not given is 0, on-policy and of temperature 1.

    Turns and versions hold where the mask does.
    """
    mask = torch.as_tensor(mask, dtype=torch.bool)
    zeros = torch.zeros(mask.shape)

    def where_sampled(values):
        indices = zeros.long() if values is None else torch.as_tensor(values)
        return torch.where(mask, indices, NOT_SAMPLED)

    return MicroBatch(
        token_ids_BT=zeros.long(),
        loss_mask_BT=mask,
        behaviour_logprobs_BT=zeros if behaviour is None else torch.as_tensor(behaviour),
        advantages_BT=zeros if advantages is None else torch.as_tensor(advantages),
        turn_index_BT=where_sampled(turns),
        versions_BT=where_sampled(versions),
        rewards_B1=torch.zeros(len(mask), 1) if rewards is None else torch.as_tensor(rewards),
        temperatures_B=torch.ones(len(mask)) if temperatures is None else torch.as_tensor(temperatures),
        is_on_policy_B1=torch.ones(len(mask), 1, dtype=torch.bool) if on_policy is None else torch.as_tensor(on_policy),
    )
