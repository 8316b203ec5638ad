"""The bearer token of the agents' API, from the environment only: HEADRACE_AGENTS_TOKEN, or a file in HEADRACE_AGENTS_TOKEN_FILE.

The agents ask for it if they have one; the trainer, which asks for evaluations, and the command line send it.
"""

import os
from collections.abc import Mapping
from typing import Final

from shared import bearer_tokens

VARIABLE: Final = "HEADRACE_AGENTS_TOKEN"


def agents_token(environment_variables: Mapping[str, str] = os.environ) -> str | None:
    """None where the agents ask for none. Raises: ConfigurationError if it cannot be sent in a header."""
    return bearer_tokens.read_token(VARIABLE, "the token of the agents", environment_variables)


def agents_access(environment_variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Headers that open the agents' API. Raises: ConfigurationError if the token cannot be sent in one."""
    return bearer_tokens.headers(agents_token(environment_variables))
