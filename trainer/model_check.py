"""Can this model be trained as configured? Two short sequences tell, before the first update.

Packing is exact only for layers that respect the borders between sequences, and log-probabilities are made from the last hidden
state and the output layer alone. A state-space layer breaks the first, a scale or cap behind the output layer the second, both
without a word; so each is tried on the model itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shared.errors import ConfigurationError
from trainer.packing import Packed, pack

LENGTHS = (19, 13)
PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of norms, relative. What leaks from one sequence into the next changes hidden states by about their own size."""


class CheckedPolicy(Protocol):
    causal_lm: Any

    @property
    def is_packing(self) -> bool: ...

    def hidden_states(self, packed: Packed) -> Tensor: ...

    def train(self, mode: bool = True) -> nn.Module: ...


@torch.no_grad()
def check_model(policy: CheckedPolicy, device: torch.device) -> None:
    """A collective under ZeRO-3. Raises: ConfigurationError, with the setting that would do."""
    model = policy.causal_lm
    policy.train(False)
    rows = [_tokens(length, model.config.get_text_config().vocab_size, device) for length in LENGTHS]
    if policy.is_packing:
        require_packable_layers(model)
        _require(_packed_is_alone(policy, rows), _unpackable(model, "its hidden states change when sequences are packed"))
    _require(
        _head_is_linear(policy, rows[0]),
        f"the log-probabilities of {type(model).__name__} must come from its last hidden state and its output layer alone, and its "
        "logits are scaled or capped after it; such models cannot be trained",
    )
    policy.train(True)


def _require(is_met: bool, sentence: str) -> None:
    if not is_met:
        raise ConfigurationError(sentence)


def _unpackable(model: Any, why: str) -> str:
    return f"trainer.attention must be unpacked for {type(model).__name__}: {why}"


def require_packable_layers(model: Any) -> None:
    """Raises: ConfigurationError if a layer mixes what is packed."""
    layers = frozenset(getattr(model.config.get_text_config(), "layer_types", None) or ())
    others = ", ".join(sorted(layers - PACKABLE_LAYERS))
    _require(not others, _unpackable(model, f"it has layers of {others}"))


def _packed_is_alone(policy: CheckedPolicy, rows: list[Tensor]) -> bool:
    width = max(LENGTHS)
    token_ids_BT = torch.stack([nn.functional.pad(row, (0, width - len(row))) for row in rows])
    ends_B1 = torch.tensor(LENGTHS, device=token_ids_BT.device)[:, None]
    is_last_BT = torch.arange(width, device=token_ids_BT.device) == ends_B1 - 1
    try:
        packed_NH = policy.hidden_states(pack(token_ids_BT, is_last_BT))
    except TypeError as error:
        raise ConfigurationError(_unpackable(policy.causal_lm, str(error))) from error
    alone_NH = torch.cat([policy.hidden_states(pack(row[None], _last(row))) for row in rows])
    return _is_close(packed_NH, alone_NH) and _is_close(alone_NH, _stock_hidden_states(policy, rows))


def _stock_hidden_states(policy: CheckedPolicy, rows: list[Tensor]) -> Tensor:
    with _stock_attention(policy) as model:
        return torch.cat([model.base_model(input_ids=row[None, :-1], use_cache=False).last_hidden_state[0] for row in rows])


def _head_is_linear(policy: CheckedPolicy, row: Tensor) -> bool:
    with _stock_attention(policy) as model:
        hidden_1TH = model.base_model(input_ids=row[None], use_cache=False).last_hidden_state
        return _is_close(model.get_output_embeddings()(hidden_1TH), model(input_ids=row[None], use_cache=False).logits)


@contextmanager
def _stock_attention(policy: CheckedPolicy) -> Iterator[Any]:
    """The model as it computes one sequence without any of our code."""
    model = policy.causal_lm
    ours = model.config._attn_implementation
    if policy.is_packing:
        model.set_attn_implementation("sdpa")
    try:
        yield model
    finally:
        model.set_attn_implementation(ours)


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    difference = (actual.float() - expected.float()).norm() / expected.float().norm()
    return bool(difference <= MAX_DIFFERENCE[expected.dtype])


def _last(row: Tensor) -> Tensor:
    return (torch.arange(len(row), device=row.device) == len(row) - 1)[None]


def _tokens(length: int, vocabulary_size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocabulary_size, (length,), generator=generator).to(device)
