import logging

import pytest

from services.inference_hub.access import EngineHosts, HostNotAllowedError
from services.inference_hub.server import AddresslessFormatter
from shared.errors import ConfigurationError
from shared.hub_tokens import CLIENT_VARIABLE, CONTROL_VARIABLE

CLIENT, CONTROL = "client-secret", "control-secret"
PATHS = ["/", "/docs", "/openapi.json", "/engines", "/status", "/metrics", "/ready"]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def tokens(monkeypatch) -> None:
    monkeypatch.setenv(CLIENT_VARIABLE, CLIENT)
    monkeypatch.setenv(CONTROL_VARIABLE, CONTROL)


async def status_of(served, path: str, token: str | None = None) -> int:
    headers = bearer(token) if token else {}
    async with served.http.get(served.url + path, headers=headers, allow_redirects=False) as response:
        return response.status


@pytest.mark.usefixtures("tokens")
async def test_without_a_token_only_health_answers(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        assert await status_of(served, "/health") == 200
        assert [await status_of(served, path) for path in PATHS] == [401] * len(PATHS)
        status, answer = await served.generate([1], 1)
        assert (status, "Authorization: Bearer" in answer["detail"]) == (401, True)
        assert (await served.post("/engines", {"url": engine.url}))[0] == 401
    assert not engine.requests


@pytest.mark.usefixtures("tokens")
async def test_callers_generate_and_control_does_everything(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        assert (await served.generate([1], 1, headers=bearer(CLIENT)))[0] == 200
        assert (await served.generate([1], 1, headers=bearer(CONTROL)))[0] == 200
        assert (await served.generate([1], 1, headers=bearer("other")))[0] == 401
        assert await status_of(served, "/engines", CLIENT) == 401
        assert await status_of(served, "/engines", CONTROL) == 200
        async with served.http.get(served.url + "/health") as response:  # Now the connection is one of uvicorn's.
            assert response.status == 200
        assert (await served.generate([1], 1))[0] == 401


async def test_one_token_of_two_is_refused(serve_hub, monkeypatch):
    monkeypatch.setenv(CLIENT_VARIABLE, CLIENT)
    with pytest.raises(ExceptionGroup) as caught:
        async with serve_hub():
            pass
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigurationError)
    assert CONTROL_VARIABLE in str(error)
    assert CLIENT not in str(error)


@pytest.mark.parametrize(
    ("url", "is_admitted"),
    [
        ("http://10.1.2.3:30000", True),
        ("http://11.1.2.3:30000", False),
        ("http://gpu-7.cluster.local:30000", True),
        ("http://gpu-7.cluster.local.evil.com:30000", False),
        ("http://engine", True),
        ("http://ENGINE", True),
        ("http://engine@evil.com", False),
        ("http://[fd00::7]:30000", True),
        ("http://[::1", False),
        ("http://169.254.169.254/latest", False),
    ],
)
def test_engines_are_admitted_by_their_host(url: str, is_admitted: bool):
    hosts = EngineHosts(["10.0.0.0/8", "*.cluster.local", "engine", "fd00::/8"])
    if is_admitted:
        hosts.require(url)
    else:
        with pytest.raises(HostNotAllowedError, match=r"inference_hub\.engine_hosts"):
            hosts.require(url)


def test_an_allowlist_that_cannot_be_meant_is_refused():
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1/8"):
        EngineHosts(["10.0.0.1/8"])


async def test_an_engine_elsewhere_is_refused_before_it_is_asked_anything(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine_hosts=("10.0.0.0/8",)) as served:
        status, answer = await served.post("/engines", {"url": engine.url})
        assert (status, "127.0.0.1" in answer["detail"]) == (403, True)
        assert (await served.get("/engines"))[1] == []


@pytest.mark.parametrize(
    "url", ["http://user:secret@engine:30000/x", "redis://:secret@redis:6379/0", "https://engine?token=secret"]
)
def test_log_lines_have_no_addresses(url: str):
    record = logging.LogRecord("hub", logging.WARNING, "", 0, "engine=3f1c problem: %s is away", (url,), None)
    assert AddresslessFormatter("%(message)s").format(record) == "engine=3f1c problem: [address] is away"
