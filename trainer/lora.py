"""LoRA with peft: adapters inside the model, and the weights that model and adapters make together."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shared.configuration import LoraSection
from shared.errors import ConfigurationError

ADAPTER = "default"
_BASE = ".base_layer."


def add_adapter(causal_lm: Any, settings: LoraSection) -> None:
    """Freezes `causal_lm` and puts an adapter, which does nothing yet, on the layers that `settings` names.

    Raises: ConfigurationError without peft, or if no such layer can have one.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigurationError(
            "trainer.lora needs the package peft, which is not installed; in the checkout, pip install '.[lora]'"
        ) from error
    _require_no_embedding(causal_lm, settings.target_modules)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        peft.inject_adapter_in_model(config, causal_lm, adapter_name=ADAPTER)
    except ValueError as error:
        given = ", ".join(settings.target_modules)
        raise ConfigurationError(
            f"trainer.lora.target_modules must end the names of layers of the model, got {given}: {error}"
        ) from error


def _require_no_embedding(causal_lm: Any, target_modules: Sequence[str]) -> None:
    embeddings = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    for name, module in causal_lm.named_modules():
        if module in embeddings and any(f".{name}".endswith(f".{target}") for target in target_modules):
            raise ConfigurationError(
                f"trainer.lora.target_modules must not have the input or output embedding, got {name}; log-probabilities are made "
                "from the output layer's own weight"
            )


def is_adapter(name: str) -> bool:
    """Of a parameter by its name in the model."""
    return ".lora_" in name


def merged_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


def adapted_module(causal_lm: nn.Module, name: str) -> nn.Module | None:
    """The layer whose adapter changes the parameter `name`; None if none does."""
    module_name, _, parameter = name.partition(_BASE)
    return causal_lm.get_submodule(module_name) if parameter == "weight" else None


def adapter_parameters(adapted: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in adapted.named_parameters() if is_adapter(f".{name}")]


def merged_weight(adapted: Any) -> Tensor:
    """W + (alpha / rank) · B · A, a tensor of its own in the dtype of W."""
    weight: Tensor = adapted.get_base_layer().weight.detach()
    product: Tensor = adapted.get_delta_weight(ADAPTER).detach()
    return weight + product.to(weight.dtype)
