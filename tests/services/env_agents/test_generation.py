import asyncio
import json

import pytest

from services.env_agents.generation import GenerationClient, GenerationDeadlineError, GenerationError, read_generation
from shared.environment_spec import SamplingParameters
from shared.versions import VersionSpan


@pytest.fixture
def ask(client):
    async def ask(*, seconds: float = 30.0, is_greedy: bool = False):
        return await client.generate(
            [1, 2, 3],
            sampling=SamplingParameters(temperature=0.7, top_p=0.9, top_k=5),
            max_new_tokens=16,
            is_greedy=is_greedy,
            session_id="session",
            deadline=asyncio.get_running_loop().time() + seconds,
        )

    return ask


def answer(*, logprobs, versions, finish_reason="stop"):
    meta_info = {"output_token_logprobs": logprobs, "weight_versions": versions, "finish_reason": {"type": finish_reason}}
    return json.dumps({"meta_info": meta_info}).encode()


async def test_request_is_sglangs_and_carries_the_session(hub, ask, renderer):
    await ask()
    assert hub.session_ids == ["session"]
    assert hub.requests == [
        {
            "input_ids": [1, 2, 3],
            "sampling_params": {
                "max_new_tokens": 16,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 5,
                "stop_token_ids": renderer.stop_token_ids,
            },
            "return_logprob": True,
        }
    ]


async def test_greedy_is_temperature_zero(hub, ask):
    await ask(is_greedy=True)
    assert hub.requests[0]["sampling_params"]["temperature"] == 0


async def test_answer_keeps_ids_logprobs_and_spans(hub, ask, tokenizer):
    hub.version = 7
    generation = await ask()
    assert tokenizer.decode(generation.token_ids) == "42<|im_end|>"
    assert generation.logprobs == [-0.5, -0.501, -0.502]
    assert generation.version_spans == [VersionSpan(0, 3, 7)]
    assert not generation.is_cut


@pytest.mark.parametrize("fault", [0, 503])
async def test_hub_that_is_away_for_a_moment_is_asked_again(hub, ask, fault):
    hub.faults = [fault, fault]
    assert len((await ask()).token_ids) == 3


async def test_waiting_for_the_hub_ends_at_the_deadline(hub, ask):
    hub.faults = [503] * 1000
    with pytest.raises(GenerationDeadlineError, match="deadline passed"):
        await ask(seconds=0.3)


async def test_hub_that_hangs_is_left_at_the_deadline(hub, ask):
    forever = asyncio.Event()
    hub.policy = lambda _: forever.wait()
    with pytest.raises(GenerationDeadlineError):
        await ask(seconds=0.2)
    forever.set()


async def test_unreachable_hub_is_asked_until_the_deadline(http_session, unused_tcp_port):
    client = GenerationClient(http_session, f"http://127.0.0.1:{unused_tcp_port}", stop_token_ids=[])
    with pytest.raises(GenerationDeadlineError):
        await client.generate(
            [1],
            sampling=SamplingParameters(),
            max_new_tokens=1,
            is_greedy=False,
            session_id="s",
            deadline=asyncio.get_running_loop().time() + 0.2,
        )


async def test_refusal_is_not_repeated(hub, ask):
    hub.faults = [400]
    with pytest.raises(GenerationError, match=r"refused to generate \(400\).*a fault"):
        await ask()
    assert hub.requests == []


def test_spans_of_an_update_in_the_middle_are_read():
    generation = read_generation(
        answer(
            logprobs=[[-1.0, 5, None], [-2.0, 6, None], [-3.0, 7, None]],
            versions=[{"version": "default", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}],
            finish_reason="length",
        )
    )
    assert generation.version_spans == [VersionSpan(0, 2, 0), VersionSpan(2, 3, 1)]
    assert generation.is_cut


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "not a generation"),
        (b"{}", "not a generation"),
        (answer(logprobs=[[None, 5, None]], versions=[]), "not a generation"),
        (answer(logprobs=[[-1.0, 5, None]], versions=[]), "cover all 1 sampled tokens"),
        (answer(logprobs=[[-1.0, 5, None]], versions=[{"version": "0", "start": 0, "end": 2}]), "cover all 1"),
        (answer(logprobs=[[-1.0, 5, None]], versions=[{"version": "beta", "start": 0, "end": 1}]), "decimal number, got 'beta'"),
        (answer(logprobs=[], versions=[], finish_reason="abort"), "aborted"),
    ],
)
def test_answer_that_is_no_complete_generation_is_refused(body, message):
    with pytest.raises(GenerationError, match=message):
        read_generation(body)
