"""A model's tokenizer as chat formats need it, where possible without transformers, which would double the process's memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import renderers
from tokenizers import Tokenizer

from shared.errors import ConfigurationError


class FastTokenizer:
    """`tokenizers.Tokenizer` with the surface that `renderers.base.Tokenizer` asks for."""

    def __init__(self, backend: Tokenizer, *, name_or_path: str, eos_token: str | None, unk_token: str | None) -> None:
        self._backend = backend
        self.name_or_path = name_or_path
        self.eos_token_id = backend.token_to_id(eos_token) if eos_token else None
        self.unk_token_id = backend.token_to_id(unk_token) if unk_token else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """The id of a token, or of each of several; that of the unknown token where there is none."""
        if isinstance(tokens, str):
            found = self._backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]  # type: ignore[misc]


def load_tokenizer(model_path: Path, *, needs_template: bool = False) -> Any:
    """The tokenizer in `model_path`. transformers is needed only for its chat template, and where there is no tokenizer.json.

    Raises: ConfigurationError if there is none, or none that can be read.
    """
    try:
        if not needs_template and (model_path / "tokenizer.json").is_file():
            return _load_fast(model_path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_path)
    except ImportError as error:
        sentence = (
            "env_agents.renderer must not be default where transformers is not installed, because that renders the chat template; "
            "name the model's renderer, or install transformers here"
            if needs_template
            else f"run.model_path must hold a tokenizer.json, and {str(model_path)!r} has none; save the tokenizer with "
            "transformers' save_pretrained, or install transformers here"
        )
        raise ConfigurationError(sentence) from error
    except Exception as error:  # tokenizers raises no type of its own.
        raise ConfigurationError(f"run.model_path must hold a tokenizer, and {str(model_path)!r} does not: {error}") from error


def _load_fast(model_path: Path) -> FastTokenizer:
    settings_file = model_path / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
    return FastTokenizer(
        Tokenizer.from_file(str(model_path / "tokenizer.json")),
        name_or_path=published_name(model_path),
        eos_token=_token_text(settings.get("eos_token")),
        unk_token=_token_text(settings.get("unk_token")),
    )


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    """Tokens are written as text, or as a mapping with the text as `content`."""
    return token["content"] if isinstance(token, dict) else token


def published_name(model_path: Path) -> str:
    """The name under which the model in a local directory was published, if the directory is called after it; else the path.

    `models/Qwen3-8B` and the cache's `models--Qwen--Qwen3-8B/snapshots/<revision>` are both `Qwen/Qwen3-8B`.
    """
    parts = {part.rpartition("--")[2].lower() for part in model_path.resolve().parts[-3:]}
    found = [name for name in renderers.base.MODEL_RENDERER_MAP if name.rpartition("/")[2].lower() in parts]
    return found[0] if len(found) == 1 else str(model_path)
