import msgspec
import pytest

from services.env_agents.control import STATUS_OF
from services.env_agents.documentation import openapi
from services.env_agents.messages import EnvironmentDescription, RolloutDescription, Status
from services.env_agents.operations import DATASET_ENVIRONMENT, DESCRIBED, OPENENV_ENVIRONMENT, OPERATIONS, ROLLOUT, STATUS
from services.env_agents.schemas import field_descriptions
from shared.environment_spec import EnvironmentSpec
from tests.services.openapi_walk import gaps, operations
from trainer.advice import Setup, advise
from trainer.pipeline import EngineSeconds, Stretch

REGISTER = ("post", "/environments")
CHANGE = ("patch", "/environments/{name}")


async def test_every_operation_says_what_it_takes_answers_and_refuses(http):
    document = (await http.get("/openapi.json")).json()
    assert gaps(document) == []


async def test_every_route_is_documented_and_nothing_else(application):
    routes = {
        (method.lower(), route.path)
        for route in application.routes
        if getattr(route, "include_in_schema", False)
        for method in route.methods
    }
    assert routes == {(operation.method, operation.path) for operation in operations(openapi())} == set(OPERATIONS)


@pytest.mark.parametrize("summary", OPERATIONS[REGISTER].requests)
async def test_every_example_of_an_environment_can_be_registered(http, summary, openenv_server, tmp_path, monkeypatch):
    body = OPERATIONS[REGISTER].requests[summary]
    if body is DATASET_ENVIRONMENT:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "gsm8k").mkdir()
        (tmp_path / "gsm8k" / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}')
    if body is OPENENV_ENVIRONMENT:
        body = {**body, "url": str(openenv_server.make_url(""))}
    answer = await http.post("/environments", json=body)
    assert answer.status_code == 201, answer.text
    assert msgspec.json.decode(answer.content, type=EnvironmentDescription).name == body["name"]


@pytest.mark.parametrize("summary", OPERATIONS[CHANGE].requests)
async def test_every_example_of_a_change_is_made(http, summary):
    await http.post("/environments", json=OPERATIONS[REGISTER].requests["A Python environment"])
    changes = OPERATIONS[CHANGE].requests[summary]
    answer = await http.patch("/environments/calculator", json=changes)
    assert answer.status_code == 200, answer.text
    for key, value in changes.items():
        changed = answer.json()[key]
        assert (changed | value if isinstance(value, dict) else value) == changed


@pytest.mark.parametrize("summary", OPERATIONS["patch", "/rollout"].requests)
async def test_every_example_of_another_ratio_is_set(http, summary):
    body = OPERATIONS["patch", "/rollout"].requests[summary]
    answer = await http.patch("/rollout", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["async_generation_ratio"] == body["async_generation_ratio"]


@pytest.mark.parametrize("summary", OPERATIONS["post", "/evaluations"].requests)
async def test_every_example_of_an_evaluation_runs(http, summary):
    await http.post("/environments", json=OPERATIONS[REGISTER].requests["A Python environment"])
    body = {**OPERATIONS["post", "/evaluations"].requests[summary], "num_episodes": 1}
    answer = await http.post("/evaluations", json=body)
    assert answer.status_code == 200, answer.text


def test_examples_of_answers_are_what_the_types_encode():
    for example, of in ((DESCRIBED, EnvironmentDescription), (STATUS, Status), (ROLLOUT, RolloutDescription)):
        assert msgspec.to_builtins(msgspec.convert(example, of), builtin_types=()) == example


def test_the_example_of_advice_is_what_such_a_run_is_told():
    """On 8 engines and 8 ranks."""
    shown, num_gpus = STATUS["pipeline"], 8
    ready_s = num_gpus * shown["updates"] * shown["update_s"]
    update_s = shown["updates"] * shown["update_s"]
    measured = Stretch(
        num_updates=shown["updates"],
        update_s=update_s,
        wait_s=shown["wait_share"] * update_s,
        train_s=(1 - shown["trainer_idle_share"]) * update_s,
        engines=EngineSeconds(ready_s, shown["engine_idle_share"] * ready_s, shown["engine_utilisation"] * ready_s, ready_s),
    )
    setup = Setup(
        num_engines=num_gpus,
        gpus_per_engine=1,
        trainer_gpus=num_gpus,
        has_gpus=True,
        async_generation_ratio=STATUS["books"]["async_generation_ratio"],
        on_stale="mask",
        max_concurrent_episodes=None,
    )
    assert tuple(advice.text for advice in advise(measured, setup)) == shown["advice"]


def test_every_refusal_that_has_a_status_of_its_own_is_documented():
    documented = {status for operation in operations(openapi()) for status in operation.refusals}
    assert documented == {*STATUS_OF.values(), 401, 503}


def test_fields_are_described_in_the_words_below_them():
    assert field_descriptions(EnvironmentSpec)["weight"] == "Share of new groups, relative to the other environments' weights."
    properties = openapi()["components"]["schemas"]["EnvironmentDescription"]["properties"]
    assert properties["weight"]["description"].startswith("Share of new groups"), "a base's fields too"


async def test_the_page_needs_no_other_server(http):
    assert (await http.get("/")).headers["location"] == "docs"
    page = await http.get("/docs")
    assert page.status_code == 200
    assert "https://" not in page.text
    assert (await http.get("/static-offline-docs/swagger-ui-bundle.js")).status_code == 200
