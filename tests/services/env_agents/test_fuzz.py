"""Every door of the agents, from outside: requests that nobody would write, and nothing may be answered but what is documented."""

import asyncio
import socket

import pytest
import uvicorn

from shared.ledger import AdmissionLedger
from tests.fuzzing import fuzz
from tests.services.env_agents.test_control import CALCULATOR

NUM_REQUESTS = 30


@pytest.fixture
async def served(application, redis_async, keys):
    """The address of the HTTP interface on a real socket."""
    await AdmissionLedger(redis_async, keys).configure(async_generation_ratio=1.0, batch_groups=2)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, lifespan="off", log_level="error", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await serving


@pytest.mark.timeout(300)
async def test_whatever_is_asked_is_answered_as_documented(served, http, hub):
    await http.post("/environments", json={**CALCULATOR, "evaluation_tasks": {"kind": "seeds", "count": 2}})
    asked = await asyncio.to_thread(fuzz, served, num_requests=NUM_REQUESTS)
    assert len(asked) == 12
    assert (await http.get("/health")).status_code == 200
