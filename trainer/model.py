"""The policy as a module that answers log-probabilities, and the DeepSpeed engine around it.

Shapes: B sequences, T tokens.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shared.configuration import TrainerSection
from shared.errors import ConfigurationError
from trainer.deepspeed_settings import deepspeed_settings
from trainer.logprobs import sampled_token_logprobs
from trainer.record_checks import RecordLimits


class Policy(nn.Module):
    """A causal language model whose forward pass yields what the loss needs."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, token_ids_BT: Tensor, loss_mask_BT: Tensor, temperatures_B: Tensor) -> Tensor:
        """Log-probabilities [B, T] of the sampled tokens, 0 elsewhere; rows are padded on the right."""
        hidden_BTH = self.causal_lm.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        head = self.causal_lm.get_output_embeddings()
        return sampled_token_logprobs(hidden_BTH, head, token_ids_BT, loss_mask_BT, temperatures_B)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its Hugging Face name; tied ones once, under the name that is not the output layer's."""
        for name, parameter in self.causal_lm.named_parameters():
            yield name, parameter.detach()

    def record_limits(self) -> RecordLimits:
        """What records it can be trained on."""
        embedding = self.causal_lm.get_input_embeddings()
        return RecordLimits.of(self.causal_lm.config, num_embeddings=embedding.num_embeddings)

    def fingerprint(self) -> str:
        """Same for models whose weights fit each other: class, parameter names and shapes."""
        shapes = [(name, list(weight.shape)) for name, weight in self.named_weights()]
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
        return f"{type(self.causal_lm).__name__}-{digest}"


def load_policy(path: Path, trainer: TrainerSection) -> Policy:
    """The Hugging Face model in `path`, ready for training. Raises: ConfigurationError if transformers cannot load it."""
    transformers.utils.logging.disable_progress_bar()
    try:
        causal_lm = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, trainer.dtype), attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"run.model_path must hold a causal language model, got {str(path)!r}: {error}") from error
    if trainer.gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(causal_lm)


def start_ranks(*, timeout: timedelta) -> None:
    """Joins the ranks that the `deepspeed` launcher started; without a launcher, one rank alone."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    is_launched = "RANK" in os.environ
    if is_cpu():
        # A shared-memory all-reduce for one CPU machine, which costs a minute of compiling at first use; gloo serves as well.
        deepspeed.ops.__compatible_ops__ = {}
    if is_launched:
        deepspeed.init_distributed(dist_backend=_backend(), auto_mpi_discovery=False, timeout=timeout, verbose=False)
        return
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed insists on it.
    torch.distributed.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1, timeout=timeout)
    deepspeed.init_distributed(dist_backend=_backend(), auto_mpi_discovery=False, timeout=timeout, verbose=False)


def build_engine(policy: Policy, trainer: TrainerSection) -> deepspeed.DeepSpeedEngine:
    """The DeepSpeed engine of this rank; `start_ranks` comes first."""
    settings = deepspeed_settings(trainer, is_cpu=is_cpu())
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=list(policy.parameters()), config=settings)
    return engine


def is_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")


def _backend() -> str:
    return "gloo" if is_cpu() else get_accelerator().communication_backend_name()
