"""Measures from update to update, on a clock that the test turns."""

import dataclasses
import threading

import pytest
import redis.asyncio

from shared.configuration import Configuration, EnginesSection, RolloutSection, RunSection
from shared.errors import EngineError
from shared.keys import Keys
from shared.ledger import AdmissionLedger, TrainingLedger
from shared.trajectory import Timings
from tests.trainer.learning import section
from tests.trainer.run_support import AcceptingHub
from trainer.hub_client import HubClient
from trainer.pipeline import EngineReading, EngineSeconds
from trainer.pipeline_watch import SAID_EVERY, WINDOW, PipelineWatch


class Run:
    """A hub's counters, a clock and the books, and what the watch says of them."""

    def __init__(self, books):
        self.books = dataclasses.replace(books, async_generation_ratio=1.0, batch_groups=2)
        self.now = 50.0
        self.ready_s = self.idle_s = 0.0
        self.is_hub_away = False
        self.reports, self.notes = [], []
        configuration = Configuration(
            run=RunSection(id="run", directory="unused", model_path="unused"),
            rollout=RolloutSection(rollout_batch_size=2),
            engines=EnginesSection(device="cuda"),
            trainer=section(),
        )
        self.watch = PipelineWatch(
            configuration,
            usage=self.usage,
            num_ranks=8,
            publish=self.reports.append,
            note=self.notes.append,
            clock=lambda: self.now,
        )

    def usage(self):
        if self.is_hub_away:
            raise EngineError("away")
        used_s = 0.75 * (self.ready_s - self.idle_s)
        return [EngineReading(name, 4, 16, None, self.ready_s, self.idle_s, used_s) for name in ("a", "b")]

    def update(self, *, seconds=10.0, wait_s=4.0, idle_s=0.0, stale_tokens=0, num_tokens=100):
        self.watch.begin()
        self.now += seconds
        self.ready_s += seconds
        self.idle_s += idle_s
        stale = self.books.discarded_tokens.get("stale", 0) + stale_tokens
        self.books = dataclasses.replace(self.books, version=self.books.version + 1, discarded_tokens={"stale": stale})
        stretch = self.watch.measure(
            self.books,
            wait_s=wait_s,
            train_s=6.0,
            timings=[Timings(0, 3, 1, 0), Timings(0, 3, 1, 0)],
            trained_tokens=num_tokens,
            unused_tokens={"masked": 0, "no_reward": 0},
        )
        self.watch.report(stretch, self.books)
        return stretch


@pytest.fixture
def hub_address():
    with AcceptingHub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


@pytest.fixture
def run(redis_client, keys):
    return Run(TrainingLedger(redis_client, keys).books())


def test_an_update_lasts_from_the_end_of_the_one_before_it(run):
    run.watch.begin()
    run.now += 3
    first = run.update(seconds=7)
    assert (first.update_s, first.engines) == (10, EngineSeconds(14, 0, 10.5, 14))
    second = run.update(seconds=20, idle_s=5)
    assert (second.update_s, second.wait_share, second.trainer_idle_share) == (20, 0.2, 0.7)
    assert (second.engines.idle_share, second.episode_s) == (0.25, 4)


def test_what_was_discarded_before_this_process_began_is_not_counted_again(run):
    run.books = dataclasses.replace(run.books, discarded_tokens={"stale": 1000})
    assert run.update().discarded_tokens.get("stale", 0) == 0
    assert run.update(stale_tokens=30).discarded_tokens["stale"] == 30


def test_updates_that_fill_the_pipeline_are_not_reported(run):
    """α = 1: groups of two batches begin before the first update."""
    for _ in range(2):
        run.update(seconds=1000, wait_s=999)
    assert run.reports == []
    run.update()
    assert (run.reports[0].updates, run.reports[0].wait_share, run.reports[0].version) == (1, 0.4, 3)


def test_a_report_is_of_the_newest_updates(run):
    for _ in range(WINDOW + 5):
        run.update(wait_s=4)
    for _ in range(WINDOW):
        run.update(wait_s=1, stale_tokens=25)
    report = run.reports[-1]
    assert (report.updates, report.update_s, report.wait_share) == (WINDOW, 10, pytest.approx(0.1))
    assert report.discarded_token_shares == {"stale": 0.2}
    assert report.episode_shares == {"queued": 0, "generating": 0.75, "environment": 0.25, "reward": 0}


def test_advice_is_said_now_and_then_and_at_the_end(run):
    """2 engines of 4 GPUs and 8 ranks: S = 80 GPU-s in 10 s, C = 6 s. 12 and 4 would take 12 s, so nothing moves."""
    for _ in range(2 * SAID_EVERY):
        run.update()
    sentence = run.reports[-1].advice[0]
    assert sentence.startswith("training waits 40% of the time for data, and the engines are busy 100% of it: 2 more engines")
    assert run.notes == [f"advice: {sentence}"] * 2
    run.watch.summarise()
    assert run.notes[2:] == [
        "18 updates of 10.0 s: training waited 40% of the time for data, engines were idle 0%, 0.0% of the sampled tokens were "
        "discarded",
        f"advice: {sentence}",
    ]


def test_a_run_that_ends_before_anything_is_measured_says_nothing(run):
    run.watch.summarise()
    run.update()
    run.watch.summarise()
    assert run.notes == []


def test_a_hub_that_is_away_costs_the_engines_share_until_it_is_back(run):
    run.update()
    run.update()
    run.is_hub_away = True
    assert run.update(idle_s=10).engines == EngineSeconds()
    assert run.reports[-1].engine_idle_share is None
    run.is_hub_away = False
    assert run.update(idle_s=0).engines.idle_share == 0.5, "of both updates"


def test_fallen_back_updates_are_counted(run):
    run.books = dataclasses.replace(run.books, synchronous_until=2)
    assert [run.update().num_fallen_back for _ in range(3)] == [1, 0, 0]


async def test_every_process_of_the_run_finds_the_report(run, redis_client, redis_url, keys):
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        ledger = AdmissionLedger(client, keys)
        assert await ledger.pipeline() is None
        for _ in range(3):
            run.update()
        TrainingLedger(redis_client, keys).report_pipeline(run.reports[0])
        assert await ledger.pipeline() == run.reports[0]
        redis_client.set(keys.pipeline, b'{"version": "another release"}')
        assert await ledger.pipeline() is None
        assert await AdmissionLedger(client, Keys("another")).pipeline() is None


def test_the_hub_tells_its_counters(hub_address):
    client = HubClient(hub_address, timeout_s=10)
    assert client.usage() == [EngineReading("e", 1, 8, None, 9.0, 3.0, 2.0)]
    client.close()
