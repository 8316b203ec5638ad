"""Token ids as text that people read, with the model's tokenizer alone: nothing here imports transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer


class Decoder(Protocol):
    """Token ids to text. `note` says why the text is not what the model read, and is "" where it is."""

    note: str

    def decode(self, token_ids: Sequence[int]) -> str: ...


class TokenizerDecoder:
    """The text as the model reads it, special tokens included."""

    note = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


class IdDecoder:
    """The ids themselves."""

    def __init__(self, note: str) -> None:
        self.note = note

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def decoder_for(model_path: Path) -> Decoder:
    """By the tokenizer.json in `model_path`; where there is none that can be read, by number."""
    path = model_path / "tokenizer.json"
    if not path.is_file():
        return IdDecoder(f"token ids instead of text: run.model_path ({model_path}) has no tokenizer.json on this machine")
    try:
        return TokenizerDecoder(Tokenizer.from_file(str(path)))
    except Exception as error:  # tokenizers raises no type of its own.
        return IdDecoder(f"token ids instead of text: {path} is not a tokenizer that can be read ({error})")
