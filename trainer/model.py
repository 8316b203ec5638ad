"""The policy as a module that answers log-probabilities, and the DeepSpeed engine around it.

Shapes: B sequences, T tokens, N packed tokens, S sampled tokens, H hidden size.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers.integrations import HfDeepSpeedConfig

from shared.configuration import TrainerSection
from shared.errors import ConfigurationError
from trainer import lora, ranks
from trainer.attention import SDPA_BY_ROW, AttentionKind, attention_kind
from trainer.batching import SequenceCost
from trainer.deepspeed_settings import deepspeed_settings, require_even_passes
from trainer.logprobs import sampled_token_logprobs
from trainer.model_check import check_model
from trainer.packing import Packed, pack, unpack
from trainer.record_checks import RecordLimits

IMPLEMENTATIONS: Mapping[AttentionKind, str] = {"flash": "flash_attention_2", "sdpa": SDPA_BY_ROW}
"""Attention over packed rows → its name in transformers."""


class Policy(nn.Module):
    """A causal language model whose forward pass yields what the loss needs. Rows are packed inside; callers see padded ones."""

    def __init__(self, causal_lm: Any, *, attention: AttentionKind = "sdpa", is_float32_head: bool = False) -> None:
        """Args: is_float32_head: the output layer multiplies in float32, whatever the model's dtype.

        Raises: ConfigurationError if the model does not let its attention be chosen.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self._attention = attention
        self._is_float32_head = is_float32_head
        set_attention(causal_lm, attention)

    @property
    def is_packing(self) -> bool:
        return self._attention != "unpacked"

    def forward(self, token_ids_BT: Tensor, loss_mask_BT: Tensor, temperatures_B: Tensor) -> Tensor:
        """Log-probabilities [B, T] of the sampled tokens, 0 elsewhere; rows are padded on the right."""
        packed = pack(token_ids_BT, loss_mask_BT)
        logprobs_S = sampled_token_logprobs(
            self.hidden_states(packed)[packed.predicts_N],
            self.causal_lm.get_output_embeddings(),
            token_ids_BT[loss_mask_BT],
            temperatures_B[:, None].expand(loss_mask_BT.shape)[loss_mask_BT],
            is_float32=self._is_float32_head,
        )
        return unpack(logprobs_S, loss_mask_BT)

    def hidden_states(self, packed: Packed) -> Tensor:
        """[N, H] the last layer's output at every packed token."""
        return packed_hidden_states(self.causal_lm.base_model, packed, self._attention)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name, whole and with its adapter merged in; tied ones once, under the name that is not
        the output layer's. A collective under ZeRO-3: every rank goes through all of it."""
        for name, parameter in self.causal_lm.named_parameters():
            if not lora.is_adapter(name):
                yield lora.merged_name(name), self._whole(name, parameter)

    def _whole(self, name: str, parameter: nn.Parameter) -> Tensor:
        adapted = lora.adapted_module(self.causal_lm, name)
        parts = [parameter, *(lora.adapter_parameters(adapted) if adapted else ())]
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parts, enabled=is_partitioned(parameter)):
            if adapted:
                return lora.merged_weight(adapted)
            return parameter.detach().clone() if is_partitioned(parameter) else parameter.detach()

    def sequence_cost(self) -> SequenceCost:
        """By the model's own sizes. Of a mixture of experts all weights count, so it understates attention."""
        config = self.causal_lm.config.get_text_config()
        embedding, head = (
            layer.weight for layer in (self.causal_lm.get_input_embeddings(), self.causal_lm.get_output_embeddings())
        )
        multiplied = sum(_numel(weight) for weight in self.causal_lm.parameters() if len(_shape(weight)) > 1)
        multiplied -= 0 if head is embedding else _numel(embedding)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return SequenceCost(break_even_tokens=multiplied / (config.num_hidden_layers * config.num_attention_heads * head_dim))

    def record_limits(self) -> RecordLimits:
        """What records it can be trained on."""
        embedding = self.causal_lm.get_input_embeddings()
        return RecordLimits.of(self.causal_lm.config, num_embeddings=embedding.num_embeddings)

    def fingerprint(self) -> str:
        return fingerprint(self.causal_lm)


def fingerprint(model: nn.Module) -> str:
    """Same for models whose weights fit each other: class, parameter names and shapes."""
    shapes = [(name, list(_shape(weight))) for name, weight in model.named_parameters()]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    return f"{type(model).__name__}-{digest}"


def packed_hidden_states(body: Any, packed: Packed, attention: AttentionKind) -> Tensor:
    """[N, H] the last layer's output at every packed token. Args: body: a model without output layer, under `set_attention`."""
    if attention == "unpacked":
        rows = torch.split(packed.token_ids_1N, list(packed.lengths), dim=1)
        return torch.cat([body(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows])
    arguments = packed.flash_arguments() if attention == "flash" else {"row_lengths": packed.lengths}
    output = body(input_ids=packed.token_ids_1N, position_ids=packed.position_ids_1N, use_cache=False, **arguments)
    hidden_NH: Tensor = output.last_hidden_state[0]
    return hidden_NH


def chosen_attention(trainer: TrainerSection) -> AttentionKind:
    """Of `trainer.attention`, with auto decided."""
    has_flash = transformers.utils.is_flash_attn_2_available()
    return attention_kind(trainer.attention, dtype=trainer.dtype, is_cuda=not is_cpu(), has_flash=has_flash)


def set_attention(causal_lm: Any, attention: AttentionKind) -> None:
    """Raises: ConfigurationError if the model does not let its attention be chosen."""
    if attention not in IMPLEMENTATIONS:
        return
    name = IMPLEMENTATIONS[attention]
    try:
        causal_lm.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"trainer.attention={attention} cannot be used with this model; use unpacked: {error}") from error
    if (found := causal_lm.config._attn_implementation) != name:
        raise ConfigurationError(
            f"trainer.attention={attention} cannot be used with this model, whose attention is {found}; use unpacked"
        )


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Of the whole parameter, wherever its parts are."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _numel(parameter: nn.Parameter) -> int:
    return _shape(parameter).numel()


def is_partitioned(parameter: nn.Parameter) -> bool:
    """ZeRO-3 keeps a share of it on each rank."""
    return hasattr(parameter, "ds_id")


def load_policy(path: Path, trainer: TrainerSection, *, is_sharded: bool = False) -> Policy:
    """The Hugging Face model in `path`, ready for training.

    Args: is_sharded: each rank keeps its share of every weight from the start, for an engine with ZeRO-3; a collective.
    Raises: ConfigurationError if transformers cannot load the model.
    """
    transformers.utils.logging.disable_progress_bar()
    attention = chosen_attention(trainer)
    try:
        with _sharding(trainer) if is_sharded else nullcontext():
            causal_lm = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, trainer.dtype), local_files_only=True
            )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"run.model_path must hold a causal language model, got {str(path)!r}: {error}") from error
    if trainer.gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if trainer.lora is not None:
        lora.add_adapter(causal_lm, trainer.lora)
    return Policy(causal_lm, attention=attention, is_float32_head=trainer.float32_head)


@contextmanager
def _sharding(trainer: TrainerSection) -> Iterator[None]:
    """Models loaded within it are shared out by ZeRO-3: transformers asks for the settings as long as this object lives."""
    settings = HfDeepSpeedConfig(deepspeed_settings(trainer, is_cpu=is_cpu()))
    yield
    del settings


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
    """The DeepSpeed engine of this rank; `start_ranks` comes first. Raises: ConfigurationError if the model cannot."""
    engine = initialise(policy, trainer, key="trainer.deepspeed")
    check_model(policy, engine.device)
    return engine


def initialise(model: nn.Module, trainer: TrainerSection, *, key: str) -> deepspeed.DeepSpeedEngine:
    """The engine of any model under `trainer.deepspeed`. Args: key: where the user wrote it, for messages."""
    settings = deepspeed_settings(trainer, is_cpu=is_cpu(), key=key)
    require_even_passes(trainer.attention, stage=settings["zero_optimization"]["stage"], num_ranks=ranks.count(), key=key)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
    return engine


def is_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")


def _backend() -> str:
    return "gloo" if is_cpu() else get_accelerator().communication_backend_name()
