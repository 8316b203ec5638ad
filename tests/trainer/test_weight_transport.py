"""Weights through a real gloo group to other processes that join as engines do."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from shared.errors import WeightUpdateError
from tests.trainer.engine_peer import join as join_group
from tests.trainer.weights import buckets_of, weights
from trainer.weight_transport import GLOO_INTERFACE, AbandonedRendezvous, WeightGroup, listen, listening_at

TIMEOUT = timedelta(seconds=60)


def describe(buckets):
    return buckets and [{"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes} for bucket in buckets]


@pytest.fixture
def engines(repository):
    """Starts peers of a group, and ends those that still run."""
    processes = []

    def start(store, name, count, buckets, folder):
        outputs = [folder / f"received-{rank}.pt" for rank in range(1, count + 1)]
        for rank, output in enumerate(outputs, start=1):
            script = repository / "tests" / "trainer" / "engine_peer.py"
            arguments = ["127.0.0.1", str(store.port), str(rank), str(count + 1), name, json.dumps(describe(buckets)), str(output)]
            processes.append(subprocess.Popen([sys.executable, str(script), *arguments], stdin=subprocess.PIPE))
        return outputs

    start.processes = processes
    yield start
    for process in processes:
        process.stdin.close()
        process.kill()
        process.wait()


def test_two_engines_receive_every_tensor_bit_for_bit(one_rank, engines, tmp_path):
    store = listen("127.0.0.1", timeout=TIMEOUT)
    buckets = buckets_of(torch.float32)
    outputs = engines(store, "group-of-two", 2, buckets, tmp_path)
    group = WeightGroup(store, name="group-of-two", world_size=3, backend="gloo", timeout=TIMEOUT)
    for bucket in buckets:
        group.broadcast(bucket.data, timeout_s=60, is_hopeless=lambda: False)
    for process in engines.processes:
        assert process.wait(60) == 0
    group.close()
    for output in outputs:
        received = torch.load(output)
        assert all(torch.equal(received[name], weight) for name, weight in weights())


def test_engines_that_come_to_an_abandoned_rendezvous_are_let_go_long_before_their_deadline(one_rank):
    port = listen("127.0.0.1", timeout=TIMEOUT).port
    abandoned = AbandonedRendezvous("127.0.0.1", port)
    for name in ("late", "later"):
        with pytest.raises(RuntimeError, match="Connection was likely closed"):
            join_group("127.0.0.1", port, 1, 2, name, timeout=timedelta(minutes=30))
    abandoned.close()


def test_an_engine_that_dies_fails_the_broadcast_and_a_new_group_serves(one_rank, engines, tmp_path):
    store = listen("127.0.0.1", timeout=TIMEOUT)
    engines(store, "doomed", 1, [], tmp_path)
    group = WeightGroup(store, name="doomed", world_size=2, backend="gloo", timeout=TIMEOUT)
    engines.processes[0].wait(60)
    with pytest.raises(WeightUpdateError, match="doomed"):
        group.broadcast(torch.zeros(2**26, dtype=torch.uint8), timeout_s=60, is_hopeless=lambda: False)
    group.close()

    store = listen("127.0.0.1", timeout=TIMEOUT)
    (bucket,) = buckets_of(torch.float32, bucket_bytes=10_000)
    (output,) = engines(store, "successor", 1, [bucket], tmp_path)
    group = WeightGroup(store, name="successor", world_size=2, backend="gloo", timeout=TIMEOUT)
    group.broadcast(bucket.data, timeout_s=60, is_hopeless=lambda: False)
    assert engines.processes[1].wait(60) == 0
    group.close()
    assert set(torch.load(output)) == {name for name, _ in weights()}


def test_engines_that_never_come_are_a_sentence(one_rank):
    store = listen("127.0.0.1", timeout=timedelta(seconds=1))
    with pytest.raises(WeightUpdateError, match="the 1 engine ranks did not all join"):
        WeightGroup(store, name="lonely", world_size=2, backend="gloo", timeout=timedelta(seconds=1))


@pytest.mark.parametrize("ends_by", ["its deadline", "the hub's word that the engine failed"])
def test_an_engine_that_hangs_does_not_hang_the_trainer(one_rank, engines, tmp_path, ends_by):
    name = f"hanging-{len(ends_by)}"
    store = listen("127.0.0.1", timeout=TIMEOUT)
    engines(store, name, 1, None, tmp_path)
    group = WeightGroup(store, name=name, world_size=2, backend="gloo", timeout=TIMEOUT)
    too_much_to_buffer = torch.zeros(2**26, dtype=torch.uint8)
    with pytest.raises(WeightUpdateError, match="did not end"):
        group.broadcast(
            too_much_to_buffer,
            timeout_s=1 if ends_by == "its deadline" else 60,
            is_hopeless=lambda: ends_by != "its deadline",
        )
    group.close()
    assert engines.processes[0].poll() is None


def test_gloo_is_told_the_interface_of_the_address_it_has_to_listen_at(monkeypatch):
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    with listening_at("127.0.0.1"):
        assert os.environ[GLOO_INTERFACE] == "lo"
    assert GLOO_INTERFACE not in os.environ
    with listening_at("192.0.2.200"):
        assert GLOO_INTERFACE not in os.environ


def test_interface_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv(GLOO_INTERFACE, "eth7")
    with listening_at("127.0.0.1"):
        assert os.environ[GLOO_INTERFACE] == "eth7"
    assert os.environ[GLOO_INTERFACE] == "eth7"
