"""The run under fire: strikes by the schedule, watches what goes on, and writes down who noticed.

A blow is STRUCK → GONE ON (the run does without the part, or with it again) → BACK (the part itself works again). The next fault
comes when all blows of the one before have gone on, and its own targets are back.
"""

import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks.chaos import signs
from benchmarks.chaos.recovery import NEEDS, Interval, Recovery, recovery
from benchmarks.chaos.schedule import PARTS, Action, Blow, Fault
from benchmarks.chaos.signs import HubView, RedisView, Watch
from benchmarks.live_run import LiveRun, send
from benchmarks.timeline import Timeline

POLL_S = 0.05
GIVE_UP_S = 180.0
"""A run that does not go on within so long does not recover."""
READY = re.compile(r"^(?P<name>\S+) is ready after (?P<seconds>\S+) s$")
TRAINER_WORKS = re.compile(r"^resuming from the checkpoint")
"""What a trainer says that was started again: torch is imported, the model is loaded, and it begins with the books."""
LOG_PREFIX = re.compile(r"^\S+ \S+ (?P<level>INFO|WARNING|ERROR) \S+: (?P<text>.*)$")
BETWEEN_UPDATES = re.compile(r"state=(ready was=syncing|syncing was=ready) ")
"""What the hub says of its engines in every weight update."""
LONGEST_LINE = 150


@dataclass
class Struck:
    """A blow that was struck."""

    blow: Blow
    fault: Fault
    at: float
    process: psutil.Process
    has_stand_in: bool
    hub_before: HubView | None = None
    """First looks after the blow."""
    redis_before: RedisView | None = None
    continued_at: float | None = None
    goes_on_at: float | None = None
    is_back: bool = False

    @property
    def owner(self) -> str:
        """The name in the ledger of an agent process."""
        return f"{socket.gethostname()}:{self.process.pid}"


@dataclass
class Chaos:
    """Strikes one fault after the other. `line` has to be given all that the processes print."""

    timeline: Timeline
    live: LiveRun
    watch: Watch
    recoveries: list[Recovery] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _struck: list[Struck] = field(default_factory=list)
    _starts: dict[str, list[Interval]] = field(default_factory=dict)
    """When processes started again, by part, until they were ready."""
    _trainer_started_at: float = 0.0

    @property
    def num_blows(self) -> int:
        return len(self._struck)

    def strike(self, fault: Fault) -> None:
        """Strikes and returns when the run has gone on."""
        struck: list[Struck] = []
        first_at = time.monotonic()
        for blow in fault.blows:
            self._tick_until(lambda blow=blow: time.monotonic() >= first_at + blow.after_s)
            self._tick_until(lambda blow=blow: blow.part in self.live.parts)
            struck.append(self._strike(blow, fault))
        if not self._tick_until(lambda: all(one.goes_on_at for one in struck), timeout_s=GIVE_UP_S):
            left = ", ".join(str(one.blow) for one in struck if not one.goes_on_at)
            self.problems.append(f"after fault {fault.number} the run did not go on within {GIVE_UP_S:g} s: {left}")
            self.timeline.note("chaos", self.problems[-1])
        self._tick_until(lambda: all(one.continued_at for one in struck if one.blow.action is Action.STOP))
        self.recoveries += [self._recovery(one, struck) for one in struck if one.goes_on_at]

    def wait_back(self, parts: Iterable[str] | None = None) -> bool:
        """Until these parts, or all, work again."""
        wanted = set(parts) if parts is not None else {part for names in PARTS.values() for part in names}
        return self._tick_until(lambda: all(one.is_back for one in self._struck if one.blow.part in wanted), timeout_s=GIVE_UP_S)

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._tick_until(lambda: time.monotonic() >= until)

    def line(self, name: str, text: str) -> None:
        """A line that a process printed: something for the timeline, or a sign of life."""
        if name == "headrace":
            if match := READY.match(text):
                self._started(match["name"], float(match["seconds"]))
            if text == "trainer has started":
                self._trainer_started_at = time.monotonic()
            (self.timeline.noticed if "started again" in text else self.timeline.note)(name, text)
        elif name == "trainer":
            if TRAINER_WORKS.match(text):
                self._started("trainer", time.monotonic() - self._trainer_started_at)
            if not text.startswith(("update ", "checkpoint of ", "advice: ")):
                self.timeline.noticed(name, text[:LONGEST_LINE])
        elif name in ("hub", *PARTS["agent"]) and (match := LOG_PREFIX.match(text)) and _is_news(match["level"], text):
            self.timeline.noticed(name, match["text"][:LONGEST_LINE])

    def _started(self, part: str, seconds: float) -> None:
        now = time.monotonic()
        self._starts.setdefault(part, []).append((now - seconds, now))

    def _strike(self, blow: Blow, fault: Fault) -> Struck:
        process = self.live.parts[blow.part]
        struck = Struck(blow, fault, time.monotonic(), process, self._has_stand_in(blow, fault))
        send(process, signal.SIGKILL if blow.action is Action.KILL else signal.SIGSTOP)
        text = "SIGKILL" if blow.action is Action.KILL else f"SIGSTOP, SIGCONT in {blow.stop_s:.1f} s"
        self.timeline.fault(blow.part, f"{text} (fault {fault.number})")
        self._struck.append(struck)
        return struck

    def _has_stand_in(self, blow: Blow, fault: Fault) -> bool:
        """Whether another part of the kind works and is not hit in the same fault."""
        hit = {other.part for other in fault.blows}
        down = {one.blow.part for one in self._struck if not one.is_back}
        return any(part not in hit | down for part in PARTS[blow.kind])

    def _tick_until(self, is_done: Callable[[], object], *, timeout_s: float = GIVE_UP_S) -> bool:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline:
                return False
            if not self.live.is_running():
                raise RuntimeError(f"headrace up has ended; its output and {self.live.directory / 'logs'} say why")
            self._tick()
            time.sleep(POLL_S)
        return True

    def _tick(self) -> None:
        for one in self._struck:
            if one.blow.action is Action.STOP and one.continued_at is None and time.monotonic() >= one.at + one.blow.stop_s:
                send(one.process, signal.SIGCONT)
                one.continued_at = time.monotonic()
                self.timeline.note(one.blow.part, "SIGCONT")
            self._look(one)

    def _look(self, one: Struck) -> None:
        hub, books = self.watch.hub, self.watch.redis
        if one.hub_before is None and hub is not None and hub.at > one.at:
            one.hub_before = hub
        if one.redis_before is None and books is not None and books.at > one.at:
            one.redis_before = books
        if one.goes_on_at is None and self._goes_on(one, hub, books):
            one.goes_on_at = time.monotonic()
            how = "stands still, and the run goes on" if self._stands(one) else "the run goes on"
            self.timeline.recovered(one.blow.part, f"{how} {one.goes_on_at - one.at:.1f} s after it was hit")
        if not one.is_back and one.goes_on_at is not None and not self._stands(one) and self._is_back(one, hub, books):
            one.is_back = True
            if one.has_stand_in:
                self.timeline.recovered(one.blow.part, f"works again itself {time.monotonic() - one.at:.1f} s after it was hit")

    def _stands(self, one: Struck) -> bool:
        return one.blow.action is Action.STOP and one.continued_at is None

    def _goes_on(self, one: Struck, hub: HubView | None, books: RedisView | None) -> bool:
        match one.blow.kind:
            case "engine" | "hub":
                if one.hub_before is None or hub is None or hub is one.hub_before:
                    return False
                if one.blow.kind == "hub":
                    return signs.hub_goes_on(one.hub_before, hub)
                return signs.engine_goes_on(one.hub_before, hub, self._url(one.blow.part))
            case "trainer":
                since = max(one.at, self._trainer_started_at) if one.blow.action is Action.KILL else one.continued_at
                began_again = one.blow.action is Action.STOP or self._trainer_started_at > one.at
                return since is not None and began_again and self.watch.published_at > since
            case _:
                if one.redis_before is None or books is None or books is one.redis_before:
                    return False
                if one.blow.kind == "redis":
                    return signs.redis_goes_on(one.redis_before, books)
                return signs.agent_goes_on(one.redis_before, books, one.owner)

    def _is_back(self, one: Struck, hub: HubView | None, books: RedisView | None) -> bool:
        is_new = one.blow.action is Action.STOP or any(end > one.at for _, end in self._starts.get(one.blow.part, ()))
        match one.blow.kind:
            case "engine":
                engine = hub.engines.get(self._url(one.blow.part)) if hub else None
                return is_new and engine is not None and engine.is_ready
            case "agent":
                if one.redis_before is None or books is None:
                    return False
                if one.blow.action is Action.STOP:
                    return signs.has_renewed(one.redis_before, books, one.owner)
                process = self.live.parts.get(one.blow.part) if is_new else None
                return process is not None and f"{socket.gethostname()}:{process.pid}" in books.alive_until_ms
            case _:
                return True

    def _url(self, part: str) -> str:
        return self.live.configuration.engines.urls[int(part.rpartition("-")[2])]

    def _recovery(self, one: Struck, together: Sequence[Struck]) -> Recovery:
        assert one.goes_on_at is not None
        starting: list[Interval] = []
        standing: list[Interval] = []
        for other in together:
            if other.has_stand_in or other.blow.kind not in NEEDS[one.blow.kind]:
                continue
            if other.blow.action is Action.STOP:
                standing.append((other.at, other.continued_at or one.goes_on_at))
            starting += [interval for interval in self._starts.get(other.blow.part, ()) if interval[1] > other.at]
        blow = one.blow
        return recovery(
            blow.kind, blow.action, blow.part, blow_at=one.at, goes_on_at=one.goes_on_at, starting=starting, standing=standing
        )


def _is_news(level: str, text: str) -> bool:
    """Whether a line of the hub's or the agents' log is about a fault."""
    return level != "INFO" or ("state=" in text and not BETWEEN_UPDATES.search(text))
