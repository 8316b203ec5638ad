"""Evaluations: held-out tasks on the weights in force, outside the ledger."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

from services.env_agents.cancelling import cancel_all
from services.env_agents.episode import EnvironmentAgent
from services.env_agents.episode_log import EpisodeIdentity
from services.env_agents.holds import Hold
from services.env_agents.identifiers import uuid7
from services.env_agents.registry import EnvironmentRegistry, RegisteredEnvironment
from services.env_agents.tasks import Task
from services.env_agents.transcript import transcript
from shared import trajectory as trajectories
from shared.errors import ConfigurationError
from shared.evaluation import EvaluationLine, EvaluationRequest, EvaluationResult, Transcript, summarise
from shared.trajectory import Trajectory

_MAX_UNREAD = 64
"""Episodes that have ended and wait for a slow reader; beyond that they keep their places."""

Tell = Callable[[Trajectory], Awaitable[None]]
Plan = Mapping[str, tuple[RegisteredEnvironment, list[Task]]]


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
        """Answers when all episodes have ended. Raises: as `plan`."""
        plan = self.plan(request)
        episodes_by_name = await self._play_all(plan, request, _ignore)
        everything = [trajectory for episodes in episodes_by_name.values() for trajectory in episodes]
        return EvaluationResult(
            version=max((span.version for trajectory in everything for span in trajectory.version_spans), default=0),
            results={
                name: summarise([(trajectory.outcome, trajectory.reward) for trajectory in episodes])
                for name, episodes in episodes_by_name.items()
            },
            transcripts=[
                self._transcript(trajectory)
                for episodes in episodes_by_name.values()
                for trajectory in episodes[: request.transcripts]
            ],
        )

    async def lines(self, plan: Plan, request: EvaluationRequest) -> AsyncGenerator[EvaluationLine, None]:
        """The plan's size, then each episode as it ends. Whoever stops listening ends what still plays."""
        yield EvaluationLine(num_episodes={name: len(tasks) for name, (_, tasks) in plan.items()})
        ended: asyncio.Queue[Trajectory | None] = asyncio.Queue(_MAX_UNREAD)
        playing = asyncio.create_task(self._play_until_read(plan, request, ended))
        try:
            while (trajectory := await ended.get()) is not None:
                yield EvaluationLine(trajectory=trajectories.encode(trajectory))
        finally:
            await cancel_all([playing])
        await playing

    def plan(self, request: EvaluationRequest) -> Plan:
        """The environments with the tasks to play.

        Raises: UnknownEnvironmentError; ConfigurationError if an environment that was named has no evaluation_tasks.
        """
        return {name: (entry, _tasks(entry, request)) for name, entry in self._chosen(request.environments).items()}

    async def _play_until_read(self, plan: Plan, request: EvaluationRequest, ended: "asyncio.Queue[Trajectory | None]") -> None:
        try:
            await self._play_all(plan, request, ended.put)
        except Exception:
            await ended.put(None)
            raise
        await ended.put(None)

    async def _play_all(self, plan: Plan, request: EvaluationRequest, tell: Tell) -> dict[str, list[Trajectory]]:
        async with self._hold_rollouts(), asyncio.TaskGroup() as group:
            playing = {
                name: [group.create_task(self._play(environment, task, request, tell)) for task in tasks]
                for name, (environment, tasks) in plan.items()
            }
        return {name: [task.result() for task in tasks] for name, tasks in playing.items()}

    def _chosen(self, names: Sequence[str] | None) -> dict[str, RegisteredEnvironment]:
        if names is None:
            environments = self._registry.environments
            return {name: entry for name, entry in environments.items() if entry.loaded.evaluation_tasks is not None}
        chosen = {name: self._registry.get(name) for name in names}
        if lacking := [name for name, entry in chosen.items() if entry.loaded.evaluation_tasks is None]:
            raise ConfigurationError(f"only environments with evaluation_tasks can be evaluated; {', '.join(lacking)} has none")
        return chosen

    async def _play(self, environment: RegisteredEnvironment, task: Task, request: EvaluationRequest, tell: Tell) -> Trajectory:
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
            trajectory = await self._agent.run(
                loaded.create, loaded.spec, task, identity, reward=loaded.reward, is_greedy=request.greedy, is_validation=True
            )
            await tell(trajectory)
        return trajectory

    def _transcript(self, trajectory: Trajectory) -> Transcript:
        text = transcript(trajectory, self._decode)
        return Transcript(trajectory.environment, trajectory.task_id, trajectory.reward, trajectory.outcome, text)


def _tasks(environment: RegisteredEnvironment, request: EvaluationRequest) -> list[Task]:
    source = environment.loaded.evaluation_tasks
    assert source is not None
    return [source.task(index) for index in range(min(request.num_episodes, source.count))]


async def _ignore(_: Trajectory) -> None:
    """For who needs the episodes only when all have ended."""
