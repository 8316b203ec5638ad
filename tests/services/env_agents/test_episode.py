import asyncio

import aiohttp
import numpy as np
import pytest

from services.env_agents.environment import Environment, Step, Task, tool
from shared import trajectory as trajectories
from shared.environment_spec import StartRetries
from shared.trajectory import Outcome, ToolCall

TASK = Task(task_id="0", seed=0, data={})
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call><|im_end|>'


@pytest.fixture
def play(agent, make_spec, identity):
    async def play(create, *, is_greedy=False, **limits):
        return await agent.run(create, make_spec(**limits), TASK, identity, is_greedy=is_greedy)

    return play


@pytest.fixture
def doubling(question_environment):
    class Doubling(question_environment):
        @tool
        async def double(self, number: int) -> int:
            """Doubles."""
            return 2 * number

    yield Doubling
    assert Doubling.num_open == 0


def calls_then_answers(text: str) -> str:
    return "42<|im_end|>" if "<tool_response>" in text else CALL


async def test_tool_call_result_and_answer_become_one_trajectory(hub, play, doubling, renderer):
    hub.policy, hub.version = calls_then_answers, 3
    record = await play(doubling)
    assert (record.outcome, record.reward, record.detail) == (Outcome.COMPLETED, 1.0, "")
    assert [[call.name for call in turn.tool_calls] for turn in record.turns] == [["double"], []]
    sampled = [renderer.text(record.token_ids[turn.start : turn.end]) for turn in record.turns]
    assert sampled == [CALL, "42<|im_end|>"]
    between = renderer.text(record.token_ids[record.turns[0].end : record.turns[1].start])
    assert between == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert record.num_sampled_tokens == sum(turn.end - turn.start for turn in record.turns)
    assert set(record.token_versions[record.loss_mask == 1].tolist()) == {3}


async def test_every_request_continues_the_tokens_of_the_one_before(hub, play, doubling):
    hub.policy = calls_then_answers
    record = await play(doubling)
    first, second = (request["input_ids"] for request in hub.requests)
    assert second[: len(first)] == first
    assert second == record.token_ids[: record.turns[1].start].tolist()
    assert hub.session_ids == [record.trajectory_id] * 2


async def test_malformed_call_is_an_observation_that_the_policy_sees(hub, play, doubling):
    hub.policy = lambda text: "42<|im_end|>" if "error: the tool call is not JSON" in text else "<tool_call>{</tool_call><|im_end|>"
    record = await play(doubling)
    assert (record.outcome, record.reward) == (Outcome.COMPLETED, 1.0)
    assert record.turns[0].tool_calls[0].is_error


async def test_time_is_accounted_for(hub, play, doubling):
    hub.policy = calls_then_answers
    timings = (await play(doubling)).timings
    assert timings.generating_s > 0
    assert timings.environment_s > 0
    assert timings.reward_s > 0


@pytest.mark.parametrize(
    ("limits", "detail"),
    [({"max_turns": 2}, "limits.max_turns = 2"), ({"max_tokens": 700}, "limits.max_tokens = 700"), ({"max_tokens": 560}, "cut at")],
)
async def test_limits_truncate_and_are_never_passed(hub, play, doubling, limits, detail):
    hub.policy = lambda _: CALL
    record = await play(doubling, **limits)
    assert record.outcome is Outcome.TRUNCATED
    assert detail in record.detail
    assert record.num_tokens <= limits.get("max_tokens", 10_000)
    assert len(record.turns) <= limits.get("max_turns", 8)


async def test_a_truncated_episode_has_what_its_turns_gave_and_what_truncation_is_worth(hub, play, doubling):
    hub.policy = lambda _: CALL
    before = await play(doubling, max_turns=2)
    assert (before.outcome, before.reward, before.reward_parts, before.is_trainable) == (Outcome.TRUNCATED, 0.0, {}, True)
    record = await play(doubling, max_turns=2, truncation_reward=-0.5)
    assert (record.reward, record.reward_parts, record.is_trainable) == (-0.5, {"truncation": -0.5}, True)
    assert [turn.reward for turn in record.turns] == [0.0, -0.5]


async def test_a_turn_that_was_not_answered_in_time_is_worth_what_the_spec_says(play, question_environment):
    hanging = misbehaving(question_environment, "step", hangs)
    excluded = await play(hanging, step_timeout_s=0.05)
    assert (excluded.outcome, excluded.is_trainable) == (Outcome.TIMEOUT, False)
    record = await play(hanging, step_timeout_s=0.05, timeout_reward=-1.0)
    assert (record.outcome, record.reward, record.reward_parts) == (Outcome.TIMEOUT, -1.0, {"timeout": -1.0})
    assert record.is_trainable
    other = await play(hanging, episode_timeout_s=0.5, timeout_reward=-1.0)
    assert (other.outcome, other.is_trainable) == (Outcome.TIMEOUT, False), "the whole episode's deadline is no turn's"


async def test_prompt_over_the_limit_teaches_nothing(play, doubling):
    record = await play(doubling, max_tokens=10)
    assert record.outcome is Outcome.ENVIRONMENT_ERROR
    assert "the prompt must leave room in limits.max_tokens = 10" in record.detail
    assert record.num_tokens == 0


async def test_unfinished_thought_truncates(hub, play, doubling):
    hub.policy = lambda _: "<think>so<|im_end|>"

    class Patient(doubling):
        async def step(self, action):
            return Step(messages=[{"role": "user", "content": "go on"}])

    record = await play(Patient)
    assert record.outcome is Outcome.TRUNCATED
    assert "without changing its tokens" in record.detail


def misbehaving(base, where, what):
    """An environment that does `what` in the method `where`."""

    class Misbehaving(base):
        pass

    async def method(self, *_):
        return await what()

    setattr(Misbehaving, where, method)
    return Misbehaving


async def raises():
    raise KeyError("no such row")


async def raises_timeout():
    raise TimeoutError("its own")


async def awaits_something_cancelled():
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    await cancelled


async def exits():
    raise SystemExit(3)


async def hangs():
    await asyncio.Event().wait()


@pytest.mark.parametrize("where", ["open", "reset", "step", "score"])
@pytest.mark.parametrize(
    ("what", "detail"),
    [
        (raises, "KeyError: 'no such row'"),
        (raises_timeout, "TimeoutError: its own"),
        (awaits_something_cancelled, "CancelledError"),
        (exits, "SystemExit: 3"),
    ],
)
async def test_environment_that_raises_is_an_outcome_with_its_traceback(play, question_environment, where, what, detail):
    record = await play(misbehaving(question_environment, where, what))
    assert record.outcome is Outcome.ENVIRONMENT_ERROR
    assert not record.outcome.is_trainable
    assert detail in record.detail
    assert "test_episode.py" in record.detail


@pytest.mark.parametrize(
    ("where", "limits", "detail"),
    [
        ("reset", {"reset_timeout_s": 0.05}, "reset took longer than 0.05 s"),
        ("step", {"step_timeout_s": 0.05}, "a step took longer than 0.05 s"),
        ("score", {"score_timeout_s": 0.05}, "the score took longer than 0.05 s"),
        ("open", {"open_timeout_s": 0.05}, "open took longer than 0.05 s"),
        ("open", {"episode_timeout_s": 0.05}, "the episode took longer than 0.05 s"),
        ("step", {"episode_timeout_s": 0.5}, "the episode took longer than 0.5 s"),
    ],
)
async def test_environment_that_hangs_times_out(play, question_environment, where, limits, detail):
    limits = {"start_retries": StartRetries(timeout=0), **limits}
    record = await play(misbehaving(question_environment, where, hangs), **limits)
    assert (record.outcome, record.detail) == (Outcome.TIMEOUT, detail)


@pytest.mark.parametrize(
    ("where", "answer"),
    [
        ("reset", "hello"),
        ("reset", [{"role": "wizard", "content": "x"}]),
        ("reset", [{"role": "user", "content": 3}]),
        ("reset", []),
        ("step", None),
        ("step", (1, 2)),
        ("step", Step(messages=[])),
        ("step", Step(messages=["go on"])),
        ("step", Step(done=True, reward=float("nan"))),
        ("step", Step(done=True, reward="much")),
        ("step", Step(done=True, reward_parts={"format": None})),
        ("step", Step(done=True, tool_calls=("calculate",))),
        ("step", Step(done=True, tool_calls=(ToolCall("calculate", {}, 0.0, False),))),
        ("score", None),
    ],
)
async def test_environment_that_answers_nonsense_is_an_outcome(play, question_environment, where, answer):
    async def nonsense():
        return answer

    record = await play(misbehaving(question_environment, where, nonsense))
    assert record.outcome is Outcome.ENVIRONMENT_ERROR
    assert record.detail


async def test_rewards_of_other_number_types_are_taken(play, question_environment):
    async def reward():
        return np.float32(0.5)

    assert (await play(misbehaving(question_environment, "score", reward))).reward == 0.5


async def test_a_record_of_any_numbers_can_be_written(play, question_environment):
    async def step():
        return Step(done=True, reward=np.float64(1), reward_parts={"format": np.float32(0.5)}, reward_s=np.float64(0.1))

    record = await play(misbehaving(question_environment, "step", step))
    assert trajectories.decode(trajectories.encode(record)) == record
    assert record.reward_parts == {"format": 0.5}


async def test_constructor_that_raises_is_an_outcome(play):
    def create() -> Environment:
        raise OSError("no disk")

    assert "no disk" in (await play(create)).detail


class TestStart:
    """What happens before the policy's first turn may be tried again, each problem as often as its retries allow."""

    @pytest.fixture(autouse=True)
    def no_waiting(self, monkeypatch):
        monkeypatch.setattr("services.env_agents.retries._FIRST_WAIT_S", 0.0)

    @pytest.fixture
    def start(self, play, question_environment):
        """One episode of an environment that fails `num_failures` times in `where`; and how many environments were made."""

        async def start(where, error, num_failures, **limits):
            made = []

            class Failing(question_environment):
                def __init__(self):
                    super().__init__()
                    made.append(self)

            async def method(self, *arguments):
                if len(made) <= num_failures:
                    await error() if callable(error) else None
                    raise error
                return await getattr(question_environment, where)(self, *arguments)

            setattr(Failing, where, method)
            return await play(Failing, **limits), len(made)

        return start

    @pytest.mark.parametrize("where", ["open", "reset"])
    @pytest.mark.parametrize(
        ("error", "allowed"),
        [
            (ConnectionResetError("gone"), StartRetries(unreachable=2)),
            (aiohttp.ServerDisconnectedError(), StartRetries(unreachable=2)),
            (KeyError("no such row"), StartRetries(error=2)),
            (hangs, StartRetries(timeout=2)),
        ],
    )
    async def test_each_problem_has_retries_of_its_own(self, start, where, error, allowed):
        limits = {"open_timeout_s": 0.05, "reset_timeout_s": 0.05, "start_retries": allowed}
        record, num_made = await start(where, error, 2, **limits)
        assert (record.outcome, record.reward, num_made) == (Outcome.COMPLETED, 1.0, 3)
        none = StartRetries(timeout=0, unreachable=0, error=0)
        record, num_made = await start(where, error, 1, **{**limits, "start_retries": none})
        assert (record.outcome is Outcome.COMPLETED, num_made) == (False, 1)

    async def test_retries_that_are_used_up_leave_the_last_problem(self, start):
        record, num_made = await start("reset", ConnectionResetError("gone"), 9, start_retries=StartRetries(unreachable=3))
        assert (record.outcome, num_made) == (Outcome.ENVIRONMENT_ERROR, 4)
        assert "ConnectionResetError: gone" in record.detail

    async def test_nothing_is_tried_again_after_the_first_turn(self, start):
        record, num_made = await start("score", ConnectionResetError("gone"), 1, start_retries=StartRetries(unreachable=3))
        assert (record.outcome, num_made) == (Outcome.ENVIRONMENT_ERROR, 1)

    async def test_cancelled_start_is_not_tried_again(self, start):
        record, num_made = await start("reset", hangs, 9, episode_timeout_s=0.05, start_retries=StartRetries(timeout=9))
        assert (record.outcome, num_made) == (Outcome.TIMEOUT, 1)


async def test_environment_that_fails_to_close_keeps_its_episode(play, caplog):
    class Sticky(Environment):
        async def reset(self, task):
            return [{"role": "user", "content": "?"}]

        async def score(self, answer):
            return 1.0

        async def close(self):
            raise OSError("stuck")

    record = await play(Sticky)
    assert (record.outcome, record.reward) == (Outcome.COMPLETED, 1.0)
    assert "failed to close" in caplog.text


async def test_cancelled_episode_closes_its_environment_and_stays_cancelled(play, question_environment):
    in_step = asyncio.Event()

    async def report_and_hang():
        in_step.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(play(misbehaving(question_environment, "step", report_and_hang)))
    await in_step.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_hub_that_refuses_is_an_outcome(hub, play, question_environment):
    hub.faults = [400]
    record = await play(question_environment)
    assert record.outcome is Outcome.ENVIRONMENT_ERROR
    assert "refused to generate" in record.detail


async def test_hub_that_stays_away_times_out(hub, play, question_environment):
    hub.faults = [503] * 1000
    assert (await play(question_environment, episode_timeout_s=0.3)).outcome is Outcome.TIMEOUT


async def test_equal_states_have_equal_fingerprints(hub, play, question_environment):
    class Walk(question_environment):
        async def reset(self, task):
            self.rooms = iter(["hall", "cellar", "hall"])
            return [{"role": "user", "content": next(self.rooms)}]

        async def step(self, action):
            room = next(self.rooms, None)
            return Step(done=room is None, messages=[{"role": "user", "content": room or ""}])

    hall, cellar, hall_again = (turn.state_fingerprint for turn in (await play(Walk)).turns)
    assert hall == hall_again != cellar
