"""Delivered episodes → complete groups → the next batch. No Redis, no clock, no tensors.

A group is WAITING for episodes → complete → in a batch, or given up as stale or failed. The ledger says which groups exist and
in which order they started; this module says which of them train next and which never will.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shared import versions
from shared.stream import Delivery

MIN_TRAINABLE = 2
"""A group-relative baseline needs a sibling."""


@dataclass(frozen=True)
class Episode:
    """What planning needs to know of one trajectory; its tokens stay in the stream under `entry_id`."""

    entry_id: str
    trajectory_id: str
    group_id: str
    group_size: int
    sample_index: int
    num_tokens: int
    num_sampled_tokens: int
    reward: float
    is_trainable: bool
    """Its reward means something, and it has a token that the policy sampled."""
    oldest_version: int | None

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
            num_sampled_tokens=trajectory.num_sampled_tokens,
            reward=trajectory.reward,
            is_trainable=trajectory.outcome.is_trainable and trajectory.num_sampled_tokens > 0,
            oldest_version=trajectory.oldest_version,
        )


@dataclass(frozen=True)
class Group:
    """The episodes delivered so far of one task, by sample index."""

    group_id: str
    group_size: int
    episodes: tuple[Episode, ...]

    @property
    def is_complete(self) -> bool:
        return len(self.episodes) == self.group_size

    @property
    def trainable(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.is_trainable)

    def lag(self, version: int) -> int:
        """Updates between `version`, being trained, and the oldest token that would take part; 0 if none would."""
        oldest = [episode.oldest_version for episode in self.trainable if episode.oldest_version is not None]
        return versions.lag(version, min(oldest)) if oldest else 0


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
    return Group(group_id, ordered[0].group_size, ordered)


@dataclass(frozen=True)
class Selection:
    """What to do before the next update: groups to train, all B of them or none, and groups to give up."""

    batch: tuple[Group, ...]
    stale: tuple[str, ...]
    failed: tuple[str, ...]


def select(
    groups: dict[str, Group],
    ready: Sequence[str],
    *,
    version: int,
    max_lag: int,
    batch_groups: int,
) -> Selection:
    """The B oldest groups that may be trained at `version`, and those that may not any more.

    A group is stale when its lag exceeds `max_lag`; an incomplete one is then given up too, since it can only grow older. It has
    failed when fewer than two of its episodes can be learnt from.

    Args: groups: those with an episode delivered. ready: ids of complete groups by the ledger's books, oldest start first; one
    that is not delivered in full yet holds back all younger ones, so that the order never depends on when pages arrive.
    """
    stale = [group_id for group_id, group in groups.items() if group.lag(version) > max_lag]
    arrived = list(_arrived(groups, [group_id for group_id in ready if group_id not in stale]))
    failed = [group.group_id for group in arrived if len(group.trainable) < MIN_TRAINABLE]
    usable = [group for group in arrived if group.group_id not in failed]
    batch = tuple(usable[:batch_groups]) if len(usable) >= batch_groups else ()
    return Selection(batch, tuple(stale), tuple(failed))


def _arrived(groups: dict[str, Group], ready: Iterable[str]) -> Iterable[Group]:
    for group_id in ready:
        group = groups.get(group_id)
        if group is None or not group.is_complete:
            return
        yield group
