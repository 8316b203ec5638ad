"""Secrets from the environment: in a variable, or in the file that a second variable names, as Docker and Kubernetes mount them."""

import os
from collections.abc import Mapping
from pathlib import Path

from shared.errors import ConfigurationError


def file_variable(variable: str) -> str:
    """The variable that names the file with the secret of `variable`."""
    return f"{variable}_FILE"


def read_secret(variable: str, what: str, environment_variables: Mapping[str, str] = os.environ) -> str | None:
    """The secret; None if neither variable is set, or is empty.

    Args: what: the secret in words, for errors. Raises: ConfigurationError if the two differ, or the file cannot be read.
    """
    given = environment_variables.get(variable) or None
    path = environment_variables.get(file_variable(variable))
    if not path:
        return given
    in_file = _read(Path(path), variable, what)
    if given is not None and given != in_file:
        raise ConfigurationError(
            f"{variable} and {file_variable(variable)} must not give two values of {what}, and {path} holds another one; unset one "
            "of them"
        )
    return in_file


def _read(path: Path, variable: str, what: str) -> str:
    try:
        content = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(
            f"{file_variable(variable)} must name a file that holds {what}, and {path} cannot be read: {reason}; correct the path "
            "or its permissions"
        ) from None
    if not content:
        raise ConfigurationError(f"{file_variable(variable)} must name a file that holds {what}, and {path} is empty")
    return content
