"""Evaluations: held-out tasks on the weights in force, outside the ledger."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from services.env_agents.episode import EnvironmentAgent
from services.env_agents.episode_log import EpisodeIdentity
from services.env_agents.episode_statistics import EpisodeStatistics, summarise
from services.env_agents.holds import Hold
from services.env_agents.identifiers import uuid7
from services.env_agents.registry import EnvironmentRegistry, RegisteredEnvironment
from services.env_agents.tasks import Task
from services.env_agents.transcript import transcript
from shared.environment_spec import PositiveInt
from shared.errors import ConfigurationError
from shared.trajectory import Outcome, Trajectory


class EvaluationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /evaluations`: the first `num_episodes` held-out tasks of each environment, in file order."""

    num_episodes: PositiveInt
    greedy: bool = False
    """At the most likely token instead of the environment's own sampling."""
    environments: tuple[str, ...] | None = None
    """None means every environment that has evaluation_tasks."""
    transcripts: int = 0
    """Texts to return, of each environment's first tasks."""


class Transcript(msgspec.Struct, frozen=True):
    environment: str
    task_id: str
    reward: float
    outcome: Outcome
    text: str


class EvaluationResult(msgspec.Struct, frozen=True):
    version: int
    """The newest policy version that sampled; 0 if nothing was sampled."""
    results: Mapping[str, EpisodeStatistics]
    transcripts: Sequence[Transcript]


class Evaluator:
    """Plays held-out tasks through the same agent as rollouts, while new rollouts wait in every process of the run."""

    def __init__(
        self,
        *,
        run_id: str,
        registry: EnvironmentRegistry,
        agent: EnvironmentAgent,
        hold_rollouts: Hold,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._run_id = run_id
        self._registry = registry
        self._agent = agent
        self._hold_rollouts = hold_rollouts
        self._decode = decode

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResult:
        """Raises: UnknownEnvironmentError; ConfigurationError if an environment that was named has no evaluation_tasks."""
        environments = self._chosen(request.environments)
        async with self._hold_rollouts(), asyncio.TaskGroup() as group:
            playing = {
                name: [group.create_task(self._play(environment, task, request)) for task in _tasks(environment, request)]
                for name, environment in environments.items()
            }
        trajectories_by_name = {name: [task.result() for task in tasks] for name, tasks in playing.items()}
        everything = [trajectory for trajectories in trajectories_by_name.values() for trajectory in trajectories]
        return EvaluationResult(
            version=max((span.version for trajectory in everything for span in trajectory.version_spans), default=0),
            results={
                name: summarise([(trajectory.outcome, trajectory.reward) for trajectory in trajectories])
                for name, trajectories in trajectories_by_name.items()
            },
            transcripts=[
                self._transcript(trajectory)
                for trajectories in trajectories_by_name.values()
                for trajectory in trajectories[: request.transcripts]
            ],
        )

    def _chosen(self, names: Sequence[str] | None) -> dict[str, RegisteredEnvironment]:
        if names is None:
            environments = self._registry.environments
            return {name: entry for name, entry in environments.items() if entry.loaded.evaluation_tasks is not None}
        chosen = {name: self._registry.get(name) for name in names}
        if lacking := [name for name, entry in chosen.items() if entry.loaded.evaluation_tasks is None]:
            raise ConfigurationError(f"only environments with evaluation_tasks can be evaluated; {', '.join(lacking)} has none")
        return chosen

    async def _play(self, environment: RegisteredEnvironment, task: Task, request: EvaluationRequest) -> Trajectory:
        identity = EpisodeIdentity(
            run_id=self._run_id,
            trajectory_id=uuid7(),
            group_id="evaluation",
            group_size=1,
            sample_index=0,
            attempt=0,
            environment=environment.spec.name,
            task_id=task.task_id,
        )
        loaded = environment.loaded
        async with environment.slots:
            return await self._agent.run(
                loaded.create, loaded.spec, task, identity, reward=loaded.reward, is_greedy=request.greedy, is_validation=True
            )

    def _transcript(self, trajectory: Trajectory) -> Transcript:
        text = transcript(trajectory, self._decode)
        return Transcript(trajectory.environment, trajectory.task_id, trajectory.reward, trajectory.outcome, text)


def _tasks(environment: RegisteredEnvironment, request: EvaluationRequest) -> list[Task]:
    source = environment.loaded.evaluation_tasks
    assert source is not None
    return [source.task(index) for index in range(min(request.num_episodes, source.count))]
