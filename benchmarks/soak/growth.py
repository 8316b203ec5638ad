"""What grew between the end of the warm-up and the end. Pure."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.soak.sampling import Sample
from shared.configuration import RolloutSection

WINDOW = 0.2
"""Share of the samples after the warm-up that each end is the median of."""
MAX_GROWTH = 0.05
MIN_GROWTH_MB = 1.0
"""Less is what lies in Redis at one moment or another."""
MAX_MORE = {"num_files": 4, "num_connections": 4, "num_threads": 4, "num_tasks": 4}
"""What may be more at the last rest than at the first. A pool of Redis's connections keeps as many as were ever busy at once."""
FIELDS_OF_A_GROUP = 2
"""In `finished`, beside one for each episode."""
NUM_CLIENTS = 4
"""Of Redis: hub, trainer and two agent processes, each of which may have so many more connections to it."""


@dataclass(frozen=True)
class Growth:
    """Of one quantity, between two moments or the medians of two stretches."""

    part: str
    quantity: str
    first: float
    last: float

    @property
    def share(self) -> float:
        return self.last / self.first - 1 if self.first else 0.0


def after_warm_up(samples: Sequence[Sample], warm_up_s: float) -> list[Sample]:
    return [sample for sample in samples if sample.at_s >= warm_up_s]


def growth(samples: Sequence[Sample], part: str, quantity: str) -> Growth | None:
    """Between the medians of the first and the last fifth; None where the part does not tell it. Args: samples: at least one."""
    return _between(samples, part, quantity, lambda sample: getattr(sample.processes[part], quantity))


def redis_growth(samples: Sequence[Sample]) -> Growth | None:
    return _between(samples, "redis", "used_memory_mb", lambda sample: sample.redis_memory_mb)


def all_growth(samples: Sequence[Sample], rests: tuple[Sample, Sample]) -> list[Growth]:
    """Of memory under load, and of what follows the load between two rests. Args: samples: after the warm-up."""
    parts = sorted(samples[0].processes)
    memory = [*(growth(samples, part, "rss_mb") for part in parts), redis_growth(samples)]
    counts = [growth(rests, part, quantity) for part in parts for quantity in MAX_MORE]
    return [one for one in [*memory, *counts] if one is not None]


def leaked(growths: Sequence[Growth]) -> list[Growth]:
    """What grew by more than it may."""
    return [one for one in growths if _is_leak(one)]


def _is_leak(one: Growth) -> bool:
    more = one.last - one.first
    if one.quantity in MAX_MORE:
        return more > MAX_MORE[one.quantity] * (NUM_CLIENTS if one.part == "redis" else 1)
    return one.share > MAX_GROWTH and more > MIN_GROWTH_MB


def leaked_keys(at_rest: Sample, rollout: RolloutSection, *, num_live_groups: int, num_environments: int) -> list[str]:
    """Keys with more entries than they need when no group runs. Args: num_live_groups: ready and unsaved."""
    group_size = rollout.num_return_sequences_in_group
    bounds = {
        "requeued": math.floor((1 + rollout.async_generation_ratio) * rollout.rollout_batch_size),
        "trajectories": group_size * num_live_groups,
        "finished": (group_size + FIELDS_OF_A_GROUP) * num_live_groups,
        "running": 0,
        "owners": 0,
        "holds": 0,
        "dead_letters": 0,
        "ready": num_live_groups,
        "unsaved": num_live_groups,
        "groups": num_live_groups,
        "cursors": num_environments,
        "environments": num_environments,
        "last_problems": num_environments,
    }
    return [
        f"{name} has {at_rest.sizes[name]}, at most {bound} are needed"
        for name, bound in bounds.items()
        if at_rest.sizes.get(name, 0) > bound
    ]


def unknown_keys(at_rest: Sample, known: Sequence[str]) -> list[str]:
    """Keys that shared/keys.py does not know."""
    return [name for name in at_rest.sizes if name.partition(":")[0] not in known]


def _between(samples: Sequence[Sample], part: str, quantity: str, value: Callable[[Sample], float | None]) -> Growth | None:
    values = [found for sample in samples if part in sample.processes and (found := value(sample)) is not None]
    if not values:
        return None
    count = max(1, int(WINDOW * len(values)))
    return Growth(part, quantity, statistics.median(values[:count]), statistics.median(values[-count:]))
