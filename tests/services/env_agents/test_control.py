import httpx
import pytest

from services.env_agents.control import create_control
from services.env_agents.evaluation import Evaluator
from services.env_agents.metrics import AgentMetrics
from services.env_agents.rollout_loop import RolloutLoop, RolloutSettings
from shared.ledger import AdmissionLedger

CALCULATOR = {"name": "calculator", "import_path": "examples.calculator:Calculator", "tasks": {"kind": "seeds", "count": 3}}


@pytest.fixture
async def http(registry, agent, renderer, redis_async, keys):
    ledger = AdmissionLedger(redis_async, keys)
    metrics = AgentMetrics()
    rollouts = RolloutLoop(RolloutSettings("run", "owner", 2, 30.0), ledger, registry, agent, metrics)
    evaluator = Evaluator(run_id="run", registry=registry, agent=agent, hold_rollouts=rollouts.on_hold, decode=renderer.text)
    app = create_control(registry, evaluator, rollouts, ledger, metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agents") as client:
        yield client


async def test_environment_lives_through_its_requests(http):
    created = await http.post("/environments", json=CALCULATOR)
    assert created.status_code == 201
    assert created.json()["limits"]["max_turns"] == 8
    patched = await http.patch("/environments/calculator", json={"is_paused": True, "weight": 2.5})
    assert (patched.status_code, patched.json()["is_paused"], patched.json()["weight"]) == (200, True, 2.5)
    shown = (await http.get("/environments/calculator")).json()
    assert shown["statistics"] == {"episodes": 0, "success_rate": None, "mean_reward": None, "outcomes": {}}
    assert shown["last_problem"] is None
    assert [item["name"] for item in (await http.get("/environments")).json()] == ["calculator"]
    assert (await http.delete("/environments/calculator")).status_code == 204
    assert (await http.get("/environments")).json() == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "detail"),
    [
        ("POST", "/environments", {"name": "x"}, 422, "exactly one of import_path and url"),
        ("POST", "/environments", {**CALCULATOR, "weigth": 1}, 422, "unknown key 'weigth'; did you mean 'weight'?"),
        ("POST", "/environments", {**CALCULATOR, "weight": -1}, 422, "weight: Expected `float` >= 0.0, got -1"),
        ("POST", "/environments", {"name": "x", "import_path": "examples.none:X"}, 422, "failed to import"),
        ("POST", "/environments", {"name": "x", "import_path": "os:system"}, 403, "import_allowlist (examples)"),
        (
            "POST",
            "/environments",
            {"name": "x", "url": "ws://127.0.0.1:9"},
            502,
            "an OpenEnv server must answer at ws://127.0.0.1:9",
        ),
        ("POST", "/environments", [], 422, "must be a JSON object"),
        ("GET", "/environments/calculater", None, 404, "did you mean 'calculator'?"),
        ("PATCH", "/environments/nothing", {}, 404, "no environment is named 'nothing'"),
        ("PATCH", "/environments/calculator", {"name": "y"}, 422, "can be changed, got name"),
        ("DELETE", "/environments/nothing", None, 404, "no environment is named 'nothing'"),
        ("POST", "/environments", {**CALCULATOR, "weight": 9}, 409, "exists with another spec"),
        ("POST", "/evaluations", {"num_episodes": 0}, 422, "num_episodes: Expected `int` >= 1, got 0"),
        ("POST", "/evaluations", {"num_episodes": 1, "environments": ["calculator"]}, 422, "evaluation_tasks"),
    ],
)
async def test_bad_request_is_answered_with_a_sentence(http, method, path, body, status, detail):
    await http.post("/environments", json=CALCULATOR)
    answer = await http.request(method, path, json=body)
    assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text


async def test_body_that_is_not_json_is_answered_with_a_sentence(http):
    answer = await http.post("/environments", content=b"name: calculator")
    assert (answer.status_code, "must be a JSON object" in answer.json()["detail"]) == (422, True)


async def test_status_shows_the_books(http, registry):
    status = (await http.get("/status")).json()
    assert status["books"]["is_balanced"]
    assert status["episodes_in_flight"] == 0
    assert (await http.get("/health")).status_code == 200


async def test_metrics_are_prometheus_text(http):
    text = (await http.get("/metrics")).text
    assert "# HELP headrace_agents_episodes_in_flight Episodes that run in this process" in text


async def test_evaluations_answer_by_environment(http, hub):
    spec = {
        **CALCULATOR,
        "name": "lookup",
        "import_path": "examples.lookup_chain:LookupChain",
        "evaluation_tasks": {"kind": "seeds"},
    }
    await http.post("/environments", json=spec)
    hub.version = 2
    answer = (await http.post("/evaluations", json={"num_episodes": 3, "transcripts": 1})).json()
    assert answer["version"] == 2
    assert answer["results"]["lookup"]["episodes"] == 3
    assert answer["transcripts"][0]["environment"] == "lookup"
