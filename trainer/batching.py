"""Sequences → micro-batches: balanced over ranks by tokens, padded rows under a token limit, as many on every rank.

A micro-batch is a set of rows padded to its longest; its cost is rows x longest. Ranks step together (ZeRO-2 reduces in every
micro-step), so each gets the same number of micro-batches; one with nothing left gets an empty one.
"""

from collections.abc import Iterable, Sequence

import msgspec

from trainer.aggregation import BatchSize


class PlannedSequence(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory of the batch, by its entry in the stream."""

    entry_id: str
    num_tokens: int
    reward: float
    """Of the whole episode."""
    advantage: float
    """Of every sampled token, from an estimator of episodes; 0 where one of tokens estimates it in the preparation."""
    turn_advantages: tuple[float, ...] = ()
    """By turn, in place of `advantage`, from an estimator of turns."""
    turn_rewards: tuple[float, ...] = ()
    """By turn, what an estimator of tokens starts from; they may differ from what the environment gave."""


MicroBatchPlan = tuple[PlannedSequence, ...]
Share = tuple[MicroBatchPlan, ...]
"""What one rank does in one epoch."""


class BatchPlan(msgspec.Struct, frozen=True):
    """One update, as rank 0 hands it to all ranks."""

    version: int
    """The policy version being trained; the update makes the next one."""
    oldest_version: int
    """Tokens that older versions sampled carry no loss."""
    num_sequences: int
    num_sampled_tokens: int
    shares: tuple[Share, ...]
    """By rank."""

    @property
    def size(self) -> BatchSize:
        return BatchSize(self.num_sequences, self.num_sampled_tokens)


def entry_ids(share: Share) -> list[str]:
    """The stream entries of one rank's share."""
    return [sequence.entry_id for micro_batch in share for sequence in micro_batch]


def plan_shares(sequences: Iterable[PlannedSequence], *, num_ranks: int, max_tokens: int) -> tuple[Share, ...]:
    """Every sequence into one micro-batch of one rank.

    Args: max_tokens: limit of rows x longest row. A sequence above it gets a micro-batch of its own.
    """
    shares = [_pack(part, max_tokens) for part in _balance(sequences, num_ranks)]
    count = max(map(len, shares))
    return tuple(_split_to(share, count) for share in shares)


def _balance(sequences: Iterable[PlannedSequence], num_ranks: int) -> list[list[PlannedSequence]]:
    """Longest first, each to the rank with the fewest tokens so far."""
    parts: list[list[PlannedSequence]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for sequence in sorted(sequences, key=_longest_first):
        rank = tokens.index(min(tokens))
        parts[rank].append(sequence)
        tokens[rank] += sequence.num_tokens
    return parts


def _pack(longest_first: Sequence[PlannedSequence], max_tokens: int) -> list[MicroBatchPlan]:
    packed: list[list[PlannedSequence]] = []
    for sequence in longest_first:
        if packed and (len(packed[-1]) + 1) * packed[-1][0].num_tokens <= max_tokens:
            packed[-1].append(sequence)
        else:
            packed.append([sequence])
    return [tuple(rows) for rows in packed]


def _split_to(share: list[MicroBatchPlan], count: int) -> Share:
    """`share` with its micro-batches of the most rows halved, or empty ones added, until there are `count`."""
    parts = list(share)
    while len(parts) < count:
        index = max(range(len(parts)), key=lambda i: len(parts[i]), default=None)
        if index is None or len(parts[index]) < 2:
            parts.append(())
            continue
        rows = parts[index]
        parts[index : index + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return tuple(parts)


def _longest_first(sequence: PlannedSequence) -> tuple[int, str]:
    return -sequence.num_tokens, sequence.entry_id
