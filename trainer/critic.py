"""The critic: a value model with a DeepSpeed engine of its own, trained on the policy's micro-batches.

    V_t is the value of the state before token t: the head's answer at position t - 1, which has read everything before t.

Shapes: B sequences, T tokens, S sampled tokens of all sequences, H hidden size. Values are 0 where nothing was sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import msgspec
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from shared.advantage_settings import CriticSection
from shared.configuration import TrainerSection
from shared.errors import ConfigurationError
from trainer import ranks
from trainer.aggregation import BatchSize, token_mean
from trainer.attention import AttentionKind
from trainer.guards import infectious
from trainer.micro_batch import MicroBatch
from trainer.model import chosen_attention, initialise, packed_hidden_states, set_attention
from trainer.model_check import require_packable_layers
from trainer.packing import pack, unpack

_SUMS = ("tokens", "loss", "clipped", "return", "return_squared", "error", "error_squared")
MIN_VARIANCE = 1e-12
"""Below it returns are taken for equal."""


@dataclass(frozen=True)
class ValueTargets:
    """Both [B, T] float32, from before the update's first step."""

    values_BT: Tensor
    returns_BT: Tensor


@dataclass(frozen=True)
class ValueMeasures:
    """How well the critic knows the returns of the batch; of the last epoch, before its step."""

    value_loss: float
    explained_variance: float | None
    """1 - Var(R - V) / Var(R) over returns R, with V from before the update: 1 is perfect, 0 no better than a constant. None if
    the returns do not vary."""
    clip_fraction: float
    """Of sampled tokens whose value the clip held back."""
    grad_norm: float
    """Before clipping."""


class ValueSums:
    """Running sums of an epoch; `reduce` makes them global."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.grad_norm = 0.0
        """Of the last step."""

    @torch.no_grad()
    def add(self, share: Tensor, loss: "ValueLoss", targets: ValueTargets, mask_BT: Tensor) -> None:
        """One micro-batch. Args: share: its weighted loss. mask_BT: the tokens that carry loss."""
        returns = targets.returns_BT[mask_BT].double()
        errors = returns - targets.values_BT[mask_BT].double()
        values = (
            mask_BT.sum(),
            share,
            (loss.is_clipped_BT & mask_BT).sum(),
            returns.sum(),
            returns.square().sum(),
            errors.sum(),
            errors.square().sum(),
        )
        self._sums += torch.stack([value.double() for value in values])

    def reduce(self, *, num_steps: int) -> ValueMeasures | None:
        """The measures of all ranks; None if nothing was added. A collective. Args: num_steps: mini-batches added."""
        sums = self._sums.clone()
        ranks.sum_in_place(sums)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))
        if not (tokens := total["tokens"]):
            return None
        return_variance = total["return_squared"] / tokens - (total["return"] / tokens) ** 2
        error_variance = total["error_squared"] / tokens - (total["error"] / tokens) ** 2
        return ValueMeasures(
            value_loss=total["loss"] / num_steps,
            explained_variance=1 - error_variance / return_variance if return_variance > MIN_VARIANCE else None,
            clip_fraction=total["clipped"] / tokens,
            grad_norm=self.grad_norm,
        )


class ValueHead(nn.Module):
    """One number for each position, in float32 whatever the model computes in. 0 before its first step."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_SH: Tensor) -> Tensor:
        return functional.linear(hidden_SH.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class ValueModel(nn.Module):
    """A language model without its output layer, and a value head. Rows are packed inside, as the policy's are."""

    def __init__(self, backbone: Any, *, attention: AttentionKind) -> None:
        """Raises: ConfigurationError if the model does not let its attention be chosen."""
        super().__init__()
        self.backbone = backbone
        self._attention = attention
        set_attention(backbone, attention)
        self.head = ValueHead(backbone.config.get_text_config().hidden_size)

    def forward(self, token_ids_BT: Tensor, is_sampled_BT: Tensor) -> Tensor:
        """V before each sampled token, [B, T] float32, 0 elsewhere; rows are padded on the right."""
        packed = pack(token_ids_BT, is_sampled_BT)
        hidden_NH = packed_hidden_states(self.backbone, packed, self._attention)
        return unpack(self.head(hidden_NH[packed.predicts_N]), is_sampled_BT)


class Critic:
    """Owns the critic's DeepSpeed engine between two updates."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, settings: CriticSection) -> None:
        self.engine = engine
        self._value_clip = settings.value_clip

    @torch.no_grad()
    def values(self, rows: MicroBatch) -> Tensor:
        """V before each sampled token, [B, T] float32. A collective where the model is sharded."""
        self.engine.eval()
        values_BT: Tensor = self.engine(rows.token_ids_BT, rows.is_sampled_BT)
        return values_BT

    def learn(self, batches: Sequence[tuple[MicroBatch, ValueTargets]], size: BatchSize, sums: ValueSums) -> None:
        """One step on this rank's micro-batches, of which every rank has as many; DeepSpeed leaves it out if it is not finite.

        Args: size: of the step's mini-batch, over all ranks. sums: get what the step measures.
        """
        self.engine.train()
        for index, (rows, targets) in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            values_BT = self.engine(rows.token_ids_BT, rows.is_sampled_BT)
            loss = value_loss(values_BT, targets, value_clip=self._value_clip)
            share = (token_mean(rows.loss_mask_BT, size, norm_tokens=None) * loss.per_token_BT).sum()
            self.engine.backward(infectious(share, values_BT) * ranks.count(), scale_wrt_gas=False)
            sums.add(share, loss, targets, rows.loss_mask_BT)
        self.engine.step()
        sums.grad_norm = float(self.engine.get_global_grad_norm())


@dataclass(frozen=True)
class ValueLoss:
    """What the loss says of each token, [B, T]."""

    per_token_BT: Tensor
    """Carries the gradient."""
    is_clipped_BT: Tensor


def value_loss(values_BT: Tensor, targets: ValueTargets, *, value_clip: float) -> ValueLoss:
    """½ max((V - R)², (V_old + clip(V - V_old, -c, c) - R)²): PPO's clipped value loss, as in arXiv:2005.12729.

    Args: values_BT: [B, T] of the critic being trained, with gradient. value_clip: c.
    """
    moved_BT = (values_BT - targets.values_BT).clamp(-value_clip, value_clip)
    squared_BT = (values_BT - targets.returns_BT).square()
    clipped_BT = (targets.values_BT + moved_BT - targets.returns_BT).square()
    return ValueLoss(0.5 * torch.maximum(squared_BT, clipped_BT), clipped_BT > squared_BT)


def load_value_model(path: Path, trainer: TrainerSection, *, vocabulary_size: int) -> ValueModel:
    """The Hugging Face model in `path` with a new value head.

    Args: vocabulary_size: the policy's. Raises: ConfigurationError if transformers cannot load the model, or it has another one.
    """
    transformers.utils.logging.disable_progress_bar()
    try:
        backbone = transformers.AutoModel.from_pretrained(path, dtype=getattr(torch, trainer.dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"trainer.critic.model_path must hold a language model, got {str(path)!r}: {error}") from error
    if trainer.gradient_checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = backbone.config.get_text_config().vocab_size
    if found != vocabulary_size:
        raise ConfigurationError(
            f"trainer.critic.model_path must hold a model with the policy's tokenizer and its vocabulary of {vocabulary_size}, got "
            f"{str(path)!r} with {found}; give one of the policy's family, or leave it out"
        )
    attention = chosen_attention(trainer)
    if attention != "unpacked":
        require_packable_layers(backbone)
    return ValueModel(backbone, attention=attention)


def build_critic(model: ValueModel, trainer: TrainerSection) -> Critic:
    """The critic of this rank, with the DeepSpeed engine that trainer.critic describes."""
    settings = trainer.critic
    assert settings is not None
    optimisation = msgspec.structs.replace(
        trainer,
        learning_rate=settings.learning_rate,
        learning_rate_schedule="constant",
        warmup_updates=0,
        final_learning_rate=0.0,
        max_grad_norm=settings.max_grad_norm,
        deepspeed=settings.deepspeed,
    )
    return Critic(initialise(model, optimisation, key="trainer.critic.deepspeed"), settings)
