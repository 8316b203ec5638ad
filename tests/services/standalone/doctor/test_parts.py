import socket

import pytest

from services.standalone.doctor import parts
from services.standalone.doctor.finding import Severity
from services.standalone.doctor.parts import Part, Port
from services.standalone.ports import LOOPBACK, free_ports
from tests.services.standalone.services_at import json_service

HUB_STATUS = {"version": 7, "engines": {"ready": 2, "syncing": 1}}


def part(port: Port, *, answer: str | None = None, problem: str = "") -> Part:
    return Part("hub", "inference_hub.port", "http://127.0.0.1:8800", port, answer, problem)


@pytest.mark.parametrize(
    ("facts", "is_run_up", "severity", "words"),
    [
        (part(Port.TAKEN, answer="version 7"), True, Severity.OK, "answers at http://127.0.0.1:8800: version 7"),
        (part(Port.FREE), False, Severity.OK, "does not run yet; http://127.0.0.1:8800 is free"),
        (part(Port.UNDECIDED), False, Severity.OK, "port chosen at start"),
        (part(Port.TAKEN, problem="not JSON"), False, Severity.PROBLEM, "something else listens at"),
        (part(Port.FREE, problem="refused"), True, Severity.PROBLEM, "does not answer at http://127.0.0.1:8800, and the run is up"),
        (part(Port.ELSEWHERE, problem="no route"), False, Severity.WARNING, "does not answer at http://127.0.0.1:8800: no route"),
        (part(Port.ELSEWHERE, problem="no route"), True, Severity.PROBLEM, "and the run is up: no route"),
    ],
)
def test_address_is_judged_by_who_listens_and_who_answers(facts, is_run_up, severity, words):
    found = parts.check(facts, is_run_up=is_run_up)
    assert found.severity is severity
    assert words in found.found
    assert bool(found.remedy) is (severity is not Severity.OK)


def test_one_of_something_is_not_said_as_many():
    one = {**HUB_STATUS, "engines": {"ready": 1}}
    with json_service({"GET /status": (200, one)}) as hub:
        assert parts.look_at_hub(hub.url).answer == "version 7, 1 engine ready"


def test_hub_that_runs_says_what_it_has():
    with json_service({"GET /status": (200, HUB_STATUS)}) as hub:
        found = parts.look_at_hub(hub.url)
    assert (found.port, found.answer) == (Port.TAKEN, "version 7, 2 engines ready")


def test_agents_that_run_say_what_they_do():
    with json_service({"GET /status": (200, {"books": {"running": 2, "ready": 1, "trained": 5}})}) as agents:
        assert parts.look_at_agents(agents.url).answer == "2 groups running, 1 ready, 5 trained"


@pytest.mark.parametrize("answer", [(200, {"books": {}}), (200, ["hub"]), (200, b"<html>"), (404, {}), (200, {"version": 7})])
def test_listener_that_answers_otherwise_is_something_else(answer):
    with json_service({"GET /status": answer}) as other:
        found = parts.look_at_hub(other.url)
    assert (found.port, found.answer) == (Port.TAKEN, None)
    assert found.problem


def test_free_port_is_free_and_left_so():
    (port,) = free_ports(1)
    url = f"http://{LOOPBACK}:{port}"
    assert parts.look_at_hub(url).port is Port.FREE
    with socket.create_server((LOOPBACK, port)):
        assert parts.port_at(url) is Port.TAKEN


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://127.0.0.1:0", Port.UNDECIDED),
        ("http://192.0.2.1:8800", Port.ELSEWHERE),
        ("http://host.invalid:8800", Port.ELSEWHERE),
        ("unix:///run/redis.sock", Port.ELSEWHERE),
        ("http://127.0.0.1:99999", Port.ELSEWHERE),
    ],
)
def test_address_that_is_no_port_of_this_machine(url, port):
    assert parts.port_at(url) is port
