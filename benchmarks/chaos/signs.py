"""What the run looks like from outside at one instant, and what two looks say about a part. The functions are pure."""

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
import redis

from shared.keys import Keys
from shared.ledger import Books, TrainingLedger

POLL_S = 0.1
TIMEOUT_S = 0.5
COMPLETED = re.compile(r'^headrace_hub_completed_calls_total\{engine="(?P<engine>[^"]+)".*\} (?P<count>\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class EngineView:
    is_ready: bool
    num_open: int
    """Calls that it is answering."""
    num_completed: float
    """Since the hub started."""


@dataclass(frozen=True)
class HubView:
    at: float
    """When the question was asked."""
    engines: Mapping[str, EngineView]
    """By URL."""

    @property
    def num_completed(self) -> float:
        return sum(engine.num_completed for engine in self.engines.values())


@dataclass(frozen=True)
class RedisView:
    at: float
    version: int
    num_recorded: int
    owners: Mapping[str, str]
    """Running group → the agent process that has it."""
    alive_until_ms: Mapping[str, float]
    """Agent process → when it counts as dead."""


def has_more(before: float, now: float) -> bool:
    """Whether a counter has moved; one that is lower counts from 0 again, in another process."""
    return now > before if now >= before else now > 0


def engine_goes_on(before: HubView, now: HubView, url: str) -> bool:
    """The calls that were at the engine are answered: by it, or by others once it has none."""
    old, new = before.engines.get(url), now.engines.get(url)
    if new is None:
        return has_more(before.num_completed, now.num_completed)
    if old is not None and has_more(old.num_completed, new.num_completed):
        return True
    return new.num_open == 0 and has_more(before.num_completed, now.num_completed)


def hub_goes_on(before: HubView, now: HubView) -> bool:
    return has_more(before.num_completed, now.num_completed)


def redis_goes_on(before: RedisView, now: RedisView) -> bool:
    return now.num_recorded > before.num_recorded


def has_renewed(before: RedisView, now: RedisView, owner: str) -> bool:
    return now.alive_until_ms.get(owner, 0.0) > before.alive_until_ms.get(owner, 0.0)


def agent_goes_on(before: RedisView, now: RedisView, owner: str) -> bool:
    """None of the groups that the process had waits for it."""
    left = [group for group, name in before.owners.items() if name == owner and now.owners.get(group) == owner]
    return not left or has_renewed(before, now, owner)


class Watch:
    """Looks at Redis and at the hub all the time, each in a thread of its own. A look that is refused leaves the one before."""

    def __init__(self, redis_url: str, keys: Keys, hub_url: str) -> None:
        self._keys = keys
        self._hub_url = hub_url
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._is_over = threading.Event()
        self.hub: HubView | None = None
        self.redis: RedisView | None = None
        self.published_at = 0.0
        """When the newest version was first seen."""
        self._threads = [threading.Thread(target=self._poll, args=(look,)) for look in (self._look_at_hub, self._look_at_redis)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._redis.close()

    def books(self) -> Books:
        return TrainingLedger(self._redis, self._keys).books()

    def running(self) -> set[str]:
        return {group.decode() for group in self._redis.zrange(self._keys.running, 0, -1)}

    def _poll(self, look: Callable[[], None]) -> None:
        while not self._is_over.wait(POLL_S):
            try:
                look()
            except (redis.RedisError, httpx.HTTPError):
                continue

    def _look_at_hub(self) -> None:
        asked_at = time.monotonic()
        with httpx.Client(base_url=self._hub_url, timeout=TIMEOUT_S, trust_env=False) as client:
            engines = client.get("/engines").raise_for_status().json()
            metrics = client.get("/metrics").raise_for_status().text
        completed: dict[str, float] = {}
        for match in COMPLETED.finditer(metrics):
            completed[match["engine"]] = completed.get(match["engine"], 0.0) + float(match["count"])
        views = {
            engine["url"]: EngineView(engine["state"] == "ready", engine["outstanding_calls"], completed.get(engine["id"], 0.0))
            for engine in engines
        }
        self.hub = HubView(asked_at, views)

    def _look_at_redis(self) -> None:
        asked_at = time.monotonic()
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hmget(self._keys.ledger, "version", "episodes_finished")
            pipeline.hgetall(self._keys.owners)
            pipeline.zrange(self._keys.processes, 0, -1, withscores=True)
            (version, recorded), owners, processes = pipeline.execute()
        view = RedisView(
            asked_at,
            int(version or 0),
            int(recorded or 0),
            {group.decode(): owner.decode() for group, owner in owners.items()},
            {owner.decode(): score for owner, score in processes},
        )
        if self.redis is not None and view.version > self.redis.version:
            self.published_at = asked_at
        self.redis = view
