"""The generation client against a real SGLang engine: what the fake hub of the other tests takes for granted."""

import asyncio

import pytest

from services.env_agents.generation import GenerationClient
from shared.environment_spec import SamplingParameters
from shared.versions import VersionSpan

pytestmark = pytest.mark.engine


@pytest.fixture
def generate(http_session, initial_engine_url):
    async def generate(*, stop_token_ids=(), is_greedy=False, max_new_tokens=12):
        return await GenerationClient(http_session, initial_engine_url, stop_token_ids=stop_token_ids).generate(
            [5, 6, 7, 8],
            sampling=SamplingParameters(),
            max_new_tokens=max_new_tokens,
            is_greedy=is_greedy,
            session_id="session",
            deadline=asyncio.get_running_loop().time() + 60,
        )

    return generate


async def test_every_sampled_token_has_a_logprob_and_a_version(generate):
    generation = await generate()
    assert len(generation.token_ids) == len(generation.logprobs) == 12
    assert generation.version_spans == [VersionSpan(0, 12, 0)]
    assert all(logprob <= 0 for logprob in generation.logprobs)
    assert generation.is_cut


async def test_stop_token_is_among_the_sampled(generate):
    free = await generate(is_greedy=True)
    stop = free.token_ids[3]
    stopped = await generate(is_greedy=True, stop_token_ids=[stop])
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert not stopped.is_cut


async def test_greedy_repeats_itself(generate):
    assert (await generate(is_greedy=True)).token_ids == (await generate(is_greedy=True)).token_ids
