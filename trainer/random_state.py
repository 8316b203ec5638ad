"""The state of this rank's random number generators, as a checkpoint keeps it."""

import random
from typing import Any

import msgspec
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator


class RandomState(msgspec.Struct, frozen=True):
    """Of Python's, numpy's and torch's global generators."""

    python_words: tuple[int, ...]
    python_gauss: float | None
    numpy_state: dict[str, Any]
    torch_bytes: bytes
    device_bytes: bytes
    """Of the accelerator; as torch's where that is the CPU."""

    @classmethod
    def capture(cls) -> "RandomState":
        _, words, gauss = random.getstate()
        legacy: Any = np.random.get_state(legacy=False)
        return cls(
            python_words=words,
            python_gauss=gauss,
            numpy_state={**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
            torch_bytes=torch.get_rng_state().numpy().tobytes(),
            device_bytes=get_accelerator().get_rng_state().cpu().numpy().tobytes(),
        )

    def restore(self) -> None:
        random.setstate((_PYTHON_VERSION, self.python_words, self.python_gauss))
        key = np.array(self.numpy_state["state"]["key"], dtype=np.uint32)
        np.random.set_state({**self.numpy_state, "state": {**self.numpy_state["state"], "key": key}})
        torch.set_rng_state(_tensor(self.torch_bytes))
        get_accelerator().set_rng_state(_tensor(self.device_bytes))


_PYTHON_VERSION = 3
"""Of the layout of `random.getstate`."""


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
