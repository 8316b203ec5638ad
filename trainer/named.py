"""What the run file names: one of ours from a registry, or one of the user's by import path."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shared.errors import ConfigurationError

T = TypeVar("T")


def find(name: str, registry: Mapping[str, T], *, key: str, noun: str, is_one: Callable[[Any], bool] = callable) -> T:
    """`registry[name]`, or what `package.module:attribute` names.

    Args: key: of the run file, for messages. noun: what is named, with its article. is_one: whether an imported value is one.
    Raises: ConfigurationError if it is unknown, cannot be imported, or is something else.
    """
    if name in registry:
        return registry[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigurationError(
            f"{key} must be {', '.join(registry)}, or package.module:name of {noun} of one's own, got {name!r}"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # Importing somebody's module may raise anything.
        raise ConfigurationError(
            f"{key} must name {noun} that can be imported, and {name!r} cannot: {type(error).__name__}: {error}; correct it, or "
            "put its folder on PYTHONPATH where the trainer runs"
        ) from error
    if not is_one(found):
        raise ConfigurationError(f"{key} must name {noun}, and {name!r} is a {type(found).__name__}; name one")
    value: T = found
    return value
