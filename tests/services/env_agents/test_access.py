import httpx
import pytest

from services.env_agents.access import OPEN_PATHS, Access, may_request
from services.env_agents.documentation import openapi
from tests.services.openapi_walk import operations

TOKEN = "s3cret"
REQUESTS = [(operation.method.upper(), operation.path.format(name="calculator")) for operation in operations(openapi())]


@pytest.fixture
async def guarded(application):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Access(application, TOKEN)), base_url="http://agents") as client:
        yield client


@pytest.mark.parametrize(("method", "path"), REQUESTS)
@pytest.mark.parametrize("authorization", [None, "Bearer other", TOKEN, f"Basic {TOKEN}", f"bearer  {TOKEN}"])
async def test_only_what_changes_and_names_nothing_is_open(guarded, method, path, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = await guarded.request(method, path, headers=headers)
    if path in OPEN_PATHS:
        assert answer.status_code == 200
    else:
        assert (answer.status_code, "HEADRACE_AGENTS_TOKEN" in answer.json()["detail"]) == (401, True)
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/static-offline-docs/swagger-ui.css", "/health/../environments"])
async def test_pages_need_the_token_too(guarded, path):
    assert (await guarded.get(path)).status_code == 401


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_the_token_opens_everything(guarded, method, path):
    answer = await guarded.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code != 401


def test_open_paths_are_open_for_reading_only():
    assert not any(may_request(method, path, None, token=TOKEN) for method in ("POST", "PATCH", "DELETE") for path in OPEN_PATHS)
    assert may_request("DELETE", "/environments/x", None, token=None), "without a token nobody is asked for it"
