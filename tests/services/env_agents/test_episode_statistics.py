import datetime

import pytest
from msgspec.structs import replace

from services.env_agents.episode_statistics import WINDOW, RunStatistics
from shared.evaluation import EpisodeStatistics
from shared.trajectory import Outcome
from tests.shared.episodes import admitted_group, finished_episode

NOON = datetime.datetime(2026, 2, 3, 12, tzinfo=datetime.UTC)


def episode(environment="calculator", *, reward=0.0, outcome=Outcome.COMPLETED, detail=""):
    group = admitted_group(environment)
    fields = {"reward": reward, "outcome": outcome, "detail": detail, "finished_at": NOON.timestamp()}
    return replace(finished_episode(group, 0), **fields)


@pytest.fixture
def one(redis_async, keys):
    return RunStatistics(redis_async, keys, process="host-1:7")


@pytest.fixture
def two(redis_async, keys):
    return RunStatistics(redis_async, keys, process="host-2:7")


@pytest.fixture(autouse=True)
async def environments(registry, make_spec):
    for name in ("calculator", "lookup"):
        await registry.register(make_spec(name))


async def statistics(process, name="calculator"):
    return (await process.read([name]))[name].statistics


async def test_every_process_tells_what_all_of_them_saw(one, two):
    await one.add(episode(reward=1.0))
    await two.add(episode(reward=0.5))
    await two.add(episode(reward=-0.25, outcome=Outcome.TIMEOUT))
    await two.add(episode("lookup", reward=1.0))
    expected = EpisodeStatistics(3, 1 / 3, 1.25 / 3, {Outcome.COMPLETED: 2, Outcome.TIMEOUT: 1})
    assert await statistics(one) == await statistics(two) == expected
    assert (await one.read(["lookup", "calculator"]))["lookup"].statistics.success_rate == 1.0


async def test_an_environment_without_episodes_has_no_rates(one):
    assert await statistics(one) == EpisodeStatistics(0, None, None, {})
    assert await one.read([]) == {}


async def test_only_the_most_recent_episodes_count(one, redis_client, keys):
    for index in range(WINDOW + 10):
        await one.add(episode(reward=float(index >= 10)))
    assert await statistics(one) == EpisodeStatistics(WINDOW, 1.0, 1.0, {Outcome.COMPLETED: WINDOW})
    assert redis_client.llen(keys.recent_episodes("calculator")) == WINDOW


async def test_the_last_problem_says_what_when_and_where_until_the_next_one(one, two):
    await one.add(episode(outcome=Outcome.TIMEOUT, detail="reset took longer than 60 s"))
    await two.add(episode(outcome=Outcome.ENVIRONMENT_ERROR, detail="KeyError: 'no such row'"))
    await one.add(episode(reward=1.0))
    problem = (await one.read(["calculator"]))["calculator"].last_problem
    assert (problem.outcome, problem.detail) == (Outcome.ENVIRONMENT_ERROR, "KeyError: 'no such row'")
    assert (problem.at, problem.process) == (NOON, "host-2:7")


async def test_statistics_end_with_their_environment_and_a_new_one_of_its_name_has_none(
    one, registry, make_spec, redis_client, keys
):
    await one.add(episode(outcome=Outcome.TIMEOUT))
    await one.add(episode("lookup", outcome=Outcome.TIMEOUT))
    await registry.delete("calculator")
    await one.add(episode(outcome=Outcome.TIMEOUT))
    assert not redis_client.exists(keys.recent_episodes("calculator")), "an episode that outlived its environment"
    assert redis_client.hkeys(keys.last_problems) == [b"lookup"]
    await registry.register(make_spec("calculator"))
    recent = await one.read(["calculator", "lookup"])
    assert (recent["calculator"].statistics.episodes, recent["calculator"].last_problem) == (0, None)
    assert recent["lookup"].statistics.episodes == 1


async def test_a_change_of_the_spec_keeps_them(one, registry):
    await one.add(episode(reward=1.0))
    await registry.patch("calculator", {"weight": 2.0})
    assert (await statistics(one)).episodes == 1
