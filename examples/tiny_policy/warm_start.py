"""Supervised warm start: careful demonstrations until the policy masters the task, then careless ones so that it slips.

The order matters. A policy that learns from careless demonstrations alone takes far longer to learn to copy numbers, and one
that never learned it gives reinforcement learning nothing to reward.

Shapes: B demonstrations, T tokens, N tokens of the assistant in the whole batch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from examples.tiny_policy.demonstrations import Demonstration

BATCH_SIZE: Final = 32
CLEAN_LEARNING_RATE: Final = 1.5e-3
CLEAN_MAX_STEPS: Final = 400
CLEAN_DECAY_STEPS: Final = 120
MASTERY: Final = 0.9
"""Greedy success at which the clean stage begins to lower its learning rate, which brings the rest."""
MASTERY_WINDOW: Final = 10
"""Batches that greedy success is averaged over."""
CARELESS_LEARNING_RATE: Final = 1e-3
CARELESS_STEPS: Final = 100
WARM_UP_STEPS: Final = 20
MAX_GRAD_NORM: Final = 1.0


@dataclass(frozen=True)
class Fit:
    """How well a policy reproduces demonstrations that it has not been trained on."""

    loss: float
    """Mean over the assistant's tokens, nats."""
    greedy: float
    """Share of demonstrations whose every assistant token is the most likely one: success of greedy decoding."""
    sampled: float
    """Mean probability of sampling all of a demonstration's assistant tokens: success at temperature 1."""


Observer = Callable[[str, int, Fit], None]
"""Called after each step with the stage's name, the step and the fit of its batch, from before the step."""


def learn_clean(policy: Qwen3ForCausalLM, careful: Iterator[Demonstration], observe: Observer) -> None:
    """Trains until greedy success reaches MASTERY, then CLEAN_DECAY_STEPS more with a falling learning rate."""
    recent: deque[float] = deque(maxlen=MASTERY_WINDOW)
    optimizer = _optimizer(policy)
    last_step = CLEAN_MAX_STEPS
    for step in range(CLEAN_MAX_STEPS):
        if step == last_step:
            break
        _set_learning_rate(
            optimizer, CLEAN_LEARNING_RATE * min((step + 1) / WARM_UP_STEPS, (last_step - step) / CLEAN_DECAY_STEPS, 1)
        )
        fit = _train_step(policy, optimizer, list(islice(careful, BATCH_SIZE)))
        observe("careful", step, fit)
        recent.append(fit.greedy)
        if sum(recent) >= MASTERY * MASTERY_WINDOW:
            last_step = min(last_step, step + 1 + CLEAN_DECAY_STEPS)


def learn_careless(policy: Qwen3ForCausalLM, careless: Iterator[Demonstration], observe: Observer) -> None:
    """Trains CARELESS_STEPS with a falling learning rate."""
    optimizer = _optimizer(policy)
    for step in range(CARELESS_STEPS):
        _set_learning_rate(optimizer, CARELESS_LEARNING_RATE * min((step + 1) / WARM_UP_STEPS, 1 - step / CARELESS_STEPS))
        observe("careless", step, _train_step(policy, optimizer, list(islice(careless, BATCH_SIZE))))


@torch.no_grad()
def measure(policy: Qwen3ForCausalLM, careful: Sequence[Demonstration]) -> Fit:
    """The fit to demonstrations of the right way, without training."""
    logprobs_N, is_best_N, row_N = _assistant_logprobs(policy, careful)
    return _fit(logprobs_N, is_best_N, row_N)


def _optimizer(policy: Qwen3ForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _train_step(policy: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: Sequence[Demonstration]) -> Fit:
    logprobs_N, is_best_N, row_N = _assistant_logprobs(policy, batch)
    optimizer.zero_grad()
    torch.autograd.backward(-logprobs_N.mean())
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return _fit(logprobs_N.detach(), is_best_N, row_N)


def _assistant_logprobs(policy: Qwen3ForCausalLM, batch: Sequence[Demonstration]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [N] with gradient, whether each token is the most likely [N], and its row in the batch [N].

    Padding stands on the right, where causal attention keeps it from reaching any token.
    """
    token_ids_BT = _padded([demonstration.token_ids for demonstration in batch])
    is_chosen_BT = _padded([demonstration.loss_mask for demonstration in batch])[:, 1:] == 1
    hidden_BTD = policy.model(input_ids=token_ids_BT).last_hidden_state[:, :-1]
    logits_NV = policy.lm_head(hidden_BTD[is_chosen_BT])
    targets_N = token_ids_BT[:, 1:][is_chosen_BT]
    logprobs_N = logits_NV.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
    return logprobs_N, logits_NV.argmax(-1) == targets_N, is_chosen_BT.nonzero()[:, 0]


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _fit(logprobs_N: Tensor, is_best_N: Tensor, row_N: Tensor) -> Fit:
    """Episodes that have no assistant token do not occur, so rows are 0 … B-1 without gaps."""
    num_rows = int(row_N.max()) + 1
    logprobs_B = torch.zeros(num_rows).index_add_(0, row_N, logprobs_N)
    misses_B = torch.zeros(num_rows).index_add_(0, row_N, (~is_best_N).float())
    return Fit(
        loss=-logprobs_N.mean().item(),
        greedy=(misses_B == 0).float().mean().item(),
        sampled=logprobs_B.exp().mean().item(),
    )
