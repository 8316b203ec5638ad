import asyncio
import json
import re

import msgspec
import pytest

from services.env_agents import control
from services.env_agents.control import MAX_BODY_BYTES
from services.env_agents.documentation import openapi
from services.env_agents.episode_statistics import RunStatistics
from shared import trajectory as trajectories
from shared.evaluation import EvaluationLine
from shared.ledger import AdmissionLedger
from tests.services.openapi_walk import operations
from tests.shared.episodes import admitted_group, finished_episode

CALCULATOR = {"name": "calculator", "import_path": "examples.calculator:Calculator", "tasks": {"kind": "seeds", "count": 3}}


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


async def test_the_ratio_of_a_running_job_can_be_changed_and_is_read_by_everyone(http, redis_async, keys):
    ledger = AdmissionLedger(redis_async, keys)
    await ledger.configure(async_generation_ratio=1.0, batch_groups=2)
    changed = await http.patch("/rollout", json={"async_generation_ratio": 1.5})
    counts = {"rollout_batch_size": 2, "version": 0, "groups_in_flight": 0}
    expected = {"async_generation_ratio": 1.5, "ratio_in_force": 1.5, "max_lag": 2, **counts}
    assert (changed.status_code, changed.json()) == (200, expected)
    assert (await http.get("/rollout")).json() == expected
    assert (await ledger.books()).async_generation_ratio == 1.5


REGISTER = ("POST", "/environments")
CHANGE = ("PATCH", "/environments/calculator")
BAD_REQUESTS = [
    ("PATCH", "/rollout", {"async_generation_ratio": -1}, 422, "async_generation_ratio: Expected `float` >= 0.0, got -1"),
    ("PATCH", "/rollout", {"async_generation_rate": 1}, 422, "did you mean 'async_generation_ratio'?"),
    (*REGISTER, {"name": "x"}, 422, "exactly one of import_path and url"),
    (*REGISTER, {**CALCULATOR, "weigth": 1}, 422, "POST /environments: unknown key 'weigth'; did you mean 'weight'?"),
    (*REGISTER, {**CALCULATOR, "limits": {"max_turn": 1}}, 422, "unknown key 'limits.max_turn'; did you mean 'max_turns'?"),
    (*REGISTER, {**CALCULATOR, "weight": -1}, 422, "weight: Expected `float` >= 0.0, got -1"),
    (*REGISTER, {**CALCULATOR, "weight": "heavy"}, 422, "weight: Expected `float`, got 'heavy'"),
    (
        *REGISTER,
        {**CALCULATOR, "name": "a b"},
        422,
        "name: must be 1 to 64 letters, digits, '.', '_' and '-', and begin with a letter or digit, got 'a b'",
    ),
    (*REGISTER, {**CALCULATOR, "tasks": {"kind": "csv"}}, 422, "tasks.kind: must be one of 'jsonl', 'parquet', 'seeds', got 'csv'"),
    (*REGISTER, {"name": "x", "import_path": "examples.none:X"}, 422, "failed to import: ModuleNotFoundError"),
    (
        *REGISTER,
        {"name": "x", "import_path": "examples.calculator:Calc"},
        422,
        "examples.calculator has no 'Calc'; correct the name",
    ),
    (*REGISTER, {**CALCULATOR, "name": "x", "arguments": {"digits": 3}}, 422, "arguments must suit examples.calculator:Calculator"),
    (*REGISTER, {"name": "x", "import_path": "os:system"}, 403, "must be inside env_agents.import_allowlist (examples, gymnasium)"),
    (*REGISTER, {"name": "x", "url": "10.0.0.9"}, 422, "url must start with ws://, wss://, http:// or https://, got '10.0.0.9'"),
    (*REGISTER, {"name": "x", "url": "ws://127.0.0.1:9", "execution": "thread"}, 422, "execution 'thread' is for import_path"),
    (
        *REGISTER,
        {"name": "x", "url": "ws://10.0.0.9:8900"},
        403,
        "env_agents.environment_hosts admits (127.0.0.0/8, ::1/128), got '10.0.0.9'",
    ),
    (
        *REGISTER,
        {"name": "x", "url": "http://169.254.169.254/latest"},
        403,
        "'169.254.169.254' is link-local, where clouds have their",
    ),
    (*REGISTER, {"name": "x", "url": "ws://127.0.0.1:9"}, 502, "an OpenEnv server must answer at ws://127.0.0.1:9"),
    (*REGISTER, {**CALCULATOR, "weight": 9}, 409, "exists with another spec; PATCH it"),
    (
        *REGISTER,
        {**CALCULATOR, "name": "x", "reward": {"kind": "function", "import_path": "os:system"}},
        403,
        "must be inside env_agents.import_allowlist (examples, gymnasium), got 'os:system'",
    ),
    (
        *REGISTER,
        {**CALCULATOR, "name": "x", "reward": {"kind": "function", "import_path": "examples.calculator:OPERATORS"}},
        422,
        "reward.import_path must name a function, got 'examples.calculator:OPERATORS', a dict; correct the name",
    ),
    (
        *REGISTER,
        {**CALCULATOR, "name": "x", "reward": {"kind": "http", "url": "file:///etc/passwd"}},
        422,
        "a reward's url must start with http:// or https://, got 'file:///etc/passwd'",
    ),
    (
        *REGISTER,
        {"name": "x", "import_path": "services.env_agents.dataset_environment:DatasetEnvironment"},
        422,
        "takes its prompts from a dataset, and tasks are seeds; set tasks.kind to parquet or jsonl",
    ),
    (
        *REGISTER,
        {**CALCULATOR, "name": "x", "reward": {"kind": "http", "url": "http://a", "timeout": 3}},
        422,
        "unknown key 'reward.timeout'; did you mean 'timeout_s'?",
    ),
    (
        *REGISTER,
        {**CALCULATOR, "name": "x", "reward": {"kind": "judge", "prompt": "{answer}", "patern": "(1)"}},
        422,
        "unknown key 'reward.patern'; did you mean 'pattern'?",
    ),
    (
        *REGISTER,
        {**CALCULATOR, "name": "x", "tasks": {"kind": "jsonl", "path": "a", "columns": {"promt": "b"}}},
        422,
        "unknown key 'tasks.columns.promt'; did you mean 'prompt'?",
    ),
    (*REGISTER, {**CALCULATOR, "name": "x", "arguments": {}, "reward": {"kind": "function", "import_path": "a"}}, 422, ":function"),
    (*REGISTER, [], 422, "POST /environments: the body must be a JSON object"),
    ("GET", "/environments/calculater", None, 404, "did you mean 'calculator'?"),
    ("PATCH", "/environments/nothing", {}, 404, "no environment is named 'nothing'; registered: calculator"),
    (*CHANGE, {"name": "y"}, 422, "only is_paused, weight, min_share, limits, sampling can be changed, got name; leave it out"),
    (*CHANGE, {"paused": True}, 422, "can be changed, got paused; did you mean 'is_paused'?"),
    ("GET", "/environments/weather", None, 404, "no environment is named 'weather'; registered: "),
    (*CHANGE, {"weight": -1}, 422, "environment 'calculator': weight: Expected `float` >= 0.0, got -1"),
    (*CHANGE, {"min_share": 1.5}, 422, "environment 'calculator': min_share: Expected `float` <= 1.0, got 1.5"),
    (*CHANGE, {"is_paused": "yes"}, 422, "is_paused: Expected `bool`, got 'yes'"),
    (*CHANGE, {"limits": {"max_turn": 1}}, 422, "unknown key 'limits.max_turn'; did you mean 'max_turns'?"),
    (*CHANGE, {"limits": 3}, 422, "limits: Expected `object`, got 3"),
    (*CHANGE, ["pause"], 422, "PATCH /environments/calculator: the body must be a JSON object"),
    ("DELETE", "/environments/nothing", None, 404, "no environment is named 'nothing'"),
    ("POST", "/evaluations", {"num_episodes": 0}, 422, "num_episodes: Expected `int` >= 1, got 0"),
    ("POST", "/evaluations", {"num_episodes": 1, "environments": ["calculator"]}, 422, "evaluation_tasks"),
    ("POST", "/evaluations", {"num_episodes": 1, "environments": ["calc"]}, 404, "did you mean 'calculator'?"),
    ("POST", "/evaluations", {"num_episodes": 1, "transcripts": -1}, 422, "transcripts: Expected `int` >= 0, got -1"),
    ("POST", "/evaluations/episodes", {"num_episodes": 0}, 422, "num_episodes: Expected `int` >= 1, got 0"),
    ("POST", "/evaluations/episodes", {"num_episodes": 1, "environments": ["calc"]}, 404, "did you mean 'calculator'?"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "detail"), BAD_REQUESTS)
async def test_bad_request_is_answered_with_a_sentence(http, method, path, body, status, detail):
    await http.post("/environments", json=CALCULATOR)
    answer = await http.request(method, path, json=body)
    assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text


async def test_a_change_of_an_environment_whose_server_is_gone_is_refused(http, openenv_server):
    await http.post("/environments", json={"name": "remote", "url": str(openenv_server.make_url(""))})
    await openenv_server.close()
    answer = await http.patch("/environments/remote", json={"weight": 2.0})
    assert (answer.status_code, "start it, or correct the environment's url" in answer.json()["detail"]) == (502, True)


async def test_without_redis_every_request_that_needs_it_is_refused(http, redis_async):
    redis_async.connection_pool.connection_kwargs["path"] = "/nowhere"
    for method, path in (("GET", "/environments"), ("POST", "/environments"), ("DELETE", "/environments/x"), ("GET", "/status")):
        answer = await http.request(method, path, json=CALCULATOR)
        assert (answer.status_code, "try again when it is back" in answer.json()["detail"]) == (503, True)
    assert (await http.get("/health")).status_code == 200


def test_refusals_that_happen_are_the_ones_that_are_documented():
    happen = {(method, re.sub("(?<=/environments/).*", "{name}", path), status) for method, path, _, status, _ in BAD_REQUESTS}
    documented = {
        (operation.method.upper(), operation.path, status) for operation in operations(openapi()) for status in operation.refusals
    }
    elsewhere = {401, 408, 413, 415, 503}
    assert {refusal for refusal in documented if refusal[2] not in elsewhere} == happen | {("PATCH", "/environments/{name}", 502)}


@pytest.mark.parametrize("content", [b"name: calculator", b'{"name": "\xff"}', b"[" * 100_000, b""])
async def test_body_that_is_not_json_is_answered_with_a_sentence(http, content):
    answer = await http.post("/environments", content=content)
    assert (answer.status_code, "must be a JSON object" in answer.json()["detail"]) == (422, True)


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_any_page_in_a_browser_could_send_is_refused(http, media_type):
    answer = await http.post("/environments", content=json.dumps(CALCULATOR), headers={"Content-Type": media_type})
    assert (answer.status_code, "Content-Type: application/json" in answer.json()["detail"]) == (415, True)
    assert (await http.get("/environments")).json() == []


async def test_a_body_without_end_is_refused_at_its_bound(http):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 2**16
            yield b" " * 2**16

    answer = await http.post("/environments", content=endless())
    assert (answer.status_code, f"at most {MAX_BODY_BYTES} bytes" in answer.json()["detail"]) == (413, True)
    assert sent <= MAX_BODY_BYTES + 2**17


async def test_a_body_that_does_not_come_is_given_up(http, monkeypatch):
    monkeypatch.setattr(control, "BODY_TIMEOUT_S", 0.05)

    async def stalled():
        yield b"{"
        await asyncio.Event().wait()

    answer = await http.post("/environments", content=stalled())
    assert (answer.status_code, "must be there within 0.05 s" in answer.json()["detail"]) == (408, True)


async def test_a_dataset_path_that_no_file_can_have_is_a_sentence(http):
    tasks = {"kind": "jsonl", "path": "rows\0.jsonl"}
    answer = await http.post("/environments", json={**CALCULATOR, "tasks": tasks})
    assert (answer.status_code, "tasks.path must be a file of JSON lines" in answer.json()["detail"]) == (422, True)


async def test_statistics_are_the_runs_whichever_process_is_asked(http, redis_async, keys):
    await http.post("/environments", json=CALCULATOR)
    other = RunStatistics(redis_async, keys, process="another:7")
    group = admitted_group("calculator")
    await other.add(finished_episode(group, 0))
    [listed] = (await http.get("/environments")).json()
    shown = (await http.get("/environments/calculator")).json()
    assert listed == shown
    assert shown["statistics"] == {"episodes": 1, "success_rate": 0.0, "mean_reward": 0.0, "outcomes": {"completed": 1}}


async def test_status_shows_the_books_and_every_process(http, redis_async, keys):
    ledger = AdmissionLedger(redis_async, keys)
    await ledger.configure(async_generation_ratio=0.0, batch_groups=1)
    await ledger.renew(owner="owner", lease_ms=60_000, group_ids=[])
    await ledger.admit(group_id="g", environment="calculator", group_size=2, owner="another:7", lease_ms=60_000)
    status = (await http.get("/status")).json()
    assert (status["books"]["running"], status["is_balanced"]) == (1, True)
    assert (status["process"], status["episodes_in_flight"]) == ("owner", 0)
    assert status["processes"] == {"another:7": 2, "owner": 0}
    assert (await http.get("/health")).status_code == 200


async def test_metrics_are_prometheus_text(http):
    text = (await http.get("/metrics")).text
    assert "# HELP headrace_agents_episodes_in_flight Episodes that run in this process" in text
    assert "# TYPE headrace_agents_loop_lag_seconds histogram" in text


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


async def test_evaluation_by_episode_begins_with_their_number_and_has_a_line_for_each(http, hub):
    spec = {
        **CALCULATOR,
        "name": "lookup",
        "import_path": "examples.lookup_chain:LookupChain",
        "evaluation_tasks": {"kind": "seeds", "count": 3},
    }
    await http.post("/environments", json=spec)
    answer = await http.post("/evaluations/episodes", json={"num_episodes": 5})
    first, *lines = [msgspec.json.decode(line, type=EvaluationLine) for line in answer.text.splitlines()]
    assert first == EvaluationLine(num_episodes={"lookup": 3})
    episodes = [trajectories.decode(line.trajectory) for line in lines]
    assert sorted(episode.task_id for episode in episodes) == ["0", "1", "2"]
