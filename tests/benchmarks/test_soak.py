"""What the soak takes for growth, and for a leak."""

import uuid

import pytest

from benchmarks.soak import growth
from benchmarks.soak.plot import plot
from benchmarks.soak.sampling import ProcessSample, Sample, sizes
from shared.configuration import RolloutSection


def sample(at_s: float, rss_mb: float = 100.0, *, tasks: int = 10, memory_mb: float = 5.0, **sizes: int) -> Sample:
    processes = {
        "hub": ProcessSample(rss_mb, num_files=20, num_connections=10, num_threads=4, num_tasks=tasks),
        "redis": ProcessSample(8.0, num_files=9, num_connections=5, num_threads=4),
    }
    return Sample(at_s, 1, processes, memory_mb, redis_clients=3, sizes=sizes)


def test_growth_is_between_the_medians_of_both_ends_after_the_warm_up():
    samples = [sample(10.0 * index, rss) for index, rss in enumerate([1, 2, 100, 102, 500, 101, 104, 103, 105, 106, 108, 107])]
    counted = growth.after_warm_up(samples, 20.0)
    assert len(counted) == 10
    found = growth.growth(counted, "hub", "rss_mb")
    assert (found.first, found.last) == (101.0, 107.5)
    assert found.share == pytest.approx(6.5 / 101)


def test_memory_may_grow_by_a_twentieth_under_load_and_tasks_by_a_few_between_rests():
    rests = (sample(0.5), sample(2.0, 200.0, tasks=14))
    quiet = [sample(0.0), sample(1.0, 104.9, tasks=500, memory_mb=5.9)]
    assert growth.leaked(growth.all_growth(quiet, rests)) == []
    leaking = [sample(0.0), sample(1.0, 105.1, memory_mb=6.1)]
    assert {
        (one.part, one.quantity) for one in growth.leaked(growth.all_growth(leaking, (sample(0.5), sample(2.0, tasks=15))))
    } == {
        ("hub", "rss_mb"),
        ("hub", "num_tasks"),
        ("redis", "used_memory_mb"),
    }


def test_quantity_that_a_process_does_not_tell_is_left_out():
    assert growth.growth([sample(0.0)], "redis", "num_tasks") is None


def test_keys_that_are_left_when_nothing_runs_are_leaks():
    rollout = RolloutSection(rollout_batch_size=4, num_return_sequences_in_group=8, async_generation_ratio=0.5)
    counts = {"num_live_groups": 3, "num_environments": 1}
    needed = sample(0.0, groups=3, ready=1, unsaved=2, cursors=1, trajectories=24, finished=30, requeued=6)
    assert growth.leaked_keys(needed, rollout, **counts) == []
    left = sample(0.0, groups=4, owners=1, trajectories=25, finished=31, requeued=7)
    assert growth.leaked_keys(left, rollout, **counts) == [
        "requeued has 7, at most 6 are needed",
        "trajectories has 25, at most 24 are needed",
        "finished has 31, at most 30 are needed",
        "owners has 1, at most 0 are needed",
        "groups has 4, at most 3 are needed",
    ]


def test_key_that_nobody_documents_is_a_leak():
    at_rest = sample(0.0, **{"groups": 1, "recent:calculator": 3, "headrace:{other}:groups": 1})
    assert growth.unknown_keys(at_rest, ["groups", "recent"]) == ["headrace:{other}:groups"]


def test_sizes_are_of_every_kind_of_key_that_a_run_has(serve_redis):
    import redis

    run = uuid.uuid4().hex
    with redis.Redis.from_url(serve_redis()) as client:
        client.hset(f"{run}:hash", mapping={"a": 1, "b": 2})
        client.zadd(f"{run}:zset", {"a": 1})
        client.rpush(f"{run}:list", 1, 2, 3)
        client.xadd(f"{run}:stream", {"a": 1})
        client.set(f"{run}:string", "long")
        assert sizes(client, f"{run}:") == {"hash": 2, "zset": 1, "list": 3, "stream": 1, "string": 1}


def test_plot_is_a_picture(tmp_path):
    plot([sample(0.0), sample(5.0)], tmp_path / "memory.png", warm_up_s=2.0)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
