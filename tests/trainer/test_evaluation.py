"""Evaluations: when they are due, what they leave, and that their failure or a stop costs no training."""

import json
import signal
import threading

import httpx
import msgspec
import pytest

from shared.configuration import EvaluationSection
from tests.services.standalone.services_at import json_service
from trainer import evaluation
from trainer.evaluation import Evaluations
from trainer.stopping import StopInterrupt, StopSignal

REPLY = {
    "version": 0,
    "results": {"calculator": {"episodes": 8, "mean_reward": 0.5, "success_rate": 0.25, "outcomes": {"completed": 8}}},
    "transcripts": [{"environment": "calculator", "task_id": "7", "reward": 1.0, "outcome": "completed", "text": "2 + 2 = 4"}],
}


class Notes:
    def __init__(self):
        self.texts = []
        self.evaluations = []

    def evaluation(self, evaluation):
        self.evaluations.append(evaluation)

    def note(self, text):
        self.texts.append(text)


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def evaluations(tmp_path, notes, monkeypatch):
    """Makes Evaluations whose agents answer by a function of the request; requests are kept in `requests`."""
    monkeypatch.setattr(evaluation, "RETRY_S", 0.0)
    made = []

    def make(answer=lambda request: httpx.Response(200, json=REPLY), **settings):
        evaluations = Evaluations(
            EvaluationSection(**{"every_updates": 2, "num_episodes": 8, **settings}),
            agents="http://agents",
            directory=tmp_path,
            num_updates=5,
            timeout_s=30.0,
            tracker=notes,
        )
        evaluations.requests = []

        def handle(request):
            evaluations.requests.append(json.loads(request.content))
            return answer(request)

        evaluations._client = httpx.Client(base_url="http://agents", transport=httpx.MockTransport(handle))
        made.append(evaluations)
        return evaluations

    yield make
    for item in made:
        item.close()


def recorded(tmp_path):
    return [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]


def test_the_agents_token_goes_with_the_request(tmp_path, notes, monkeypatch):
    monkeypatch.setenv("HEADRACE_AGENTS_TOKEN", "s3cret")
    settings = EvaluationSection(num_episodes=8, greedy=False)
    with json_service({"POST /evaluations": (200, REPLY)}) as agents:
        subject = Evaluations(settings, agents=agents.url, directory=tmp_path, num_updates=5, timeout_s=30.0, tracker=notes)
        subject.run_if_due(0, StopSignal())
        subject.close()
    assert agents.authorizations == ["Bearer s3cret"]


def test_before_the_first_update_every_second_and_after_the_last(evaluations):
    subject = evaluations(greedy=False)
    due = []
    for version in range(6):
        before = len(subject.requests)
        subject.run_if_due(version, StopSignal())
        due += [version] * (len(subject.requests) - before)
    assert due == [0, 2, 4, 5]


def test_sampled_and_greedy_are_recorded_and_transcripts_written(evaluations, notes, tmp_path):
    subject = evaluations()
    subject.run_if_due(0, StopSignal())
    assert [(told.version, told.greedy, msgspec.to_builtins(told.results)) for told in notes.evaluations] == [
        (0, False, REPLY["results"]),
        (0, True, REPLY["results"]),
    ]
    assert [request["greedy"] for request in subject.requests] == [False, True]
    assert subject.requests[0] == {"num_episodes": 8, "greedy": False, "environments": None, "transcripts": 3}
    assert [(line["version"], line["greedy"], line["results"]) for line in recorded(tmp_path)] == [
        (0, False, REPLY["results"]),
        (0, True, REPLY["results"]),
    ]
    text = (tmp_path / "transcripts" / "v00000.txt").read_text()
    assert "calculator · task 7 · reward 1 · completed" in text
    assert "2 + 2 = 4" in text


def test_a_resumed_run_repeats_no_evaluation_of_its_lineage(evaluations):
    first = evaluations(answer=lambda request: httpx.Response(200, json={**REPLY, "version": len(first.requests) // 2 * 2}))
    first.run_if_due(0, StopSignal())
    subject = evaluations()
    subject.resume(0)
    subject.run_if_due(0, StopSignal())
    assert subject.requests == []
    subject.run_if_due(2, StopSignal())
    assert len(subject.requests) == 2


def test_without_episodes_there_is_no_evaluation(evaluations):
    subject = evaluations(num_episodes=0)
    subject.run_if_due(0, StopSignal())
    assert subject.requests == []


def test_agents_that_are_not_up_yet_are_waited_for(evaluations, tmp_path):
    def refuse_twice(request):
        if len(subject.requests) <= 2:
            raise httpx.ConnectError("connection refused")
        return httpx.Response(200, json=REPLY)

    subject = evaluations(answer=refuse_twice, greedy=False)
    subject.run_if_due(0, StopSignal())
    assert len(recorded(tmp_path)) == 1


@pytest.mark.parametrize("answer", [httpx.Response(500), httpx.Response(200, json={"odd": 1}), httpx.Response(200, text="<html>")])
def test_a_failed_evaluation_is_noted_and_training_goes_on(evaluations, notes, answer):
    evaluations(answer=lambda request: answer).run_if_due(0, StopSignal())
    assert "evaluation of version 0 left out" in notes.texts[-1]


def test_engines_are_looked_after_while_the_episodes_run(evaluations, monkeypatch):
    monkeypatch.setattr(evaluation, "MEANWHILE_S", 0.001)
    looked_after = threading.Event()

    def answer_when_looked_after(request):
        assert looked_after.wait(timeout=30)
        return httpx.Response(200, json=REPLY)

    subject = evaluations(answer=answer_when_looked_after, greedy=False)
    subject.run_if_due(0, StopSignal(), meanwhile=looked_after.set)
    assert looked_after.is_set()
    assert len(subject.requests) == 1


@pytest.fixture
def installed_stop():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = StopSignal()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_stop_cuts_an_evaluation_short(evaluations, notes, installed_stop):
    is_cut = threading.Event()

    def stop_meanwhile(request):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        is_cut.wait()
        return httpx.Response(200, json=REPLY)

    evaluations(answer=stop_meanwhile).run_if_due(0, installed_stop)
    is_cut.set()
    assert notes.texts == ["evaluation of version 0 cut short"]


def test_a_stop_outside_of_waiting_interrupts_nothing():
    stop = StopSignal()
    stop._receive(signal.SIGTERM, None)
    assert stop.is_set
    with pytest.raises(StopInterrupt), stop.interrupting():
        pytest.fail("a wish that came before counts too")
