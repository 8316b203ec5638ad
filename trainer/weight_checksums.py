"""What an engine's checksums must be for the weights that were sent: SGLang 0.5.23's `/weights_checker` on a CPU.

It hashes each tensor of the engine's own model, where the projections that HF keeps apart are one tensor, and rows of the
vocabulary are padded with zeros: the first 8 bytes of SHA-256 over the tensor's bytes. The parts of a fused tensor follow each
other in it, so its hash is fed part by part and nothing is kept but the hash.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)} | {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""A Hugging Face module → the engine's, and which part of it."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
VOCABULARY_PADDING = 64
DIGEST_BYTES = 8


def engine_tensor(name: str) -> tuple[str, int]:
    """The engine's tensor that the weight `name` is in, and which part of it."""
    module, _, kind = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    if leaf not in FUSED:
        return name, 0
    fused, part = FUSED[leaf]
    return f"{parent}.{fused}.{kind}", part


def padding_bytes(name: str, shape: tuple[int, ...], row_bytes: int) -> int:
    """Zeros that the engine appends to a tensor with one row for each token of the vocabulary."""
    if not name.endswith(VOCABULARY):
        return 0
    return -shape[0] % VOCABULARY_PADDING * row_bytes


@dataclass
class _Growing:
    hash: Any = field(default_factory=hashlib.sha256)
    num_parts: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)
    """Parts that came before their turn."""


class ChecksumBuilder:
    """Fed with weights as they are sent."""

    def __init__(self) -> None:
        self._tensors: dict[str, _Growing] = {}

    def add(self, name: str, shape: tuple[int, ...], data: Tensor) -> None:
        """Args: data: [bytes] uint8, as sent."""
        tensor_name, part = engine_tensor(name)
        tensor = self._tensors.setdefault(tensor_name, _Growing())
        if part != tensor.num_parts:
            tensor.waiting[part] = _bytes(data).tobytes()
            return
        tensor.hash.update(_bytes(data))
        if padding := padding_bytes(name, shape, len(data) // shape[0] if shape else 0):
            tensor.hash.update(bytes(padding))
        tensor.num_parts += 1
        while (late := tensor.waiting.pop(tensor.num_parts, None)) is not None:
            tensor.hash.update(late)
            tensor.num_parts += 1

    def checksums(self) -> dict[str, str]:
        """By the engine's tensor names, as it writes them."""
        return {
            name: f"{int.from_bytes(tensor.hash.digest()[:DIGEST_BYTES], 'big'):016x}" for name, tensor in self._tensors.items()
        }


def _bytes(data: Tensor) -> Any:
    """The memory itself, as a buffer."""
    return data.cpu().numpy()
