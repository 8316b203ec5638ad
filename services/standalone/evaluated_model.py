"""What `headrace evaluate` is given: a checkpoint of a run, or any Hugging Face model directory. Looks at files only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from shared.errors import ConfigurationError

STATE_FILE: Final = "run_state.json"
EXPORT: Final = "model"
"""The folder of a checkpoint with its Hugging Face model."""
WEIGHTS: Final = ("*.safetensors", "*.bin")
VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
RULE: Final = "--checkpoint must be a checkpoint of a run or a Hugging Face model directory"


class _RunState(msgspec.Struct):
    version: int


@dataclass(frozen=True)
class EvaluatedModel:
    """A model that an engine can load. `version` is the checkpoint's, None for a model that is none."""

    directory: Path
    name: str
    version: int | None


def find_model(path: Path) -> EvaluatedModel:
    """The model in `path`: runs/x/checkpoints/v00010, its model/, or a directory with config.json.

    Raises: ConfigurationError if there is none, or if it lacks weights or a tokenizer.
    """
    checkpoint = path.parent if path.name == EXPORT and (path.parent / STATE_FILE).is_file() else path
    if (checkpoint / STATE_FILE).is_file():
        found = EvaluatedModel(checkpoint / EXPORT, checkpoint.name, _version(checkpoint / STATE_FILE))
    else:
        found = EvaluatedModel(path, path.resolve().name, None)
    if not (found.directory / "config.json").is_file():
        raise ConfigurationError(f"{RULE}, got {str(path)!r}{_what_is_there(path)}")
    if not any(file for pattern in WEIGHTS for file in found.directory.glob(pattern)):
        raise ConfigurationError(f"{RULE}, and {str(found.directory)!r} has no weights ({', '.join(WEIGHTS)}); download them")
    if not any((found.directory / name).is_file() for name in VOCABULARIES):
        raise ConfigurationError(
            f"a model must have its tokenizer beside it, and {str(found.directory)!r} has none; save it there with transformers' "
            "save_pretrained"
        )
    return found


def require_tokenizer(model: EvaluatedModel, run_model: Path) -> None:
    """Refuses a tokenizer that is another model's, as far as files tell: more tokens than embeddings, or not the run's.

    Only a checkpoint is held against the run's own model, and only where that is still there.
    Raises: ConfigurationError.
    """
    tokens = _tokens(model.directory)
    num_embeddings = _num_embeddings(model.directory)
    if tokens and num_embeddings is not None and max(tokens.values()) >= num_embeddings:
        raise ConfigurationError(
            f"a tokenizer's ids must be below its model's vocab_size, and in {str(model.directory)!r} they go up to "
            f"{max(tokens.values())} for a vocab_size of {num_embeddings}; it is another model's tokenizer, so put the model's own "
            "there"
        )
    of_run = _tokens(run_model) if model.version is not None else None
    if tokens and of_run and tokens != of_run:
        differing = len(tokens.items() ^ of_run.items())
        raise ConfigurationError(
            f"a checkpoint must be of the run file's model, and the tokenizer in {str(model.directory)!r} is not that of "
            f"run.model_path={str(run_model)!r} ({differing} tokens differ); give the run file that it was trained with, or "
            "correct run.model_path"
        )


def _version(state_file: Path) -> int:
    try:
        return msgspec.json.decode(state_file.read_bytes(), type=_RunState).version
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{RULE}, and {state_file} cannot be read: {error}; give another checkpoint") from error


def _what_is_there(path: Path) -> str:
    """What was given instead, and what to give."""
    if not path.is_dir():
        return ", which is no directory; correct the path"
    found = [state.parent for folder in (path, path / "checkpoints") for state in folder.glob(f"v*/{STATE_FILE}")]
    if found:
        return f", which holds checkpoints; give one of them, such as {max(found, key=lambda one: (len(one.name), one.name))}"
    return " without config.json and run_state.json; correct the path"


def _tokens(directory: Path) -> dict[str, int] | None:
    """Ids by token, None where there is no tokenizer.json. Raises: ConfigurationError if it cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return dict(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises no type of its own.
        raise ConfigurationError(f"{path} must be a tokenizer that can be read: {error}; save it anew") from error


def _num_embeddings(directory: Path) -> int | None:
    """vocab_size, of the text part where a model has several; None where the configuration does not say."""
    path = directory / "config.json"
    try:
        configuration = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} must be a Hugging Face model's configuration: {error}; save the model anew") from error
    size = {**configuration, **configuration.get("text_config", {})}.get("vocab_size")
    return size if isinstance(size, int) else None
