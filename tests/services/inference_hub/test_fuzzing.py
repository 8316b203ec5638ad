"""The control plane under requests made from its own OpenAPI document."""

import asyncio

import pytest

from tests.fuzzing import fuzz

GENERATE = "/generate"
"""An engine's own refusals pass through it, which its document cannot know; its bad bodies are in test_generate."""


@pytest.mark.parametrize("has_engine", [False, True])
async def test_the_control_plane_answers_as_it_says_whatever_it_is_asked(serve_hub, start_engine, has_engine):
    engines = [await start_engine()] if has_engine else []
    async with serve_hub(*(engine.url for engine in engines), engine_hosts=("127.0.0.1",), weight_update_timeout_s=1.0) as served:
        if has_engine:
            await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        asked = await asyncio.to_thread(fuzz, served.url, num_requests=20, leave_out=[GENERATE])
        assert (await served.get("/health"))[0] == 200
    assert "POST /engines" in asked
    assert "POST /weight_updates/{update_id}/buckets" in asked
