import io

import pytest

from services.standalone import printing, status
from services.standalone.connections import RefusedError, UnreachableError
from shared import strict_yaml
from shared.configuration import Configuration
from tests.services.standalone.services_at import json_service

ENGINE = {"url": "http://10.0.0.7:30000", "state": "syncing", "version": 6, "outstanding_calls": 3, "problem": "it is [late]"}
BOOKS = {"started": 9, "running": 2, "ready": 1, "trained": 5, "discarded": {"stale": 1}}
ENVIRONMENTS = [
    {"name": "calculator", "weight": 1.0, "is_paused": False, "statistics": {"episodes": 256, "success_rate": 0.91}},
    {"name": "lookup", "weight": 0.5, "is_paused": True, "statistics": {"episodes": 0, "success_rate": None}},
]
PROCESSES = {"node-1:77": 24, "node-2:12": 8}
PIPELINE = {
    "version": 7,
    "updates": 6,
    "update_s": 41.0,
    "wait_share": 0.38,
    "trainer_idle_share": 0.45,
    "engine_idle_share": 0.031,
    "engine_utilisation": None,
    "episode_shares": {"queued": 0.0, "generating": 0.8, "environment": 0.2, "reward": 0.0},
    "discarded_token_shares": {"stale": 0.12},
    "advice": ["training waits 38% of the time for data: give rollouts 2 more of the 16 GPUs"],
}
ANSWERS = {
    "run": "demo",
    "version": 7,
    "engines": [ENGINE],
    "books": BOOKS,
    "pipeline": PIPELINE,
    "agent_processes": PROCESSES,
    "environments": ENVIRONMENTS,
}


def configuration(hub: str, agents: str) -> Configuration:
    raw = {
        "run": {"id": "demo", "directory": "runs/demo", "model_path": "model"},
        "inference_hub": {"url": hub},
        "env_agents": {"url": agents},
        "trainer": {"num_updates": 1},
    }
    return strict_yaml.decode(raw, Configuration, source="test")


def test_hub_and_agents_are_asked_for_what_they_own():
    hub = {"GET /status": (200, {"version": 7}), "GET /engines": (200, [ENGINE])}
    agents = {
        "GET /status": (200, {"books": BOOKS, "pipeline": PIPELINE, "processes": PROCESSES}),
        "GET /environments": (200, ENVIRONMENTS),
    }
    with json_service(hub) as hub_address, json_service(agents) as agents_address:
        assert status.ask(configuration(hub_address.url, agents_address.url)) == ANSWERS


def test_refusal_is_the_services_own_sentence():
    with (
        json_service({"GET /status": (503, {"detail": "Redis must answer, and does not"})}) as hub,
        pytest.raises(RefusedError, match=r"^Redis must answer, and does not$"),
    ):
        status.ask(configuration(hub.url, hub.url))


@pytest.mark.parametrize("body", [b"<html>", b'"\xff"'])
def test_listener_that_is_no_service_is_a_sentence(body):
    with (
        json_service({"GET /status": (200, body)}) as other,
        pytest.raises(UnreachableError, match="something else listens there"),
    ):
        status.ask(configuration(other.url, other.url))


def test_tables_off_a_terminal_are_lines_that_are_never_wrapped():
    shown = io.StringIO()
    console = printing.console(shown)
    long = "a reason " * 30
    console.print(status.tables(console, {**ANSWERS, "engines": [{**ENGINE, "problem": long}]}))
    lines = shown.getvalue().splitlines()
    assert lines[0].endswith("policy version 7 · groups: 9 started = 2 running + 1 ready + 5 trained + 1 discarded")
    assert f"http://10.0.0.7:30000  syncing  6        3      {long.strip()}" in lines
    assert lines[1:4] == [
        "last 6 updates, 41.0 s each: training waits for data 38% of the time, the trainer is idle 45%, engines are idle 3%, "
        "they use – of what they can hold",
        "an episode's life: 0% queued, 80% generating, 20% environment, 0% reward · sampled tokens discarded: 12% stale",
        "advice: training waits 38% of the time for data: give rollouts 2 more of the 16 GPUs",
    ]
    assert "node-2:12      8" in lines
    assert "calculator   1.0     no      256       0.91" in lines
    assert "lookup       0.5     yes     0         –" in lines
    assert "\x1b" not in shown.getvalue()


def test_before_the_first_updates_nothing_is_said_of_the_pipeline():
    assert status.pipeline_lines(None) == []
