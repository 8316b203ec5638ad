import asyncio
import functools
import threading
import time

import pytest

from services.env_agents.environment import Environment, Step, Task, tool
from services.env_agents.environment_threads import EnvironmentThreads, ThreadedEnvironment
from shared.environment_spec import StartRetries
from shared.loop_lag import watch_loop_lag
from shared.trajectory import Outcome

TASK = Task(task_id="0", seed=0, data={})
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call><|im_end|>'


@pytest.fixture
def threads():
    return EnvironmentThreads(limit=2)


@pytest.fixture
def play(agent, make_spec, identity, threads):
    async def play(create, **limits):
        limits = {"start_retries": StartRetries(timeout=0), **limits}
        return await agent.run(functools.partial(ThreadedEnvironment, create, threads), make_spec(**limits), TASK, identity)

    return play


async def test_an_episode_is_the_same_in_a_thread(play, question_environment, hub):
    loops = set()

    class Doubling(question_environment):
        async def open(self):
            loops.add((threading.get_ident(), asyncio.get_running_loop()))

        async def score(self, answer):
            loops.add((threading.get_ident(), asyncio.get_running_loop()))
            return await super().score(answer)

        @tool
        async def double(self, number: int) -> int:
            """Doubles."""
            loops.add((threading.get_ident(), asyncio.get_running_loop()))
            return 2 * number

        def state(self):
            return "always the same"

        async def close(self):
            loops.add((threading.get_ident(), asyncio.get_running_loop()))
            await super().close()

    hub.policy = lambda text: "42<|im_end|>" if "<tool_response>\n42" in text else CALL
    record = await play(Doubling)
    assert (record.outcome, record.reward) == (Outcome.COMPLETED, 1.0)
    assert [[call.name for call in turn.tool_calls] for turn in record.turns] == [["double"], []]
    assert record.turns[0].state_fingerprint == record.turns[1].state_fingerprint
    [(thread, _)] = loops
    assert thread != threading.get_ident()


async def test_environment_that_blocks_does_not_hold_up_the_loop(play, question_environment):
    class Blocking(question_environment):
        async def reset(self, task):
            time.sleep(0.5)  # noqa: ASYNC251 - what must not matter
            return await super().reset(task)

    lags = []
    watching = asyncio.create_task(watch_loop_lag(lags.append, interval_s=0.01))
    assert (await play(Blocking)).reward == 1.0
    watching.cancel()
    assert len(lags) > 5, "the loop went on meanwhile"


async def test_deadline_holds_though_the_thread_is_blocked_and_the_place_comes_back_later(play, question_environment, threads):
    may_end = threading.Event()

    class Stuck(question_environment):
        async def reset(self, task):
            may_end.wait(20)
            return await super().reset(task)

    playing = asyncio.create_task(play(Stuck, reset_timeout_s=0.05))
    while not threads._workers:  # noqa: ASYNC110 - nobody says so
        await asyncio.sleep(0.01)
    [stuck] = threads._workers
    other = threads.take()
    assert other is not stuck, "a new environment stays away from it"
    threads.give_back(other)
    await asyncio.sleep(0.1)
    may_end.set()
    record = await playing
    assert (record.outcome, record.detail) == (Outcome.TIMEOUT, "reset took longer than 0.05 s")
    assert stuck.num_environments == 0


@pytest.mark.parametrize("error", [KeyError("no such row"), SystemExit(3)])
async def test_environment_that_raises_in_a_thread_is_an_outcome(play, question_environment, threads, error):
    class Broken(question_environment):
        async def score(self, answer):
            raise error

    record = await play(Broken)
    assert record.outcome is Outcome.ENVIRONMENT_ERROR
    assert "no such row" in record.detail or "called sys.exit(3)" in record.detail
    assert (await play(question_environment)).reward == 1.0, "the thread goes on"


async def test_constructor_runs_in_the_thread_and_may_fail(play, threads):
    def create() -> Environment:
        raise OSError(f"in {threading.current_thread().name}")

    assert "OSError: in environment-loop-0" in (await play(create)).detail
    assert threads._workers[0].num_environments == 0


async def test_cancelled_episode_closes_its_environment(play, question_environment):
    in_step = threading.Event()

    class Waiting(question_environment):
        async def step(self, action):
            in_step.set()
            await asyncio.Event().wait()
            return Step(done=True)

    playing = asyncio.create_task(play(Waiting))
    await asyncio.to_thread(in_step.wait, 20)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert Waiting.num_open == 0


def test_threads_are_shared_when_there_are_no_more(threads):
    first, second, third = (threads.take() for _ in range(3))
    assert first is not second
    assert third is first
    threads.give_back(second)
    assert threads.take() is second
