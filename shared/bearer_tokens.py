"""Bearer tokens: read from the environment, sent in a header, compared in constant time."""

import hmac
import os
from collections.abc import Mapping

from shared.errors import ConfigurationError
from shared.secret_values import read_secret


def read_token(variable: str, what: str, environment_variables: Mapping[str, str] = os.environ) -> str | None:
    """The token in `variable`, or in the file that the variable with _FILE behind its name gives; None if there is none.

    Args: what: the token in words, for errors. Raises: ConfigurationError if it cannot be sent in a header.
    """
    token = read_secret(variable, what, environment_variables)
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigurationError(
            f"{variable} must be printable ASCII without spaces, and is not; make one with openssl rand -hex 32"
        )
    return token


def headers(token: str | None) -> dict[str, str]:
    """Of a request that `token` opens."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def carries(authorization: bytes | None, token: str) -> bool:
    """Whether a request's Authorization header has `token`."""
    return authorization is not None and hmac.compare_digest(authorization, f"Bearer {token}".encode())
