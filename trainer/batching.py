"""Sequences → optimizer steps → micro-batches: packed under a token limit, balanced over ranks by cost, as many on every rank.

A micro-batch is a set of sequences that are packed without padding. Its memory goes by tokens, which `max_tokens` limits; its time
by cost, which also counts attention. Ranks step together (ZeRO-2 and -3 communicate in every micro-step), so each gets the same
number of micro-batches, dearest first; one with nothing left gets an empty one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from trainer.aggregation import BatchSize

T = TypeVar("T")


class PlannedSequence(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory of the batch, by its entry in the stream."""

    entry_id: str
    num_tokens: int
    num_sampled_tokens: int
    """Those that carry loss."""
    reward: float
    """Of the whole episode."""
    advantage: float
    """Of every sampled token, from an estimator of episodes; 0 where one of tokens estimates it in the preparation."""
    turn_advantages: tuple[float, ...] = ()
    """By turn, in place of `advantage`, from an estimator of turns."""
    turn_rewards: tuple[float, ...] = ()
    """By turn, what an estimator of tokens starts from; they may differ from what the environment gave."""


@dataclass(frozen=True)
class SequenceCost:
    """Time of a forward and backward pass over a sequence of T tokens, in that of a token without attention: T + T² / κ.

    A token costs 2 FLOPs for each weight that multiplies it and, under causal attention over T tokens, 2·T·L·D for L layers with
    D = heads x head size. So κ = weights / (L·D), the length at which attention costs as much as everything else.
    """

    break_even_tokens: float = math.inf
    """κ; infinite counts tokens only."""

    def __call__(self, num_tokens: int) -> float:
        return num_tokens + num_tokens * num_tokens / self.break_even_tokens


MicroBatchPlan = tuple[PlannedSequence, ...]
Share = tuple[MicroBatchPlan, ...]
"""What one rank does in one epoch: the micro-batches of all optimizer steps, one after the other."""


class StepPlan(msgspec.Struct, frozen=True):
    """One optimizer step, on a mini-batch whose loss is normalised by itself."""

    num_micro_batches: int
    """Of each rank."""
    num_sequences: int
    num_sampled_tokens: int

    @property
    def size(self) -> BatchSize:
        return BatchSize(self.num_sequences, self.num_sampled_tokens)


class BatchPlan(msgspec.Struct, frozen=True):
    """One update, as rank 0 hands it to all ranks."""

    version: int
    """The policy version being trained; the update makes the next one."""
    oldest_version: int
    """Tokens that older versions sampled carry no loss."""
    steps: tuple[StepPlan, ...]
    """Of one epoch."""
    shares: tuple[Share, ...]
    """By rank."""

    @property
    def size(self) -> BatchSize:
        """Of the whole batch."""
        return BatchSize(self.num_sequences, self.num_sampled_tokens)

    @property
    def num_sequences(self) -> int:
        return sum(step.num_sequences for step in self.steps)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(step.num_sampled_tokens for step in self.steps)


def by_step(steps: Iterable[StepPlan], micro_batches: Sequence[T]) -> Iterator[tuple[StepPlan, Sequence[T]]]:
    """Each step with its own of one rank's `micro_batches`, or of what was made of those one by one."""
    start = 0
    for step in steps:
        yield step, micro_batches[start : start + step.num_micro_batches]
        start += step.num_micro_batches


def entry_ids(share: Share) -> list[str]:
    """The stream entries of one rank's share."""
    return [sequence.entry_id for micro_batch in share for sequence in micro_batch]


def mini_batches(
    groups: Sequence[Sequence[PlannedSequence]], *, size: int | None, unit: Literal["group", "episode"]
) -> list[list[PlannedSequence]]:
    """The sequences of each optimizer step: of `size` whole groups in order, or dealt out by episode so that siblings part.

    Args: size: None makes one of all. The last mini-batch of groups may be smaller; those of episodes differ by one at most.
    """
    if unit == "group":
        size = size or len(groups)
        parts = [groups[start : start + size] for start in range(0, len(groups), size)]
        batches = [[sequence for group in part for sequence in group] for part in parts]
    else:
        sequences = [sequence for group in groups for sequence in group]
        count = math.ceil(len(sequences) / (size or len(sequences) or 1))
        batches = [sequences[start::count] for start in range(count)]
    return [batch for batch in batches if batch]


def plan_update(
    batches: Sequence[Sequence[PlannedSequence]],
    *,
    version: int,
    oldest_version: int,
    num_ranks: int,
    max_tokens: int,
    cost: SequenceCost,
) -> BatchPlan:
    """An optimizer step for each of `batches`, in order."""
    planned = [plan_shares(batch, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost) for batch in batches]
    steps = [
        StepPlan(len(shares[0]), len(batch), sum(sequence.num_sampled_tokens for sequence in batch))
        for batch, shares in zip(batches, planned, strict=True)
    ]
    return BatchPlan(
        version=version,
        oldest_version=oldest_version,
        steps=tuple(steps),
        shares=tuple(tuple(rows for shares in planned for rows in shares[rank]) for rank in range(num_ranks)),
    )


def plan_shares(sequences: Iterable[PlannedSequence], *, num_ranks: int, max_tokens: int, cost: SequenceCost) -> tuple[Share, ...]:
    """Every sequence into one micro-batch of one rank: ranks of like cost, each with as few micro-batches as the limit allows.

    Args: max_tokens: of a micro-batch. A sequence above it gets a micro-batch of its own.
    """
    longest_first = sorted(sequences, key=lambda sequence: (-sequence.num_tokens, sequence.entry_id))
    parts = _spread(longest_first, num_ranks, cost=cost)
    assert parts is not None, "a rank takes any number of tokens"
    count = max(_fewest(part.sequences, max_tokens) for part in parts)
    while True:
        shares = [_spread(part.sequences, count, cost=cost, max_tokens=max_tokens) for part in parts]
        if None not in shares:
            return tuple(_dearest_first(share) for share in shares if share is not None)
        count += 1 + count // 16


@dataclass
class _Pack:
    sequences: list[PlannedSequence] = field(default_factory=list)
    num_tokens: int = 0
    cost: float = 0.0

    def can_take(self, sequence: PlannedSequence, max_tokens: float) -> bool:
        return not self.sequences or self.num_tokens + sequence.num_tokens <= max_tokens

    def take(self, sequence: PlannedSequence, cost: SequenceCost) -> None:
        self.sequences.append(sequence)
        self.num_tokens += sequence.num_tokens
        self.cost += cost(sequence.num_tokens)


def _fewest(sequences: Sequence[PlannedSequence], max_tokens: int) -> int:
    """A lower bound of the micro-batches needed: by all tokens, and by sequences of which no two fit together."""
    total = sum(min(sequence.num_tokens, max_tokens) for sequence in sequences)
    large = sum(2 * sequence.num_tokens > max_tokens for sequence in sequences)
    return max(1, math.ceil(total / max_tokens), large)


def _spread(
    longest_first: Sequence[PlannedSequence], count: int, *, cost: SequenceCost, max_tokens: float = math.inf
) -> list[_Pack] | None:
    """`count` packs, each sequence in the cheapest one that can take it; None if one fits nowhere."""
    packs = [_Pack() for _ in range(count)]
    for sequence in longest_first:
        able = [pack for pack in packs if pack.can_take(sequence, max_tokens)]
        if not able:
            return None
        min(able, key=lambda pack: pack.cost).take(sequence, cost)
    return packs


def _dearest_first(packs: list[_Pack]) -> Share:
    return tuple(tuple(pack.sequences) for pack in sorted(packs, key=lambda pack: -pack.cost))
