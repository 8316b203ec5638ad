"""Whole weights of a policy that the ranks may share out among them, gathered as often as rank 0 has to push them.

Under ZeRO-1 and -2 every rank has all weights, and only rank 0 reads them. Under ZeRO-3 gathering is a collective: rank 0 announces
each pass, and the other ranks take part until it says that no more will come.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer import ranks
from trainer.model import Policy, is_partitioned
from trainer.weight_buckets import WeightSource

GATHER = b"gather"
DONE = b"done"


def is_collective(policy: Policy) -> bool:
    """ZeRO-3 keeps a share of each parameter on each rank."""
    return any(map(is_partitioned, policy.parameters()))


def weight_source(policy: Policy) -> WeightSource:
    """Rank 0's source: the weights as they are when they are gathered."""
    num_elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in policy.parameters())
    return WeightSource(lambda: _announced(policy), num_elements)


def finish(policy: Policy) -> None:
    """Rank 0: no more passes will come; the other ranks go on."""
    if is_collective(policy):
        ranks.from_rank_zero(DONE, _device(policy))


def follow(policy: Policy) -> None:
    """The other ranks: takes part in every pass, until there are no more."""
    if is_collective(policy):
        while ranks.from_rank_zero(DONE, _device(policy)) == GATHER:
            take_part(policy)


def take_part(policy: Policy) -> None:
    """The other ranks' side of one pass."""
    for _ in policy.named_weights():
        pass


def _announced(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    if is_collective(policy):
        ranks.from_rank_zero(GATHER, _device(policy))
    weights = policy.named_weights()
    try:
        for named in weights:  # noqa: UP028 - `yield from` would close `weights` before they are gone through.
            yield named
    finally:
        # The other ranks go through all of it, also when a push fails in the middle.
        if is_collective(policy):
            for _ in weights:
                pass


def _device(policy: Policy) -> torch.device:
    return next(policy.parameters()).device
