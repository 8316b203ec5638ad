"""Who may ask the agents for what: a bearer token for all but what tells only that the process lives and how much it does."""

from typing import Final

import msgspec
from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.env_agents.messages import Refusal
from shared import bearer_tokens
from shared.agents_token import VARIABLE

OPEN_PATHS: Final = frozenset({"/health", "/status", "/metrics"})
"""For probes, autoscalers and Prometheus: counts, with the names of agent processes and environments, and nothing that changes."""
REFUSAL: Final = (
    f"this request must have the header Authorization: Bearer with the agents' token, and has not; the agents' is in {VARIABLE}"
)


class Access:
    """An application behind its token."""

    def __init__(self, application: ASGIApp, token: str | None) -> None:
        """Args: token: None asks for none."""
        self._application = application
        self._token = token
        self._refusal = Response(
            msgspec.json.encode(Refusal(REFUSAL)), 401, {"WWW-Authenticate": "Bearer"}, media_type="application/json"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or may_request(
            scope["method"], scope["path"], dict(scope["headers"]).get(b"authorization"), token=self._token
        )
        await (self._application if is_open else self._refusal)(scope, receive, send)


def may_request(method: str, path: str, authorization: bytes | None, *, token: str | None) -> bool:
    """Args: token: what is asked for; None asks for none."""
    is_public = method in ("GET", "HEAD") and path in OPEN_PATHS
    return token is None or is_public or bearer_tokens.carries(authorization, token)
