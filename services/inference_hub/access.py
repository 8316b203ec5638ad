"""Who may ask the hub for what: bearer tokens of requests, and hosts of engines that are registered. Pure."""

from collections.abc import Iterable
from typing import Final

from shared.bearer_tokens import carries
from shared.errors import HeadraceError
from shared.host_allowlist import HostAllowlist, address_in, host_of, why_never
from shared.hub_tokens import CLIENT_VARIABLE, CONTROL_VARIABLE, HubTokens

PUBLIC_PATH: Final = "/health"


class HostNotAllowedError(HeadraceError):
    """An engine at a host that the allowlist does not admit."""


class Access:
    """The tokens that requests need: none where none are set."""

    def __init__(self, tokens: HubTokens) -> None:
        self._control = tokens.control
        self._generate = [token for token in (tokens.client, tokens.control) if token is not None]

    def may_generate(self, authorization: bytes | None) -> bool:
        return not self._generate or any(carries(authorization, token) for token in self._generate)

    def may_request(self, path: str, authorization: bytes | None) -> bool:
        """Every request but a generate call."""
        return self._control is None or path == PUBLIC_PATH or carries(authorization, self._control)

    @staticmethod
    def sentence(*, is_generate: bool) -> str:
        """What somebody without the token is told."""
        variable = CLIENT_VARIABLE if is_generate else CONTROL_VARIABLE
        return (
            f"this request must have the header Authorization: Bearer with the hub's token, and has not; the hub's is in {variable}"
        )


class EngineHosts:
    """The hosts at which engines may be registered: names, * for parts of names, and networks such as 10.0.0.0/8."""

    def __init__(self, allowed: Iterable[str]) -> None:
        """Raises: ConfigurationError."""
        self._allowlist = HostAllowlist(allowed, key="inference_hub.engine_hosts")

    def require(self, url: str) -> None:
        """Raises: HostNotAllowedError."""
        host = host_of(url)
        address = address_in(host)
        if address is not None and (because := why_never(address)):
            raise HostNotAllowedError(
                f"an engine must be at an address of a host, whatever inference_hub.engine_hosts admits, and {host} is {because}; "
                "give the engine's own"
            )
        if self._allowlist.admits_name(host) or (address is not None and self._allowlist.admits_address(address)):
            return
        raise HostNotAllowedError(
            f"an engine must be at a host that inference_hub.engine_hosts admits ({', '.join(self._allowlist.entries)}), and this "
            f"one is at {host!r}; add the host there, and restart the hub"
        )
