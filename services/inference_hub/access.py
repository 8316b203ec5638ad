"""Who may ask the hub for what: bearer tokens of requests, and hosts of engines that are registered. Pure."""

import hmac
import ipaddress
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import urlsplit

from shared.errors import ConfigurationError, HeadraceError
from shared.hub_tokens import CLIENT_VARIABLE, CONTROL_VARIABLE, HubTokens

PUBLIC_PATH: Final = "/health"


class HostNotAllowedError(HeadraceError):
    """An engine at a host that the allowlist does not admit."""


class Access:
    """The tokens that requests need: none where none are set."""

    def __init__(self, tokens: HubTokens) -> None:
        self._control = _expected(tokens.control)
        self._generate = [expected for expected in (_expected(tokens.client), self._control) if expected is not None]

    def may_generate(self, authorization: bytes | None) -> bool:
        return not self._generate or any(_equal(authorization, expected) for expected in self._generate)

    def may_request(self, path: str, authorization: bytes | None) -> bool:
        """Every request but a generate call."""
        return self._control is None or path == PUBLIC_PATH or _equal(authorization, self._control)

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
        self._allowed = tuple(allowed)
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in self._allowed:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError:
                if "/" in entry or ":" in entry:
                    raise ConfigurationError(
                        "inference_hub.engine_hosts must hold host names, patterns such as *.cluster.local, or networks such as "
                        f"10.0.0.0/8, got {entry!r}"
                    ) from None

    def require(self, url: str) -> None:
        """Raises: HostNotAllowedError."""
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            host = ""
        if any(fnmatchcase(host, entry.lower()) for entry in self._allowed) or self._has(host):
            return
        raise HostNotAllowedError(
            f"an engine must be at a host that inference_hub.engine_hosts admits ({', '.join(self._allowed)}), and this one is at "
            f"{host!r}; add the host there, and restart the hub"
        )

    def _has(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def _expected(token: str | None) -> bytes | None:
    return None if token is None else f"Bearer {token}".encode()


def _equal(authorization: bytes | None, expected: bytes) -> bool:
    return authorization is not None and hmac.compare_digest(authorization, expected)
