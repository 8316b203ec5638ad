"""Do trainer and engine compute the same policy? Asked of the first rollouts that can tell, before the first step.

Only episodes sampled entirely by the version being trained can tell: for them π_θ and μ are the same weights, so any difference
comes from how the two compute. In float32 it is below 1e-4, in bfloat16 around 1e-2.

    UNCHECKED → passed, by the first batch with such episodes; or TrainingError, with what the differences look like
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.errors import TrainingError
from trainer import ranks
from trainer.micro_batch import MicroBatch

TEMPERATURE_FACTORS = tuple(2 ** (step / 8) for step in range(-12, 13) if step)
"""Tried in place of the recorded temperature: 0.35 to 2.8 times it."""
PROBED_MICRO_BATCHES = 2
"""On each rank; a diagnosis needs no more."""
FAR_NATS = 1.0
"""Rounding never makes a log-probability wrong by so much."""
CONCENTRATED_SHARE = 0.1
"""Fewer far tokens than this are an event in an episode rather than another computation."""
LATER_TURNS_FACTOR = 4.0
"""Later turns are to blame if they differ by so many times the first turn's difference."""

Score = Callable[[MicroBatch], Tensor]
"""log π_θ of the tokens that carry loss, [B, T], without gradient. A collective."""

_SUMS = ("tokens", "absolute", "signed", "far", "first_turn_tokens", "first_turn_absolute", "temperatures")


@dataclass(frozen=True)
class Comparison:
    """log π_θ - log μ over the sampled tokens that can tell, of all ranks, in nats."""

    num_tokens: int
    mean: float
    """Of absolute values, as the next one."""
    largest: float
    bias: float
    """Mean with signs: well below 0 when the tokens are unlikely under the trainer's policy."""
    far_share: float
    """Share of tokens that differ by more than FAR_NATS."""
    first_turn_mean: float
    """Of absolute values in the episodes' first turns."""
    later_turns_mean: float
    temperature: float
    """Mean recorded one."""


class MismatchCheck:
    """The check at the start of a trainer process. Every rank has one, and they agree."""

    def __init__(self, score: Score, *, max_mean: float, device: torch.device) -> None:
        """Args: max_mean: largest mean |log π_θ - log μ| to train with, in nats."""
        self._score = score
        self._max_mean = max_mean
        self._device = device
        self._is_passed = False

    def judge(self, batches: Sequence[MicroBatch]) -> None:
        """A collective, of as many batches on every rank. Raises: TrainingError if trainer and engine disagree."""
        if self._is_passed or not self._can_tell(batches):
            return
        found = self._compare(batches)
        if not found.mean <= self._max_mean:
            probed = batches[:PROBED_MICRO_BATCHES]
            raise TrainingError(refusal(found, self._best_temperature(probed), max_mean=self._max_mean))
        self._is_passed = True

    def _can_tell(self, batches: Sequence[MicroBatch]) -> bool:
        num_tokens = torch.zeros(1, dtype=torch.float64, device=self._device)
        for rows in batches:
            num_tokens += _telling(rows).sum()
        ranks.sum_in_place(num_tokens)
        return num_tokens.item() > 0

    def _compare(self, batches: Sequence[MicroBatch], *, temperature_factor: float = 1.0) -> Comparison:
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=self._device)
        largest = torch.zeros(1, dtype=torch.float64, device=self._device)
        for rows in batches:
            logprobs_BT = self._score(replace(rows, temperatures_B=rows.temperatures_B * temperature_factor))
            differences = (logprobs_BT - rows.behaviour_logprobs_BT)[_telling(rows)].double()
            is_first_turn = (rows.turn_index_BT == 0)[_telling(rows)]
            temperatures = rows.temperatures_B[:, None].expand_as(logprobs_BT)[_telling(rows)]
            sums += torch.stack(list(_totals(differences, is_first_turn, temperatures)))
            if len(differences):
                largest = torch.maximum(largest, differences.abs().max())
        ranks.sum_in_place(sums)
        ranks.max_in_place(largest)
        return _comparison(dict(zip(_SUMS, sums.tolist(), strict=True)), largest.item())

    def _best_temperature(self, batches: Sequence[MicroBatch]) -> tuple[float, Comparison]:
        """The factor on the recorded temperature under which trainer and engine agree best."""
        tried = {factor: self._compare(batches, temperature_factor=factor) for factor in TEMPERATURE_FACTORS}
        best = min(tried, key=lambda factor: tried[factor].mean)
        return best, tried[best]


def _telling(rows: MicroBatch) -> Tensor:
    return rows.loss_mask_BT & rows.is_on_policy_B1


def _totals(differences: Tensor, is_first_turn: Tensor, temperatures: Tensor) -> Iterator[Tensor]:
    """In the order of _SUMS."""
    absolute = differences.abs()
    yield torch.tensor(float(len(differences)), dtype=torch.float64, device=differences.device)
    yield absolute.sum()
    yield differences.sum()
    yield (absolute > FAR_NATS).double().sum()
    yield is_first_turn.double().sum()
    yield absolute[is_first_turn].sum()
    yield temperatures.double().sum()


def _comparison(total: dict[str, float], largest: float) -> Comparison:
    num_tokens, num_first = total["tokens"], total["first_turn_tokens"]
    return Comparison(
        num_tokens=round(num_tokens),
        mean=total["absolute"] / num_tokens,
        largest=largest,
        bias=total["signed"] / num_tokens,
        far_share=total["far"] / num_tokens,
        first_turn_mean=total["first_turn_absolute"] / max(1, num_first),
        later_turns_mean=(total["absolute"] - total["first_turn_absolute"]) / max(1, num_tokens - num_first),
        temperature=total["temperatures"] / num_tokens,
    )


def refusal(found: Comparison, best_temperature: tuple[float, Comparison], *, max_mean: float) -> str:
    """The sentence that training is refused with. Args: best_temperature: factor on the recorded one, and what it gives."""
    return (
        f"trainer and engine must agree on the log-probabilities of sampled tokens within a mean of "
        f"trainer.max_logprob_mismatch={max_mean:g}, and differ by {found.mean:.3g} on average and {found.largest:.3g} at most "
        f"over {found.num_tokens} tokens of the first rollouts; {diagnosis(found, best_temperature)}"
    )


def diagnosis(found: Comparison, best_temperature: tuple[float, Comparison]) -> str:
    """The likely cause, from what the differences look like."""
    factor, at_best = best_temperature
    if at_best.mean < found.mean / 4:
        return (
            f"likely cause: the temperature; at {factor:.2g} times the recorded {found.temperature:.3g} they would differ by "
            f"{at_best.mean:.3g} only, so the engine samples at another temperature than the records say"
        )
    if math.isnan(found.mean):
        return "likely cause: the trainer's own log-probabilities are not numbers; check the weights in run.model_path"
    if found.later_turns_mean > LATER_TURNS_FACTOR * found.first_turn_mean > 0:
        return (
            f"first turns differ by {found.first_turn_mean:.3g} and later ones by {found.later_turns_mean:.3g}; likely causes: a "
            "prefix cache that outlived a weight update, or a chat template that renders later turns otherwise than the records"
        )
    if found.far_share == 0:
        return (
            f"no token differs by more than {FAR_NATS:g}; likely cause: rounding; give engines.dtype and trainer.dtype the same "
            "value, float32 if bfloat16 does not do, or raise the bound if this model needs it"
        )
    if found.far_share < CONCENTRATED_SHARE:
        return (
            f"only {found.far_share:.1%} of the tokens differ by more than {FAR_NATS:g}; likely causes: a prefix cache that "
            "outlived a weight update, or an engine that reports log-probabilities after top-p or top-k"
        )
    return (
        f"{found.far_share:.0%} of the tokens differ by more than {FAR_NATS:g}, with a mean of {found.bias:+.3g}; likely causes: "
        "the engine was started from another model than run.model_path or missed the first weight push, it renders another chat "
        "template, or the model scales its logits after the output layer"
    )
