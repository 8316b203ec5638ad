"""TCP ports of one machine: choosing free ones, and saying in one sentence that one is taken."""

import socket
from contextlib import ExitStack
from typing import Final

from shared.errors import ConfigurationError

LOOPBACK: Final = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listened on a moment ago, chosen by the system.

    The kernel gives outgoing connections ports of the other parity than these, so they stay free until a child binds them.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind((LOOPBACK, 0))
        return [listener.getsockname()[1] for listener in sockets]


def require_free(key: str, host: str, port: int, *, to_choose: str = "") -> None:
    """`to_choose` is the setting that has one chosen, if that is not `key`=0.

    Raises: ConfigurationError if a process listens on `port` already, or `host` is not an address of this machine.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"{key} must be a free port of this machine, got {host}:{port} ({error.strerror}); stop what listens there, "
                f"or pass --set {to_choose or key + '=0'} to have one chosen"
            ) from error
