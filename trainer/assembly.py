"""Delivered episodes → complete groups → the next batch. No Redis, no clock, no tensors.

A group is WAITING for episodes → complete → in a batch, or given up as stale or failed. The ledger says which groups exist and
in which order they started; this module says which of them train next and which never will.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shared import versions
from shared.ledger import GroupRecord, LiveGroups, ReadyGroup
from shared.stream import Delivery
from shared.trajectory import Timings, Trajectory

FLOOR_SLACK = 1e-9
"""Keeps a product such as 1.1 * 10 from falling below its exact value, as in admit.lua."""


@dataclass(frozen=True)
class Episode:
    """What planning needs to know of one trajectory; its tokens stay in the stream under `entry_id`."""

    entry_id: str
    trajectory_id: str
    group_id: str
    group_size: int
    sample_index: int
    num_tokens: int
    sampled_by_version: tuple[tuple[int, int], ...]
    """(policy version, tokens it sampled), oldest first."""
    reward: float
    turn_rewards: tuple[float, ...]
    """By turn, at least one; they sum to `reward`."""
    state_fingerprints: tuple[str, ...]
    """By turn, of the environment's state before it; "" if unknown."""
    timings: Timings
    is_trainable: bool
    """Its reward means something, and it has a token that the policy sampled."""

    @property
    def oldest_version(self) -> int | None:
        return self.sampled_by_version[0][0] if self.sampled_by_version else None

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(count for _, count in self.sampled_by_version)

    def num_sampled_since(self, version: int) -> int:
        """Tokens sampled by `version` or a later one."""
        return sum(count for sampled, count in self.sampled_by_version if sampled >= version)

    @classmethod
    def of(cls, delivery: Delivery) -> "Episode":
        trajectory = delivery.trajectory
        return cls(
            entry_id=delivery.entry_id,
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            group_size=trajectory.group_size,
            sample_index=trajectory.sample_index,
            num_tokens=trajectory.num_tokens,
            sampled_by_version=_sampled_by_version(trajectory),
            reward=trajectory.reward,
            turn_rewards=tuple(turn.reward for turn in trajectory.turns) or (trajectory.reward,),
            state_fingerprints=tuple(turn.state_fingerprint for turn in trajectory.turns) or ("",),
            timings=trajectory.timings,
            is_trainable=trajectory.is_trainable,
        )


def _sampled_by_version(trajectory: Trajectory) -> tuple[tuple[int, int], ...]:
    sampled, counts = np.unique(trajectory.token_versions[trajectory.loss_mask == 1], return_counts=True)
    return tuple(zip(sampled.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class Group:
    """The episodes delivered so far of one task, by sample index."""

    group_id: str
    episodes: tuple[Episode, ...]

    @property
    def trainable(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.is_trainable)

    @property
    def oldest_version(self) -> int | None:
        """Of the tokens that would take part in an update; None if none would."""
        return min((episode.sampled_by_version[0][0] for episode in self.trainable), default=None)

    @property
    def newest_version(self) -> int | None:
        return max((episode.sampled_by_version[-1][0] for episode in self.trainable), default=None)


class GroupAssembler:
    """Groups in the making. Holds at most what admission allows; a delivery that comes twice changes nothing."""

    def __init__(self) -> None:
        self._episodes: dict[str, dict[int, Episode]] = {}

    def add(self, episode: Episode) -> None:
        self._episodes.setdefault(episode.group_id, {}).setdefault(episode.sample_index, episode)

    def retain(self, group_ids: Collection[str]) -> None:
        """Forgets every group that is not among `group_ids`: trained, or discarded by someone else."""
        self._episodes = {group_id: episodes for group_id, episodes in self._episodes.items() if group_id in group_ids}

    def groups(self) -> dict[str, Group]:
        """Every group with an episode, by id."""
        return {group_id: _group(group_id, episodes) for group_id, episodes in self._episodes.items()}


def _group(group_id: str, episodes: dict[int, Episode]) -> Group:
    ordered = tuple(episodes[index] for index in sorted(episodes))
    return Group(group_id, ordered)


OnStale = Literal["regenerate", "drop", "wait", "mask"]


@dataclass(frozen=True)
class Selection:
    """What to do before the next update: groups to train, all B of them or none, and groups to give up."""

    batch: tuple[Group, ...]
    oldest_version: int
    """Tokens of older versions carry no loss. Only `mask` lets any into a batch."""
    stale: tuple[str, ...]
    failed: tuple[str, ...]
    awaited: tuple[str, ...]
    """Running groups to wait for: this update would make them stale, and more of them than redundant groups make up for."""


def select(
    groups: dict[str, Group],
    live: LiveGroups,
    *,
    version: int,
    on_stale: OnStale,
    batch_groups: int,
    redundant_groups: int,
    min_trainable: int = 2,
) -> Selection:
    """The B oldest groups that may be trained at `version`, and those that may not any more.

    A group has failed when fewer than `min_trainable` of its episodes can be learnt from.

    Args: groups: those with an episode delivered. live: the ledger's books. batch_groups, redundant_groups: of admission.
    """
    oldest_version = version - versions.max_lag(live.async_generation_ratio)
    stale = stale_groups(groups, live, oldest_version=oldest_version, on_stale=on_stale)
    arrived = list(_arrived(groups, [ready for ready in live.ready if ready.record.group_id not in stale]))
    failed = [group.group_id for _, group in arrived if len(group.trainable) < min_trainable]
    usable = [(record, group) for record, group in arrived if group.group_id not in failed]
    chosen = usable[:batch_groups] if len(usable) >= batch_groups else []
    youngest_start = max((record.start_number for record, _ in chosen), default=0)
    stragglers = [
        record.group_id
        for record in live.running
        if on_stale == "wait"
        and record.group_id not in stale
        and record.start_number < youngest_start
        and _oldest_of_running(record, groups, otherwise=version) <= oldest_version
    ]
    num_live = len(live.ready) + len(live.running) - len(stale) - len(failed)
    num_spare = spare_groups(num_live, live.async_generation_ratio, batch_groups=batch_groups, redundant_groups=redundant_groups)
    return Selection(
        batch=tuple(group for _, group in chosen),
        oldest_version=oldest_version,
        stale=tuple(stale),
        failed=tuple(failed),
        awaited=tuple(stragglers) if len(stragglers) > num_spare else (),
    )


def spare_groups(num_live: int, async_generation_ratio: float, *, batch_groups: int, redundant_groups: int) -> int:
    """How many live groups nothing counts on: those that redundancy has added to what α admits, as far as they live.

    The ledger admits ⌊(v + 1 + α) · B⌋ groups and redundant ones beyond that, and v · B are trained, so ⌊(1 + α) · B⌋ ready and
    running ones fill every batch that α plans. The slowest of the rest are what redundancy is there to leave behind.
    """
    num_planned = math.floor((1 + async_generation_ratio) * batch_groups + FLOOR_SLACK)
    return max(0, min(redundant_groups, num_live - num_planned))


def stale_groups(groups: dict[str, Group], live: LiveGroups, *, oldest_version: int, on_stale: OnStale) -> list[str]:
    """Groups that no update will train: with a token older than `oldest_version` or, if such tokens are masked, with no other.

    A running group grows no younger, so it is given up as soon as it began to sample too long ago, unless tokens are masked.
    """
    delivered = {ready.record.group_id: groups.get(ready.record.group_id) for ready in live.ready}
    if on_stale == "mask":
        decisive = {group_id: group.newest_version for group_id, group in delivered.items() if group}
    else:
        decisive = {group_id: group.oldest_version for group_id, group in delivered.items() if group}
        decisive |= {record.group_id: _oldest_of_running(record, groups, otherwise=oldest_version) for record in live.running}
    return [group_id for group_id, version in decisive.items() if version is not None and version < oldest_version]


def _oldest_of_running(record: GroupRecord, groups: dict[str, Group], *, otherwise: int) -> int:
    """The oldest version that sampled in a running group, as far as anyone knows; `otherwise` if it has not begun to sample."""
    group = groups.get(record.group_id)
    known = (record.sampling_version, group.oldest_version if group else None)
    return min((version for version in known if version is not None), default=otherwise)


def _arrived(groups: dict[str, Group], ready: Iterable[ReadyGroup]) -> Iterator[tuple[GroupRecord, Group]]:
    """Those delivered in full. One that is not holds back all younger ones, so that order never depends on when pages arrive."""
    for entry in ready:
        group = groups.get(entry.record.group_id)
        if group is None or len(group.episodes) < entry.num_episodes:
            return
        yield entry.record, group
