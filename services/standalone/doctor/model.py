"""The model's directory: configuration, weights, tokenizer, and the chat format that the agents use."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from services.standalone import printing
from services.standalone.doctor import renderer_probe
from services.standalone.doctor.finding import Finding, ok, problem, warning
from services.standalone.doctor.programs import Reply, ask
from shared.configuration import EnvAgentsSection

RENDERER_TIMEOUT_S: Final = 120.0
AGENTS_EXTRA: Final = "in the checkout, pip install '.[agents]', if the agents are to run on this machine"


@dataclass(frozen=True)
class Model:
    """`renderer` is what the probe of the chat format replied; None where it was not tried because there is no model."""

    directory: str
    has_configuration: bool
    num_weight_files: int
    has_tokenizer: bool
    renderer: Reply | None


def look(directory: Path, section: EnvAgentsSection) -> Model:
    has_configuration = os.path.isfile(directory / "config.json")
    return Model(
        directory=str(directory),
        has_configuration=has_configuration,
        num_weight_files=sum(1 for pattern in ("*.safetensors", "*.bin") for _ in directory.glob(pattern)),
        has_tokenizer=os.path.isfile(directory / "tokenizer.json"),
        renderer=_try_renderer(directory, section) if has_configuration else None,
    )


def check(model: Model, renderer: str) -> list[Finding]:
    """`renderer` is the name of the chat format."""
    rule = "run.model_path is a directory with a Hugging Face model"
    if not model.has_configuration:
        remedy = "make the demo's with `make demo`, or give the directory of a downloaded model"
        return [problem("model", f"no config.json in {model.directory}", rule, remedy)]
    rows = [
        _check_weights(model, rule),
        _check_tokenizer(model),
    ]
    return rows if model.renderer is None else [*rows, _check_renderer(model.renderer, renderer)]


def _check_weights(model: Model, rule: str) -> Finding:
    if model.num_weight_files:
        return ok("model", f"{model.directory}, weights in {printing.counted(model.num_weight_files, 'file')}", rule)
    remedy = "download its weights, if engines or the trainer are to run on this machine"
    return warning("model", f"no weights in {model.directory}", rule, remedy)


def _check_tokenizer(model: Model) -> Finding:
    rule = "tokenizer.json is what `headrace rollouts` reads, and the agents without transformers"
    if model.has_tokenizer:
        return ok("tokenizer", "tokenizer.json", rule)
    return warning("tokenizer", "no tokenizer.json", rule, "save the tokenizer with transformers' save_pretrained")


def _check_renderer(reply: Reply, name: str) -> Finding:
    rule = f"env_agents.renderer is {name}, and can be used with this model"
    if reply.is_success:
        return ok("chat format", "can be loaded", rule)
    if reply.status == renderer_probe.PACKAGE_MISSING:
        return warning("chat format", f"not known: {reply.last_error}", rule, AGENTS_EXTRA)
    return problem("chat format", reply.last_error, rule, "name the model's renderer, or correct its options")


def _try_renderer(directory: Path, section: EnvAgentsSection) -> Reply:
    options = msgspec.json.encode(section.renderer_options).decode()
    command = (sys.executable, "-m", renderer_probe.__name__, str(directory), section.renderer, options)
    return ask(command, timeout_s=RENDERER_TIMEOUT_S)
