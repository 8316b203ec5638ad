import msgspec
import pytest

from services.standalone.doctor import engines
from services.standalone.doctor.engines import EngineAnswer, EngineFacts, HubView
from services.standalone.doctor.finding import Finding, Severity
from services.standalone.doctor.parts import Part, Port
from tests.services.standalone.services_at import json_service

URL = "http://10.0.0.7:30000"
PART = Part(f"engine {URL}", "engines.urls", URL, Port.ELSEWHERE, "SGLang 0.5.23")
FINE = EngineFacts(PART, EngineAnswer("0.5.23", 1, "7"), HubView(URL, "ready"), is_hub_up=True)


def rows(**changes) -> list[Finding]:
    return engines.check(msgspec.structs.replace(FINE, **changes), engine_version="0.5.23", is_run_up=True)


def test_engine_that_takes_part_has_nothing_to_do():
    assert [one.severity for one in rows()] == [Severity.OK, Severity.OK]


@pytest.mark.parametrize(
    ("answer", "found", "remedy"),
    [
        (EngineAnswer("0.5.22", 1, "7"), "SGLang 0.5.22", "inference_hub.engine_version=any"),
        (EngineAnswer("0.5.23", 2, "7"), "dp_size 2", "one engine for each replica"),
        (EngineAnswer("0.5.23", 1, None), "no weight_version in /model_info", "install SGLang 0.5.23"),
        (EngineAnswer("0.5.23", 1, "final"), "label 'final'", "python -m services.engine"),
    ],
)
def test_engine_that_cannot_take_part_is_told_why(answer, found, remedy):
    (problem,) = [one for one in rows(answer=answer) if one.severity is Severity.PROBLEM]
    assert problem.found == found
    assert remedy in problem.remedy


@pytest.mark.parametrize("label", ["default", "0", "12"])
def test_labels_that_are_policy_versions_are_fine(label):
    assert {one.severity for one in rows(answer=EngineAnswer("0.5.23", 1, label))} == {Severity.OK}


@pytest.mark.parametrize(
    ("view", "severity", "found"),
    [
        (HubView(URL, "syncing", "it holds version 6"), Severity.WARNING, "syncing: it holds version 6"),
        (HubView(URL, "suspect", "refused"), Severity.PROBLEM, "suspect: refused"),
        (None, Severity.WARNING, "not registered"),
    ],
)
def test_hubs_view_is_a_row_of_its_own(view, severity, found):
    last = rows(view=view)[-1]
    assert (last.severity, last.found) == (severity, found)


def test_without_a_hub_only_the_engine_speaks():
    assert len(rows(view=None, is_hub_up=False)) == 1


def test_engine_is_asked_for_version_parallelism_and_label():
    server_info = {"version": "0.5.23", "dp_size": 1, "tp_size": 2, "weight_version": "not this one"}
    answers = {"GET /server_info": (200, server_info), "GET /model_info": (200, {"weight_version": "7"})}
    with json_service(answers) as engine:
        facts = engines.look(engine.url, [HubView(engine.url, "ready")])
    assert facts.answer == EngineAnswer("0.5.23", 1, "7")
    assert facts.view == HubView(engine.url, "ready")


@pytest.mark.parametrize("server_info", [(200, {"name": "nginx"}), (200, []), (404, {})])
def test_listener_that_is_no_engine_has_a_reason(server_info):
    with json_service({"GET /server_info": server_info, "GET /model_info": (200, {})}) as other:
        facts = engines.look(other.url, None)
    assert facts.answer is None
    assert engines.check(facts, engine_version="any", is_run_up=False)[0].severity is Severity.PROBLEM


def test_hubs_engines_are_read_from_its_list():
    listed = [{"url": URL, "state": "ready", "problem": None, "version": 7}]
    with json_service({"GET /engines": (200, listed)}) as hub:
        assert engines.look_at_hubs_engines(hub.url) == [HubView(URL, "ready")]
    assert engines.look_at_hubs_engines(hub.url) is None
