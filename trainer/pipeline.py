"""What a stretch of updates measured of the pipeline: seconds and tokens that add up, and the shares made of them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shared.trajectory import Timings
from shared.versions import lag

MASKED = "masked"
NO_REWARD = "no_reward"
NO_TIME = Timings(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class EngineReading:
    """The hub's counters of one engine at one instant; they rise for as long as the hub lives."""

    id: str
    tensor_parallel_size: int
    max_running_calls: int | None
    max_tokens: int | None
    ready_s: float
    idle_s: float
    used_s: float
    """Weighted by the share of its limits that its calls used."""

    @property
    def has_limits(self) -> bool:
        return self.max_running_calls is not None or self.max_tokens is not None


@dataclass(frozen=True)
class EngineSeconds:
    """Engine-seconds of a stretch, summed over engines."""

    ready_s: float = 0.0
    idle_s: float = 0.0
    used_s: float = 0.0
    limited_s: float = 0.0
    """Ready time of the engines that say what they can hold; `used_s` is of it."""

    def __add__(self, other: "EngineSeconds") -> "EngineSeconds":
        return EngineSeconds(
            self.ready_s + other.ready_s,
            self.idle_s + other.idle_s,
            self.used_s + other.used_s,
            self.limited_s + other.limited_s,
        )

    @property
    def busy_s(self) -> float:
        return self.ready_s - self.idle_s

    @property
    def idle_share(self) -> float | None:
        return self.idle_s / self.ready_s if self.ready_s > 0 else None

    @property
    def utilisation(self) -> float | None:
        return self.used_s / self.limited_s if self.limited_s > 0 else None


def engine_seconds(before: Iterable[EngineReading], after: Iterable[EngineReading]) -> EngineSeconds:
    """What lies between two readings. Counters that fell belong to a hub that began anew, and count from zero."""
    earlier = {reading.id: reading for reading in before}
    total = EngineSeconds()
    for now in after:
        then = earlier.get(now.id)
        if then is None or now.ready_s < then.ready_s:
            then = replace(now, ready_s=0.0, idle_s=0.0, used_s=0.0)
        ready_s = now.ready_s - then.ready_s
        total += EngineSeconds(
            ready_s=ready_s,
            idle_s=now.idle_s - then.idle_s,
            used_s=now.used_s - then.used_s,
            limited_s=ready_s if now.has_limits else 0.0,
        )
    return total


@dataclass(frozen=True)
class Stretch:
    """One update, or several added up. Seconds are rank 0's wall clock, from one update's end to the next."""

    num_updates: int = 0
    update_s: float = 0.0
    wait_s: float = 0.0
    """Training had no data."""
    train_s: float = 0.0
    """Forward, backward and step."""
    engines: EngineSeconds = field(default_factory=EngineSeconds)
    num_episodes: int = 0
    timings: Timings = NO_TIME
    """Summed over the episodes that were trained."""
    trained_tokens: int = 0
    discarded_tokens: Mapping[str, int] = field(default_factory=dict)
    """By reason: the ledger's, and of trained groups `masked` and `no_reward`."""
    num_fallen_back: int = 0
    """Updates while admission had fallen back to synchronous."""

    def __add__(self, other: "Stretch") -> "Stretch":
        ours, theirs = self.timings, other.timings
        return Stretch(
            num_updates=self.num_updates + other.num_updates,
            update_s=self.update_s + other.update_s,
            wait_s=self.wait_s + other.wait_s,
            train_s=self.train_s + other.train_s,
            engines=self.engines + other.engines,
            num_episodes=self.num_episodes + other.num_episodes,
            timings=Timings(
                ours.queued_s + theirs.queued_s,
                ours.generating_s + theirs.generating_s,
                ours.environment_s + theirs.environment_s,
                ours.reward_s + theirs.reward_s,
            ),
            trained_tokens=self.trained_tokens + other.trained_tokens,
            discarded_tokens=Counter(self.discarded_tokens) + Counter(other.discarded_tokens),
            num_fallen_back=self.num_fallen_back + other.num_fallen_back,
        )

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.update_s if self.update_s > 0 else 0.0

    @property
    def trainer_idle_share(self) -> float:
        return 1 - self.train_s / self.update_s if self.update_s > 0 else 0.0

    @property
    def episode_s(self) -> float:
        """Of one episode, on average."""
        return _total_s(self.timings) / self.num_episodes if self.num_episodes else 0.0

    @property
    def episode_shares(self) -> dict[str, float]:
        """Of the episodes' summed lives; empty if they took no time."""
        timings, total_s = self.timings, _total_s(self.timings)
        if total_s <= 0:
            return {}
        return {
            "queued": timings.queued_s / total_s,
            "generating": timings.generating_s / total_s,
            "environment": timings.environment_s / total_s,
            "reward": timings.reward_s / total_s,
        }

    @property
    def discarded_token_shares(self) -> dict[str, float]:
        """Of all tokens trained or discarded, by reason."""
        total = self.trained_tokens + sum(self.discarded_tokens.values())
        return {reason: count / total for reason, count in sorted(self.discarded_tokens.items()) if count}


def _total_s(timings: Timings) -> float:
    return timings.queued_s + timings.generating_s + timings.environment_s + timings.reward_s


def rise(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How much each count rose."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def tokens_by_lag(sampled_by_version: Iterable[tuple[int, int]], trained_version: int) -> dict[int, int]:
    """Tokens at each lag, from (policy version, tokens it sampled) of any number of episodes."""
    counts: Counter[int] = Counter()
    for version, num_tokens in sampled_by_version:
        counts[lag(trained_version, version)] += num_tokens
    return dict(sorted(counts.items()))
