"""Hub, agents, Redis and engines: who listens at the address of each, and whether it is that part."""

import errno
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from services.standalone import printing
from services.standalone.connections import RefusedError, ServiceApi, UnreachableError
from services.standalone.doctor.finding import Finding, ok, problem, warning
from shared.agents_token import agents_access
from shared.hub_tokens import hub_tokens

TIMEOUT_S: Final = 15.0
"""An engine's answer waits for its scheduler."""
DEFAULT_PORTS: Final = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}
SEE_LOGS: Final = "see its log in run.directory/logs, and start it again"


class Port(StrEnum):
    """What a part's address is from here."""

    FREE = "free"
    TAKEN = "taken"
    ELSEWHERE = "elsewhere"
    """Another machine's, or no TCP port at all."""
    UNDECIDED = "undecided"
    """0: chosen at start."""


@dataclass(frozen=True)
class Part:
    """One part of a run. `answer` is what it says of itself; None if nobody answers as this part does, with `problem` why."""

    name: str
    key: str
    """That gives its address."""
    address: str
    port: Port
    answer: str | None
    problem: str = ""


def check(part: Part, *, is_run_up: bool) -> Finding:
    """Its row. `is_run_up`: hub or agents of the run answer, so that the other parts should too."""
    rule = f"{part.key} leads to it, or to a free port for it"
    if part.answer is not None:
        return ok(part.name, f"answers at {part.address}: {part.answer}", rule)
    if part.port is Port.TAKEN:
        remedy = f"stop what listens there, or set {part.key} to another address"
        return problem(part.name, f"something else listens at {part.address}: {part.problem}", rule, remedy)
    if is_run_up:
        return problem(part.name, f"does not answer at {part.address}, and the run is up: {part.problem}", rule, SEE_LOGS)
    if part.port is Port.ELSEWHERE:
        remedy = f"start it there, or correct {part.key}"
        return warning(part.name, f"does not answer at {part.address}: {part.problem}", rule, remedy)
    found = "port chosen at start" if part.port is Port.UNDECIDED else f"does not run yet; {part.address} is free"
    return ok(part.name, found, rule)


def look_at_hub(address: str) -> Part:
    def asked(api: ServiceApi) -> str:
        status = api.get("/status")
        return f"version {status['version']}, {printing.counted(status['engines'].get('ready', 0), 'engine')} ready"

    return _look("hub", "inference_hub.port", address, asked, access=hub_tokens().for_control)


def look_at_agents(address: str) -> Part:
    def asked(api: ServiceApi) -> str:
        books = api.get("/status")["books"]
        return f"{printing.counted(books['running'], 'group')} running, {books['ready']} ready, {books['trained']} trained"

    return _look("agents", "env_agents.port", address, asked, access=agents_access())


def port_at(url: str) -> Port:
    """Found out by binding to it for a moment. What cannot be read is elsewhere: whoever asks there says why."""
    parts = urlsplit(url)
    try:
        number = DEFAULT_PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:
        return Port.ELSEWHERE
    if parts.hostname is None or number is None:
        return Port.ELSEWHERE
    if number == 0:
        return Port.UNDECIDED
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(parts.hostname, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return Port.TAKEN if error.errno == errno.EADDRINUSE else Port.ELSEWHERE
    return Port.FREE


def _look(name: str, key: str, address: str, asked: Callable[[ServiceApi], str], access: Mapping[str, str] | None = None) -> Part:
    """What listens at the address and does not answer as the part does is something else."""
    port = port_at(address)
    if port is Port.UNDECIDED:
        return Part(name, key, address, port, None)
    try:
        with ServiceApi(address, timeout_s=TIMEOUT_S, access=access) as api:
            return Part(name, key, address, port, asked(api))
    except (UnreachableError, RefusedError) as error:
        return Part(name, key, address, port, None, str(error))
    except (KeyError, TypeError, AttributeError):
        return Part(name, key, address, port, None, f"its answer is not that of the {name}")
