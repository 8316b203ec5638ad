"""Which hosts a service of ours may connect to for somebody else: an allowlist, and addresses that no allowlist opens. Pure."""

import ipaddress
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import urlsplit

from shared.errors import ConfigurationError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
METADATA_SERVERS: Final = frozenset(
    map(
        ipaddress.ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe"),
    )
)
"""Those that clouds have outside of the link-local networks: who reaches one may get the machine's credentials."""


class HostAllowlist:
    """Host names, patterns such as *.cluster.local, and networks such as 10.0.0.0/8."""

    def __init__(self, entries: Iterable[str], *, key: str) -> None:
        """Args: key: of the run file, for errors. Raises: ConfigurationError."""
        self.entries = tuple(entries)
        self.networks: list[Network] = []
        for entry in self.entries:
            try:
                self.networks.append(ipaddress.ip_network(entry))
            except ValueError:
                if "/" in entry or ":" in entry:
                    raise ConfigurationError(
                        f"{key} must hold host names, patterns such as *.cluster.local, or networks such as 10.0.0.0/8, got "
                        f"{entry!r}"
                    ) from None

    def admits_name(self, host: str) -> bool:
        """Whether an entry is the name or a pattern of it. An address counts as a name too: `*` admits all."""
        return any(fnmatchcase(host.lower(), entry.lower()) for entry in self.entries)

    def admits_address(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def host_of(url: str) -> str:
    """The host in a URL; "" if it has none that can be read."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def address_in(host: str) -> Address | None:
    """The address that a host is written as; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def why_never(address: Address) -> str | None:
    """Why nobody may have us connect to an address, whatever an allowlist says; None if one may."""
    address = _unwrapped(address)
    if address in METADATA_SERVERS:
        return "a cloud's metadata server"
    if address.is_link_local:
        return "link-local, where clouds have their metadata servers"
    if address.is_unspecified or address.is_multicast or (address.version == 4 and address.is_reserved):
        return "no host's"
    return None


def _unwrapped(address: Address) -> Address:
    """The IPv4 address in an IPv6 one that leads to it."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address
