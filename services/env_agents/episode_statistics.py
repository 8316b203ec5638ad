"""How an environment's recent episodes went, over all agent processes of the run."""

import datetime
from collections.abc import Sequence
from typing import Annotated, Final, cast

import msgspec
import redis.asyncio

from shared.evaluation import EpisodeStatistics, summarise
from shared.keys import Keys
from shared.trajectory import Outcome, Trajectory

WINDOW: Final = 256
"""Episodes of an environment that its statistics are of."""
MAX_DETAIL_CHARACTERS: Final = 4_000

_ADD: Final = """
-- One episode of an environment, the newest first. ARGV: environment, episode, window, problem or ''.
-- An episode that outlived its environment counts for none, so that a later one of the same name starts afresh.
local ENVIRONMENTS, RECENT, PROBLEMS = KEYS[1], KEYS[2], KEYS[3]
if redis.call('HEXISTS', ENVIRONMENTS, ARGV[1]) == 1 then
  redis.call('LPUSH', RECENT, ARGV[2])
  redis.call('LTRIM', RECENT, 0, ARGV[3] - 1)
  if ARGV[4] ~= '' then
    redis.call('HSET', PROBLEMS, ARGV[1], ARGV[4])
  end
end
"""

_episode_decoder = msgspec.json.Decoder(tuple[Outcome, float])


class EpisodeProblem(msgspec.Struct, frozen=True):
    """Why the latest episode that did not complete ended, when, and in which agent process (`host:pid`)."""

    outcome: Outcome
    detail: str
    at: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    process: str


class RecentEpisodes(msgspec.Struct, frozen=True):
    """What GET /environments shows of an environment's episodes."""

    statistics: EpisodeStatistics
    last_problem: EpisodeProblem | None


class RunStatistics:
    """The most recent episodes of each environment, in Redis: every agent process adds to them and any of them tells.

    They are there to look at: losing some with Redis loses no episode. `forget` belongs into the deletion of an environment.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, process: str) -> None:
        """Args: process: names this one in the problems it reports."""
        self._client = client
        self._keys = keys
        self._process = process
        self._add = client.register_script(_ADD)

    async def add(self, trajectory: Trajectory) -> None:
        """Counts one episode of an environment that the run still has."""
        name = trajectory.environment
        episode = msgspec.json.encode((trajectory.outcome, trajectory.reward))
        problem = b"" if trajectory.outcome is Outcome.COMPLETED else msgspec.json.encode(self._problem(trajectory))
        script_keys = [self._keys.environments, self._keys.recent_episodes(name), self._keys.last_problems]
        await self._add(keys=script_keys, args=[name, episode, WINDOW, problem])

    async def read(self, names: Sequence[str]) -> dict[str, RecentEpisodes]:
        """By environment, at one instant."""
        if not names:
            return {}
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.hmget(self._keys.last_problems, list(names))
            for name in names:
                pipeline.lrange(self._keys.recent_episodes(name), 0, -1)
            problems, *windows = cast(tuple[list[bytes | None], *tuple[list[bytes], ...]], await pipeline.execute())
        return {
            name: RecentEpisodes(
                summarise(map(_episode_decoder.decode, window)),
                None if problem is None else msgspec.json.decode(problem, type=EpisodeProblem),
            )
            for name, window, problem in zip(names, windows, problems, strict=True)
        }

    def _problem(self, trajectory: Trajectory) -> EpisodeProblem:
        return EpisodeProblem(
            outcome=trajectory.outcome,
            detail=trajectory.detail[-MAX_DETAIL_CHARACTERS:],
            at=datetime.datetime.fromtimestamp(trajectory.finished_at, datetime.UTC),
            process=self._process,
        )


def forget(pipeline: redis.asyncio.client.Pipeline, keys: Keys, name: str) -> None:
    """Removes an environment's statistics, with whatever else the caller's transaction does."""
    pipeline.delete(keys.recent_episodes(name))
    pipeline.hdel(keys.last_problems, name)
