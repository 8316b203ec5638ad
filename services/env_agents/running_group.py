"""A group as its owner sees it: the episodes it still plays, those that are recorded, and when it is complete."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.env_agents.group_filters import GroupFilter, verdict
from shared.ledger import GroupRecord
from shared.trajectory import Trajectory


@dataclass(frozen=True)
class GroupRules:
    """How many episodes a group starts and needs, and which groups are not worth training."""

    size: int
    """G, finished episodes that complete a group."""
    redundant_episodes: int = 0
    """R, episodes started beyond G; the slowest R are cancelled."""
    deadline_s: float = math.inf
    """After so long in one process, `min_size` finished episodes complete a group."""
    min_size: int = 2
    filters: Mapping[str, GroupFilter] = field(default_factory=dict)


@dataclass
class RunningGroup:
    """A group under this process's lease. `lock` is held while an episode is recorded: which one completes it must be known."""

    record: GroupRecord
    deadline: float
    """On the event loop's clock; of this process, so an adopted group gets a new one."""
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """By sample index."""
    is_sampling: bool = False
    """The ledger knows that its first episode has begun to sample."""
    ending: str = ""
    """Why what was left of it was cancelled."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def num_needed(self, rules: GroupRules, *, now: float) -> int:
        """Finished episodes that complete it at `now`."""
        return self.record.num_needed if now < self.deadline else min(rules.min_size, self.record.num_needed)

    def is_overdue(self, rules: GroupRules, *, now: float) -> bool:
        """Past its deadline, with enough finished episodes."""
        return now >= self.deadline and len(self.finished) >= self.num_needed(rules, now=now)

    def verdict(self, rules: GroupRules, *newest: Trajectory, now: float) -> str:
        """The filter that discards the group if it is complete with its `newest` episode; "" otherwise."""
        episodes = [*self.finished.values(), *newest]
        return verdict(rules.filters, episodes) if len(episodes) >= self.num_needed(rules, now=now) else ""
