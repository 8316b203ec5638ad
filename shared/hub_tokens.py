"""The hub's bearer tokens: one for who generates, one for who controls. They come from the environment only.

    HEADRACE_HUB_TOKEN          agents and other callers of POST /generate
    HEADRACE_HUB_CONTROL_TOKEN  the trainer, the command line, whoever adds engines; it opens everything

Each may be in a file instead, which the variable with _FILE behind its name gives.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shared.bearer_tokens import headers, read_token
from shared.errors import ConfigurationError

CLIENT_VARIABLE: Final = "HEADRACE_HUB_TOKEN"
CONTROL_VARIABLE: Final = "HEADRACE_HUB_CONTROL_TOKEN"


@dataclass(frozen=True)
class HubTokens:
    """None where the hub asks for none."""

    client: str | None = field(default=None, repr=False)
    control: str | None = field(default=None, repr=False)

    @property
    def for_generating(self) -> dict[str, str]:
        """Headers of a generate call."""
        return headers(self.client or self.control)

    @property
    def for_control(self) -> dict[str, str]:
        """Headers of every other request."""
        return headers(self.control)


def hub_tokens(environment_variables: Mapping[str, str] = os.environ) -> HubTokens:
    """The tokens that this process has. Raises: ConfigurationError if one cannot be sent in a header."""
    return HubTokens(
        *(read_token(variable, "a token of the hub", environment_variables) for variable in (CLIENT_VARIABLE, CONTROL_VARIABLE))
    )


def required_tokens(environment_variables: Mapping[str, str] = os.environ) -> HubTokens:
    """The tokens that the hub asks for: both, or none. Raises: ConfigurationError if only one is set, or both are the same."""
    tokens = hub_tokens(environment_variables)
    if (tokens.client is None) != (tokens.control is None):
        missing = CLIENT_VARIABLE if tokens.client is None else CONTROL_VARIABLE
        raise ConfigurationError(
            f"{CLIENT_VARIABLE} and {CONTROL_VARIABLE} must both be set for the hub, or neither, and {missing} is not; one alone "
            "would protect half of the hub"
        )
    if tokens.client is not None and tokens.client == tokens.control:
        raise ConfigurationError(
            f"{CLIENT_VARIABLE} and {CONTROL_VARIABLE} must differ, and are the same; an agent could push weights with it"
        )
    return tokens
