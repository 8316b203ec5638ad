"""The frozen policy that a KL penalty holds the trained one near. Each rank has a whole copy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from shared.configuration import TrainerSection
from shared.errors import ConfigurationError
from trainer.micro_batch import MicroBatch
from trainer.model import Policy, load_policy


def load_reference(trainer: TrainerSection, *, model_path: Path, device: torch.device) -> "ReferencePolicy | None":
    """The reference policy that the run file asks for; None without a KL penalty.

    Args: model_path: what the run started from. Raises: ConfigurationError if `trainer.kl.reference_path` cannot be loaded.
    """
    if not trainer.kl.is_used:
        return None
    path = Path(trainer.kl.reference_path) if trainer.kl.reference_path else model_path
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"trainer.kl.reference_path must be a directory with a Hugging Face model, got {str(path)!r} without config.json; give "
            "the directory of a downloaded model, or leave it out for the model that the run started from"
        )
    return ReferencePolicy(
        load_policy(path, structs.replace(trainer, lora=None)), device=device, is_offloaded=trainer.kl.offload_reference
    )


class ReferencePolicy:
    """RESTING on its resting device → on the trainer's device while `scoring` → RESTING."""

    def __init__(self, policy: Policy, *, device: torch.device, is_offloaded: bool) -> None:
        """Args: device: where it scores. is_offloaded: it rests in the CPU's memory."""
        self._policy = policy.eval().requires_grad_(False)
        self._device = device
        self._resting_device = torch.device("cpu") if is_offloaded else device
        self._policy.to(self._resting_device)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around calls of `logprobs`."""
        self._policy.to(self._device)
        yield
        self._policy.to(self._resting_device)

    @torch.no_grad()
    def logprobs(self, rows: MicroBatch) -> Tensor:
        """log π_ref of the sampled tokens that carry loss, [B, T] float32, 0 elsewhere."""
        logprobs_BT: Tensor = self._policy(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)
        return logprobs_BT
