import asyncio
import contextlib
import re

import pyarrow
import pyarrow.parquet
import pytest

from services.env_agents import evaluation
from services.env_agents.evaluation import Evaluator
from services.env_agents.registry import UnknownEnvironmentError
from shared import trajectory as trajectories
from shared.environment_spec import EnvironmentLimits, EnvironmentSpec, ParquetTasks
from shared.errors import ConfigurationError
from shared.evaluation import EvaluationRequest

QUESTION = re.compile(r"user\n(\d+) \+ (\d+)<")


@pytest.fixture
async def calculator(registry, tmp_path):
    path = tmp_path / "held_out.parquet"
    table = {"question": [f"{n} + {n}" for n in range(6)], "answer": [str(2 * n) for n in range(6)]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    spec = EnvironmentSpec(
        name="calculator",
        import_path="examples.calculator:Calculator",
        tasks=ParquetTasks(str(path)),
        evaluation_tasks=ParquetTasks(str(path)),
        limits=EnvironmentLimits(max_concurrent_episodes=2),
    )
    return await registry.register(spec)


@pytest.fixture
def holds():
    return []


@pytest.fixture
def evaluator(registry, agent, renderer, holds):
    @contextlib.asynccontextmanager
    async def hold():
        holds.append("held")
        try:
            yield
        finally:
            holds.append("released")

    return Evaluator(run_id="run", registry=registry, agent=agent, hold_rollouts=hold, decode=renderer.text)


def adds_small_numbers(text: str) -> str:
    left, right = map(int, QUESTION.findall(text)[-1])
    return f"{left + right if left < 3 else 0}<|im_end|>"


async def test_first_tasks_in_file_order_are_scored(evaluator, hub, calculator, holds, redis_client, keys):
    hub.policy, hub.version = adds_small_numbers, 5
    result = await evaluator.evaluate(EvaluationRequest(num_episodes=4, transcripts=2))
    assert result.version == 5
    statistics = result.results["calculator"]
    assert (statistics.episodes, statistics.success_rate, statistics.mean_reward) == (4, 0.75, 0.75)
    assert statistics.outcomes == {"completed": 4}
    assert [(transcript.task_id, transcript.reward) for transcript in result.transcripts] == [("0", 1.0), ("1", 1.0)]
    assert "POLICY\n2<|im_end|>" in result.transcripts[1].text
    assert holds == ["held", "released"]
    assert not redis_client.exists(keys.recent_episodes("calculator")), "evaluations are no rollouts"


async def test_no_more_tasks_are_played_than_there_are(evaluator, hub, calculator):
    assert (await evaluator.evaluate(EvaluationRequest(num_episodes=100))).results["calculator"].episodes == 6


@pytest.mark.parametrize("greedy", [True, False])
async def test_greedy_asks_for_the_most_likely_token(evaluator, hub, calculator, greedy):
    await evaluator.evaluate(EvaluationRequest(num_episodes=1, greedy=greedy))
    assert hub.requests[0]["sampling_params"]["temperature"] == (0.0 if greedy else 1.0)


async def test_environments_without_held_out_tasks_are_left_out_unless_named(evaluator, registry, calculator, make_spec):
    await registry.register(make_spec("other"))
    assert set((await evaluator.evaluate(EvaluationRequest(num_episodes=1))).results) == {"calculator"}
    with pytest.raises(ConfigurationError, match="only environments with evaluation_tasks can be evaluated; other has none"):
        await evaluator.evaluate(EvaluationRequest(num_episodes=1, environments=("other",)))
    with pytest.raises(UnknownEnvironmentError, match="did you mean 'calculator'"):
        await evaluator.evaluate(EvaluationRequest(num_episodes=1, environments=("calculater",)))


async def test_whoever_stops_listening_ends_what_still_plays(evaluator, hub, calculator, holds):
    asked, answering = asyncio.Event(), asyncio.Event()

    async def answer(text: str) -> str:
        if "0 + 0" not in text:
            asked.set()
            await answering.wait()
        return "0<|im_end|>"

    hub.policy = answer
    request = EvaluationRequest(num_episodes=6)
    lines = evaluator.lines(evaluator.plan(request), request)
    assert (await anext(lines)).num_episodes == {"calculator": 6}
    assert trajectories.decode((await anext(lines)).trajectory).task_id == "0"
    await asked.wait()
    await lines.aclose()
    assert holds == ["held", "released"]
    assert calculator.slots.num_claimed == 0
    answering.set()


async def test_whoever_reads_slowly_holds_up_new_episodes(evaluator, hub, calculator, monkeypatch):
    monkeypatch.setattr(evaluation, "_MAX_UNREAD", 1)
    request = EvaluationRequest(num_episodes=6)
    async with contextlib.aclosing(evaluator.lines(evaluator.plan(request), request)) as lines:
        await anext(lines)
        await anext(lines)
        async with asyncio.timeout(60):
            while len(hub.requests) < 4:  # noqa: ASYNC110 - what it waits for is on the other side of a socket
                await asyncio.sleep(0)
        for _ in range(500):
            await asyncio.sleep(0)
        assert len(hub.requests) == 4, "one is read, one waits to be, and two keep the places"
        assert len([line async for line in lines]) == 5


async def test_evaluation_that_cannot_begin_is_no_end_without_a_word(registry, agent, renderer, calculator):
    @contextlib.asynccontextmanager
    async def refuse():
        raise ConnectionError("Redis is away")
        yield

    evaluator = Evaluator(run_id="run", registry=registry, agent=agent, hold_rollouts=refuse, decode=renderer.text)
    request = EvaluationRequest(num_episodes=1)
    with pytest.raises(ConnectionError, match="Redis is away"):
        [line async for line in evaluator.lines(evaluator.plan(request), request)]
