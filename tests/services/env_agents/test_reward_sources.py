import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.env_agents.reward_sources import FunctionSource, HttpSource, JudgeSource, judge_prompt
from services.env_agents.rewards import FinishedEpisode, RewardError, RewardProblem
from services.env_agents.tasks import Task
from shared.environment_spec import HttpReward, JudgeReward

TASK = Task("7", 7, {"tag": "sums", "when": None}, ({"role": "user", "content": "6 * 7?"},), "42")
CALL = {"type": "function", "function": {"name": "times", "arguments": {"a": 6, "b": 7}}}
EPISODE = FinishedEpisode(
    TASK,
    [
        {"role": "user", "content": "6 * 7?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "times", "content": "42"},
        {"role": "assistant", "content": "It is 42 {answer}."},
    ],
    "It is 42 {answer}.",
)


def failed(kind: RewardProblem, match: str):
    return pytest.raises(RewardError, match=match, check=lambda error: error.problem is kind)


async def test_functions_get_the_episode_and_their_arguments():
    async def asynchronous(episode, *, right):
        return float(right in episode.answer)

    assert await FunctionSource(asynchronous, {"right": "42"}).score(EPISODE) == 1.0
    assert await FunctionSource(lambda episode, right: float(right in episode.answer), {"right": "43"}).score(EPISODE) == 0.0


async def test_plain_function_that_returns_a_coroutine_is_awaited():
    async def asynchronous(episode):
        return 0.5

    assert await FunctionSource(lambda episode: asynchronous(episode), {}).score(EPISODE) == 0.5


async def test_function_that_blocks_does_not_hold_up_the_loop():
    is_over = threading.Event()
    scoring = asyncio.create_task(FunctionSource(lambda episode: is_over.wait(20), {}).score(EPISODE))
    await asyncio.sleep(0.01)
    assert not scoring.done()
    is_over.set()
    assert await scoring is True


@pytest.mark.parametrize("is_async", [True, False])
async def test_function_that_raises_tells_where(is_async):
    def broken(episode):
        raise TimeoutError("its own")

    async def broken_too(episode):
        broken(episode)

    with failed(RewardProblem.ERROR, "TimeoutError: its own"):
        await FunctionSource(broken_too if is_async else broken, {}).score(EPISODE)


@asynccontextmanager
async def serving(score) -> AsyncIterator[HttpReward]:
    """A service whose answer to a POST is what `score` makes of the request."""
    app = web.Application()
    app.router.add_post("/score", score)
    async with TestServer(app) as server:
        yield HttpReward(url=str(server.make_url("/score")))


async def test_service_gets_the_episode_as_json_and_its_answer_is_the_reward(http_session):
    bodies = []

    async def score(request):
        bodies.append(await request.json())
        return web.json_response({"reward": 0.5, "parts": {"style": 1}})

    async with serving(score) as spec:
        assert await HttpSource(http_session, spec).score(EPISODE) == {"reward": 0.5, "parts": {"style": 1}}
    [body] = bodies
    assert body["task"] == {
        "task_id": "7",
        "seed": 7,
        "data": {"tag": "sums", "when": None},
        "prompt": [{"role": "user", "content": "6 * 7?"}],
        "answer": "42",
    }
    assert (body["messages"][2]["content"], body["answer"]) == ("42", "It is 42 {answer}.")


BAD_ANSWERS = [
    (lambda: web.Response(status=503), RewardProblem.UNREACHABLE, "answered 503"),
    (lambda: web.Response(status=429), RewardProblem.UNREACHABLE, "answered 429"),
    (lambda: web.Response(status=500, text="division by zero"), RewardProblem.ERROR, "answered 500: division by zero"),
    (lambda: web.Response(status=422, text="no such task"), RewardProblem.ERROR, "answered 422: no such task"),
    (
        lambda: web.Response(status=307, headers={"Location": "/score"}),
        RewardProblem.ERROR,
        "answered 307, and redirects",
    ),
    (lambda: web.Response(text="good"), RewardProblem.UNUSABLE, "must answer JSON"),
    (lambda: web.Response(body=b" " * 2_000_000), RewardProblem.UNUSABLE, "at most 1048576 bytes"),
]


@pytest.mark.parametrize(("answer", "kind", "message"), BAD_ANSWERS)
async def test_answer_that_is_no_reward_has_a_cause(http_session, answer, kind, message):
    async def score(request):
        return answer()

    async with serving(score) as spec:
        with failed(kind, message):
            await HttpSource(http_session, spec).score(EPISODE)


async def test_service_that_is_away_is_unreachable(http_session, unused_tcp_port):
    with failed(RewardProblem.UNREACHABLE, "Connect call failed"):
        await HttpSource(http_session, HttpReward(url=f"http://127.0.0.1:{unused_tcp_port}")).score(EPISODE)


async def test_service_that_hangs_up_is_unreachable(http_session):
    async def score(request):
        request.transport.close()
        return web.Response()

    async with serving(score) as spec:
        with failed(RewardProblem.UNREACHABLE, "disconnected"):
            await HttpSource(http_session, spec).score(EPISODE)


PROMPT = "Q: {prompt}\nA: {answer}\nRight: {ground_truth}\n{unknown}"


@pytest.fixture
def judge(renderer, client):
    def judge(**fields):
        return JudgeSource(renderer, client, JudgeReward(**{"prompt": PROMPT, "pattern": r"Score: (\S+)", **fields}))

    return judge


async def test_judge_reads_the_episode_and_its_last_number_is_the_reward(judge, hub):
    hub.policy = lambda _: "Score: 3 would be harsh. Score: 8<|im_end|>"
    assert await judge().score(EPISODE) == 0.8
    assert await judge(lowest=-10, highest=10).score(EPISODE) == 0.9
    sampling = hub.requests[0]["sampling_params"]
    assert (sampling["temperature"], sampling["max_new_tokens"]) == (0.0, 512)
    asked = hub.tokenizer.decode(hub.requests[0]["input_ids"])
    assert "Q: [user] 6 * 7?\nA: It is 42 {answer}.\nRight: 42\n{unknown}" in asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It is good.", "the judge named no number, in 'It is good.'"),
        ("Score: ten", "the judge named no number"),
        ("Score: 11", "must be in 0 … 10, got 11"),
        ("Score: nan", "must be in 0 … 10, got nan"),
    ],
)
async def test_judge_without_a_usable_number_is_unusable(judge, hub, text, message):
    hub.policy = lambda _: f"{text}<|im_end|>"
    with failed(RewardProblem.UNUSABLE, message):
        await judge().score(EPISODE)


async def test_judge_that_is_refused_or_late_has_a_cause(judge, hub):
    hub.faults = [400]
    with failed(RewardProblem.ERROR, "the judge could not be asked: the hub refused"):
        await judge().score(EPISODE)
    hub.faults = [503] * 100
    with failed(RewardProblem.TIMEOUT, "the judge did not answer within 0.05 s"):
        await judge(timeout_s=0.05).score(EPISODE)


def test_judge_reads_calls_and_results_in_the_transcript():
    assert judge_prompt("{transcript}", EPISODE).splitlines() == [
        "[user] 6 * 7?",
        "[assistant] ",
        '[calls] {"name":"times","arguments":{"a":6,"b":7}}',
        "[tool] 42",
        "[assistant] It is 42 {answer}.",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "Good?"}, "must contain {answer} or {transcript}"),
        ({"pattern": "("}, "must be a regular expression"),
        ({"pattern": "[0-9]+"}, "must have a group for the number"),
        ({"lowest": 5, "highest": 5}, "lowest must be < highest, got 5 and 5"),
    ],
)
def test_judge_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        JudgeReward(**{"prompt": PROMPT, **fields})
