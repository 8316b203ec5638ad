"""What the run file names by import path: something of the user's own."""

import importlib
from collections.abc import Sequence
from typing import Any

from shared.errors import ConfigurationError
from shared.import_paths import is_inside


def imported(import_path: str, *, key: str, noun: str, import_allowlist: Sequence[str]) -> Any:
    """What `package.module:name` names.

    Args: key: of the run file, for messages. noun: what is named, with its article.
    Raises: ConfigurationError if it is outside the allowlist, or cannot be imported.
    """
    if not is_inside(import_path, import_allowlist):
        raise ConfigurationError(
            f"{key} must be inside trainer.import_allowlist ({', '.join(import_allowlist) or 'empty'}), got "
            f"{import_path!r}; add its package to the allowlist in the run file"
        )
    module, _, name = import_path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # Importing somebody's module may raise anything.
        raise ConfigurationError(
            f"{key} must name {noun} that can be imported, and {import_path!r} cannot: {type(error).__name__}: {error}; correct "
            "it, or install what it needs where the trainer runs"
        ) from error
