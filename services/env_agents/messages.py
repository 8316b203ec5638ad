"""Bodies of the HTTP interface's answers. What it is asked with are EnvironmentSpec and EvaluationRequest."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from services.env_agents.datasets import DatasetCounts
from services.env_agents.episode_statistics import EpisodeProblem, RecentEpisodes
from services.env_agents.registry import RegisteredEnvironment
from shared import versions
from shared.environment_spec import EnvironmentSpec
from shared.evaluation import EpisodeStatistics
from shared.ledger import Books
from shared.pipeline import PipelineReport


class EnvironmentDescription(EnvironmentSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A registered environment, and how its recent episodes went in all agent processes of the run."""

    statistics: EpisodeStatistics
    last_problem: EpisodeProblem | None
    dataset: DatasetCounts | None
    """What this process found in the dataset of `tasks`; null where tasks are seeds."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The run's books, and who plays its episodes."""

    books: Books
    is_balanced: bool
    """started = running + ready + trained + discarded."""
    pipeline: PipelineReport | None
    """How the run's parts kept each other busy, and what would help; null until the pipeline was full for an update."""
    processes: Mapping[str, int]
    """Agent processes that live (`host:pid`), and the episodes that each has to finish."""
    process: str
    """The one that answers."""
    episodes_in_flight: int
    """Of the process that answers, as are the episodes by environment."""
    episodes_by_environment: Mapping[str, int]


class RolloutDescription(msgspec.Struct, frozen=True, kw_only=True):
    """How far generation may run ahead of training, in force for every process of the run."""

    async_generation_ratio: float
    """α."""
    ratio_in_force: float
    """What admission uses: α, or 0 while the run has fallen back to synchronous."""
    max_lag: int
    """⌈α⌉: the oldest that a trained token may be, in updates."""
    rollout_batch_size: int
    """B, groups consumed by one update."""
    version: int
    """Updates published."""
    groups_in_flight: int
    """Running and ready ones; admission gives places up to (1 + α) · B."""


class RolloutChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`PATCH /rollout`."""

    async_generation_ratio: Annotated[float, msgspec.Meta(ge=0)]
    """α from now on, for admission and for what the trainer takes for stale. It stays until a run file says another one."""


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was refused."""

    detail: str
    """A sentence with the rule, the value that breaks it, and the remedy."""


def describe(environment: RegisteredEnvironment, recent: RecentEpisodes) -> EnvironmentDescription:
    fields = msgspec.structs.asdict(environment.spec)
    return EnvironmentDescription(
        **fields, statistics=recent.statistics, last_problem=recent.last_problem, dataset=environment.loaded.dataset
    )


def describe_rollout(books: Books) -> RolloutDescription:
    return RolloutDescription(
        async_generation_ratio=books.async_generation_ratio,
        ratio_in_force=books.ratio_in_force,
        max_lag=versions.max_lag(books.async_generation_ratio),
        rollout_batch_size=books.batch_groups,
        version=books.version,
        groups_in_flight=books.running + books.ready,
    )
