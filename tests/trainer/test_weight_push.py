"""The exchange with the hub, over real HTTP and a real gloo group; the hub is scripted, to fail where it should."""

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from shared.configuration import WeightPushSection
from shared.errors import ConfigurationError, EngineError, WeightUpdateError
from trainer import weight_push
from trainer.hub_client import HubClient, NoEngineError
from trainer.weight_buckets import WeightSource
from trainer.weight_push import WeightPusher, reachable_address

WEIGHTS = [("a.weight", torch.arange(12.0).reshape(3, 4)), ("b.weight", torch.ones(5))]
SOURCE = WeightSource.of(WEIGHTS)
COMMIT = {
    "version": 3,
    "engines": ["http://127.0.0.1:9"],
    "left_out": {},
    "is_verified": True,
    "pause_s": 0.05,
    "pause_call_s": 0.01,
    "load_s": 0.03,
    "verify_s": 0.0,
    "resume_s": 0.01,
}


class Hub(ThreadingHTTPServer):
    """Answers as the inference hub does. `refusals` are (path prefix, status, body) to answer once each, first match first."""

    def __init__(self, script, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.folder = script, folder
        self.calls, self.refusals, self.engines = [], [], []
        self.num_groups = 0
        self.world_size = 2
        self.was_listening = []
        self.description = None
        self.listed = [{"id": "e", "url": "http://127.0.0.1:9", "state": "ready"}]
        self.notices = []
        self.weights = {"version": 0, "epoch": "initial", "ready_engines": 0, "wanting_engines": []}

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method, path, body):
        self.calls.append((method, path.split("/")[1], path.rpartition("/")[2] if path.count("/") > 1 else "", body))
        for refusal in self.refusals:
            if path.startswith(refusal[0]):
                self.refusals.remove(refusal)
                return refusal[1:]
        if path == "/weight_groups":
            return 200, self.form_group(body)
        if path == "/weight_updates":
            return 200, {"update_id": "u1"}
        if path.endswith("/ready"):
            self.was_listening.append(self.is_trainer_listening())
        if path == "/engines":
            return 200, self.listed
        if path == "/weights":
            return 200, self.weights
        if path.endswith("/quarantine"):
            self.listed = [engine for engine in self.listed if engine["id"] != path.split("/")[2]]
            return 200, {}
        is_last = path.endswith("/buckets") and body["is_last"]
        return 200, {"state": "committed", "report": COMMIT} if is_last else {"state": "loading"}

    def form_group(self, body):
        self.num_groups += 1
        name = f"headrace-{body['epoch']}-{self.num_groups}"
        self.master = (body["master_address"], body["master_port"])
        arguments = [*map(str, self.master), "1", str(self.world_size), name, json.dumps(self.description)]
        output = self.folder / f"engine-{self.num_groups}.pt"
        self.engines.append(subprocess.Popen([sys.executable, str(self.script), *arguments, str(output)], stdin=subprocess.PIPE))
        engines = [{"id": "e", "url": "http://127.0.0.1:9", "rank_offset": 1}]
        return {"group_name": name, "world_size": self.world_size, "engines": engines}

    def is_trainer_listening(self):
        with socket.socket() as knock:
            return knock.connect_ex(self.master) == 0

    def received(self):
        assert self.engines[-1].wait(60) == 0
        return torch.load(self.folder / f"engine-{self.num_groups}.pt")


class Handler(BaseHTTPRequestHandler):
    def respond(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        status, reply = self.server.answer(self.command, self.path, body)
        payload = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_DELETE = respond

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(repository, tmp_path):
    with Hub(repository / "tests" / "trainer" / "engine_peer.py", tmp_path) as hub:
        hub.description = [
            {"names": ["a.weight"], "dtypes": ["float32"], "shapes": [[3, 4]]},
            {"names": ["b.weight"], "dtypes": ["float32"], "shapes": [[5]]},
        ]
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()
        for engine in hub.engines:
            engine.stdin.close()
            engine.kill()
            engine.wait()


@pytest.fixture
def pusher(hub, one_rank, monkeypatch):
    monkeypatch.setattr(weight_push, "RETRY_S", 0.01)
    monkeypatch.setattr(weight_push, "MIB", 48)
    pusher = new_pusher(hub.address, notice=hub.notices.append)
    yield pusher
    pusher.close()


def new_pusher(address, *, patience_s=30.0, timeout_s=30.0, notice=lambda _: None, **options):
    settings = WeightPushSection(backend="gloo", bucket_mib=1, timeout_s=timeout_s)
    return WeightPusher(
        HubClient(address, timeout_s=30.0),
        settings,
        dtype=torch.float32,
        device=torch.device("cpu"),
        patience_s=patience_s,
        notice=notice,
        **options,
    )


def paths(hub):
    return [" ".join(filter(None, (method, first, last))) for method, first, last, _ in hub.calls]


FORMED = ["GET engines", "POST weight_groups", "POST weight_groups ready"]


def test_a_push_follows_the_exchange_and_every_bit_arrives(hub, pusher):
    times = pusher.push(SOURCE, 3)
    buckets = ["POST weight_updates buckets", "POST weight_updates buckets"]
    assert paths(hub) == [*FORMED, "POST weight_updates", *buckets]
    assert hub.calls[3][3] == {"group_name": hub.calls[3][3]["group_name"], "version": 3, "mode": "in_place", "rolling": False}
    bodies = [body for _, _, last, body in hub.calls if last == "buckets"]
    assert [body["is_last"] for body in bodies] == [False, True]
    assert [body.get("commit") for body in bodies] == [None, {"checksums": {}}]
    assert all(body["load_format"] == "flattened_bucket" for body in bodies)
    received = hub.received()
    assert all(torch.equal(received[name], weight) for name, weight in WEIGHTS)
    assert (times.pause_s, times.load_s) == (0.05, 0.03)


def test_the_group_is_kept_from_push_to_push(hub, pusher):
    hub.description *= 2
    pusher.push(SOURCE, 3)
    pusher.push(SOURCE, 4)
    assert hub.num_groups == 1


def test_a_stale_group_is_formed_anew_in_the_same_epoch(hub, pusher):
    pusher.push(SOURCE, 3)
    hub.refusals.append(("/weight_updates", 409, {"detail": "an engine joined", "code": "group_stale"}))
    pusher.push(SOURCE, 4)
    epochs = [body["epoch"] for method, first, last, body in hub.calls if (method, first, last) == ("POST", "weight_groups", "")]
    assert len(epochs) == 2
    assert len(set(epochs)) == 1
    assert set(hub.received()) == {"a.weight", "b.weight"}


def test_without_an_engine_the_trainer_waits_for_one(hub, pusher):
    hub.listed = [{"id": "e", "url": "http://127.0.0.1:9", "state": "joining", "problem": "it must be SGLang 0.5.23, got 0.4"}]
    hub.refusals += [("/weight_groups", 409, {"detail": "no engine", "code": "no_engine"})] * 7
    pusher.push(SOURCE, 0)
    assert set(hub.received()) == {"a.weight", "b.weight"}
    [notice] = hub.notices
    assert notice.startswith("waiting for at most 30 s: one of the inference hub's 1 engines must be able to take weights")
    assert notice.endswith("http://127.0.0.1:9 is joining: it must be SGLang 0.5.23, got 0.4")


def test_a_wait_for_engines_that_was_in_vain_ends_in_their_problems(hub, one_rank):
    hub.listed = []
    hub.refusals += [("/weight_groups", 409, {"detail": "no engine", "code": "no_engine"})] * 99
    pusher = new_pusher(hub.address, patience_s=0.0)
    with pytest.raises(NoEngineError, match="an engine must be registered at the inference hub, and none is; list it"):
        pusher.push(SOURCE, 0)
    pusher.close()


def test_a_failed_load_is_abandoned_and_the_whole_set_is_sent_again(hub, pusher):
    hub.refusals.append(("/weight_updates/u1/buckets", 502, {"detail": "engine e failed to load", "code": None}))
    pusher.push(SOURCE, 3)
    assert "DELETE weight_updates u1" in paths(hub)
    assert hub.num_groups == 2
    assert set(hub.received()) == {"a.weight", "b.weight"}


def test_a_load_that_fails_every_time_ends_in_the_hubs_sentence(hub, pusher, monkeypatch):
    monkeypatch.setattr(weight_push, "MAX_FAILURES", 2)
    hub.description = None  # Engines join, and never take part in a broadcast.
    hub.refusals += [("/weight_updates/u1/buckets", 502, {"detail": "engine e has no weight of that name", "code": None})] * 99
    with pytest.raises(WeightUpdateError, match="engine e has no weight of that name"):
        pusher.push(SOURCE, 3)
    assert hub.num_groups == 2


def test_a_gathering_is_gone_through_before_the_next_attempt_begins_one(hub, pusher, monkeypatch):
    """Over ZeRO-3 the other ranks take part in it: two at a time would never end."""
    monkeypatch.setattr(weight_push, "MAX_FAILURES", 2)
    hub.description = None
    hub.refusals += [("/weight_updates", 409, {"detail": "not now", "code": None})] * 99
    moments = []

    def gather():
        moments.append("begins")
        try:
            for name in "abcd":
                yield name, torch.ones(12)
        finally:
            moments.append("ends")

    with pytest.raises(WeightUpdateError, match="not now"):
        pusher.push(WeightSource(gather, 48), 3)
    assert moments == ["begins", "ends"] * 2


def test_engines_that_came_are_let_go_before_the_hub_is_asked_which_one_did_not(hub, one_rank, monkeypatch):
    monkeypatch.setattr(weight_push, "MAX_FAILURES", 1)
    hub.world_size = 3
    pusher = new_pusher(hub.address, timeout_s=1.0)
    with pytest.raises(WeightUpdateError, match="the 2 engine ranks did not all join"):
        pusher.push(SOURCE, 3)
    assert hub.was_listening == [False], "its store is what they wait at"
    pusher.close()


def test_a_hub_that_is_away_is_a_sentence(one_rank, free_port):
    pusher = new_pusher(f"http://127.0.0.1:{free_port}", patience_s=0.0)
    with pytest.raises(EngineError, match=f"the inference hub at http://127.0.0.1:{free_port} must answer GET /engines"):
        pusher.push(SOURCE, 0)
    pusher.close()


def test_an_answer_that_is_not_the_hubs_is_a_sentence(hub, pusher, monkeypatch):
    monkeypatch.setattr(weight_push, "MAX_FAILURES", 1)
    hub.refusals.append(("/engines", 200, {"something": "else"}))
    with pytest.raises(WeightUpdateError, match="answered GET /engines with status 200"):
        pusher.push(SOURCE, 0)


def test_engines_on_this_machine_are_reached_by_loopback():
    assert reachable_address(["http://127.0.0.1:30000", "http://localhost:30001"]) == "127.0.0.1"


def test_once_weights_were_pushed_no_engine_defers_a_push_and_the_next_question_makes_it(hub, pusher):
    pusher.push(SOURCE, 3)
    hub.listed = []
    hub.refusals += [("/weight_updates", 409, {"detail": "an engine died", "code": "group_stale"})]
    hub.refusals += [("/weight_groups", 409, {"detail": "no engine", "code": "no_engine"})]
    assert pusher.push(SOURCE, 4).is_deferred
    assert "version 4 waits for an engine" in hub.notices[-1]
    assert not pusher.catch_up(SOURCE, 4)
    hub.listed = [{"id": "e", "url": "http://127.0.0.1:9", "state": "syncing"}]
    hub.weights |= {"version": 3, "wanting_engines": ["e"]}
    assert pusher.catch_up(SOURCE, 4)
    assert hub.calls[-1][2] == "buckets"
    assert hub.calls[-1][3]["commit"] == {"checksums": {}}, "verified after a failure"
    assert [body["engine_ids"] for _, first, last, body in hub.calls if (first, last) == ("weight_groups", "")] == [None] * 3


def test_an_engine_that_joins_late_is_brought_up_alone(hub, pusher):
    pusher.push(SOURCE, 3)
    epoch = next(body["epoch"] for _, first, last, body in hub.calls if (first, last) == ("weight_groups", ""))
    hub.weights = {"version": 3, "epoch": epoch, "ready_engines": 1, "wanting_engines": []}
    num_calls = len(hub.calls)
    assert pusher.catch_up(SOURCE, 3)
    assert paths(hub)[num_calls:] == ["GET weights"]
    hub.weights |= {"wanting_engines": ["e"]}
    assert pusher.catch_up(SOURCE, 3)
    forming = [body for _, first, last, body in hub.calls if (first, last) == ("weight_groups", "")][-1]
    assert forming["engine_ids"] == ["e"]
    assert set(hub.received()) == {"a.weight", "b.weight"}


MISFIT = {"id": "other", "url": "http://127.0.0.1:10", "state": "syncing", "model_path": "/models/other"}


def refuse_misfit(url, model_path):
    if model_path == MISFIT["model_path"]:
        raise ConfigurationError(f"engine {url} has other weights")


def test_an_engine_of_another_model_ends_a_run_before_its_first_push(hub, one_rank):
    pusher = new_pusher(hub.address, check_model=refuse_misfit)
    hub.listed.append(MISFIT)
    with pytest.raises(ConfigurationError, match=r"engine http://127\.0\.0\.1:10 has other weights"):
        pusher.push(SOURCE, 0)
    assert hub.num_groups == 0
    pusher.close()


def test_an_engine_of_another_model_that_joins_later_is_left_out_and_said(hub, one_rank):
    pusher = new_pusher(hub.address, check_model=refuse_misfit, notice=hub.notices.append)
    pusher.push(SOURCE, 3)
    hub.listed.append(MISFIT)
    hub.refusals.append(("/weight_updates", 409, {"detail": "an engine joined", "code": "group_stale"}))
    assert not pusher.push(SOURCE, 4).is_deferred
    assert MISFIT not in hub.listed
    sentence = "engine http://127.0.0.1:10 has other weights"
    assert [body for method, _, last, body in hub.calls if (method, last) == ("POST", "quarantine")] == [{"problem": sentence}]
    assert f"training goes on without an engine: {sentence}" in hub.notices
    pusher.close()


def test_a_push_whose_answer_was_lost_is_not_made_twice(hub, pusher):
    hub.refusals.append(("/weight_updates", 409, {"detail": "version 3 is in force", "code": "already_in_force"}))
    assert pusher.push(SOURCE, 3).pause_s == 0.0
    assert "POST weight_updates buckets" not in paths(hub)


def test_rolling_pushes_go_to_one_group_after_the_other(hub, one_rank, monkeypatch):
    monkeypatch.setattr(weight_push, "MIB", 48)
    hub.listed = [{"id": name, "url": "http://127.0.0.1:9", "state": "ready"} for name in ("x", "y", "z")]
    settings = WeightPushSection(backend="gloo", bucket_mib=1, timeout_s=30.0, rolling_groups=2)
    client = HubClient(hub.address, timeout_s=30.0)
    cpu = torch.device("cpu")
    pusher = WeightPusher(client, settings, dtype=torch.float32, device=cpu, patience_s=30.0, notice=hub.notices.append)
    times = pusher.push(SOURCE, 3)
    forming = [body for _, first, last, body in hub.calls if (first, last) == ("weight_groups", "")]
    begun = [body for _, first, last, body in hub.calls if (first, last) == ("weight_updates", "")]
    assert [body["engine_ids"] for body in forming] == [["x", "z"], ["y"]]
    assert [(body["version"], body["rolling"]) for body in begun] == [(3, True)] * 2
    assert len({body["group_name"] for body in begun}) == 2
    assert times.pause_s == 2 * COMMIT["pause_s"]
    pusher.close()
