"""Whether the engines serve the model that is trained: names and shapes of all weights, before the first of them is sent.

Both sides are built from their configurations without memory, so this takes no time and no weights. An engine whose model directory
this machine does not see is not compared here; its first update is checked by checksums.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from shared.errors import ConfigurationError

Shapes = Mapping[str, tuple[int, ...]]
MAX_NAMED = 12
LONGEST_REASON = 300
"""Of what transformers says, in characters: it lists every model that there is."""


def differences(ours: Shapes, theirs: Shapes) -> list[str]:
    """Every weight that only one side has, or with another shape, as phrases in the order of names."""
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            found.append(f"{name} {list(ours[name])} is not in the engine")
        elif name not in ours:
            found.append(f"{name} {list(theirs[name])} is only in the engine")
        elif ours[name] != theirs[name]:
            found.append(f"{name} is {list(ours[name])} here and {list(theirs[name])} in the engine")
    return found


def shapes_of(config: Any) -> Shapes:
    """Of the weights of the Hugging Face model that `config` describes."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def model_check(config: Any) -> Callable[[str, str], None]:
    """A check of an engine, by its URL and the model directory it was started with, against the model that `config` describes.

    It raises ConfigurationError with the list of differences.
    """
    fitting: set[str] = set()

    def check(engine_url: str, model_path: str) -> None:
        path = Path(model_path)
        if model_path in fitting or not (path / "config.json").is_file():
            return
        try:
            theirs = shapes_of(transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False))
        except (ValueError, OSError) as error:
            raise ConfigurationError(
                f"engine {engine_url} must serve the model of run.model_path, and its own, {model_path!r}, is no causal language "
                f"model that transformers knows: {str(error)[:LONGEST_REASON]}; start the engine with the model of the run file"
            ) from error
        if found := differences(shapes_of(config), theirs):
            more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
            raise ConfigurationError(
                f"engine {engine_url} must serve the model of run.model_path, and its own, {model_path!r}, has other weights: "
                f"{'; '.join(found[:MAX_NAMED])}{more}; start the engine with the model of the run file"
            )
        fitting.add(model_path)

    return check
