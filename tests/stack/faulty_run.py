"""Agents, Redis and a trainer's inlet as a run has them, each to be killed: real processes, and no engine to wait for."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import redis

from benchmarks.stream_history import StreamHistory, read_stream_history
from benchmarks.timeline import Timeline
from services.standalone.ports import LOOPBACK, free_ports
from services.standalone.redis_server import redis_command, redis_executable, write_access
from shared.configuration import (
    Configuration,
    EnvAgentsSection,
    InferenceHubSection,
    RedisSection,
    RolloutSection,
    RunSection,
    TrainerSection,
)
from shared.environment_spec import EnvironmentSpec
from shared.keys import Keys
from shared.ledger import Books, TrainingLedger
from shared.stream import TrajectoryConsumer
from tests.stack.token_server import TokenServer
from trainer.redis_connection import impatient_client, patient_client
from trainer.rollouts import RolloutReader

DEADLINE_S = 90.0
POLL_S = 0.02
LEASE_S = 1.0
UPDATES_BETWEEN_CHECKPOINTS = 3
ROLLOUT = RolloutSection(rollout_batch_size=4, num_return_sequences_in_group=4, async_generation_ratio=1)
NUM_PLACES = 8
"""(0 + 1 + α) · B."""


def wait_until(predicate: Callable[[], bool], *, description: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not predicate():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s in vain until {description}"
        time.sleep(POLL_S)


class Consumer:
    """What of the trainer touches Redis: reads batches, publishes versions, acknowledges checkpoints; in a thread of its own.

    Weights are put in force at the hub before they are published, as the trainer does.
    """

    def __init__(self, url: str, keys: Keys, hub: TokenServer) -> None:
        self._url, self._keys, self._hub = url, keys, hub
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.version = 0
        self.trajectory_ids: list[str] = []
        """Of all that it trained on, in order."""
        self.error: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with patient_client(self._url) as client, impatient_client(self._url) as reading:
                self._consume(client, reading)
        except BaseException as error:
            self.error = error

    def _consume(self, client: redis.Redis, reading: redis.Redis) -> None:
        ledger = TrainingLedger(client, self._keys)
        ledger.create_consumer_group()
        reader = RolloutReader(TrajectoryConsumer(reading, self._keys, ledger), ledger, ROLLOUT, timeout_s=DEADLINE_S)
        while selection := reader.next_batch(self.version, progress=lambda *_: None, is_stopped=self._is_stopped.is_set):
            self._hub.version = self.version + 1
            ledger.publish(self.version + 1, [group.group_id for group in selection.batch])
            self.version += 1
            self.trajectory_ids += [episode.trajectory_id for group in selection.batch for episode in group.episodes]
            if self.version % UPDATES_BETWEEN_CHECKPOINTS == 0:
                ledger.acknowledge(self.version)
            reader.give_up_stale(self.version)


class FaultyRun:
    """A run in `folder`. Whatever was started has ended when `stack` is closed."""

    def __init__(self, folder: Path, model: Path, hub: TokenServer, stack: ExitStack, timeline: Timeline) -> None:
        self.timeline = timeline
        stack.callback(self._add_what_agents_noticed)
        self._name_by_pid: dict[int, str] = {}
        [self._port] = free_ports(1)
        self.url = f"redis://{LOOPBACK}:{self._port}/0"
        self.keys = Keys("faults")
        self._folder, self._stack = folder, stack
        self._run_file = folder / "run.yaml"
        self._run_file.write_bytes(msgspec.yaml.encode(self._configuration(model, hub)))
        (folder / "redis").mkdir()
        self._redis = self._start_redis()
        self._client = stack.enter_context(redis.Redis.from_url(self.url, socket_timeout=5))
        self.consumer = Consumer(self.url, self.keys, hub)

    def start_agents(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.env_agents", "--config", str(self._run_file)]
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self._stack.callback(_end, process)
        self.timeline.note(name, f"started as process {process.pid}")
        self._name_by_pid[process.pid] = name
        return process

    def kill_agents(self, process: subprocess.Popen[bytes]) -> None:
        self.timeline.fault(self._name_by_pid[process.pid], "SIGKILL")
        _end(process)

    def kill_redis(self) -> None:
        self.timeline.fault("redis", "SIGKILL")
        _end(self._redis)

    def restart_redis(self) -> None:
        """On the same port and append-only file."""
        self._redis = self._start_redis()
        self.timeline.note("redis", "started again on its append-only file, and answers")

    def wait_until(self, predicate: Callable[[], bool], *, description: str) -> None:
        """As the function of that name, with a line in the timeline."""
        began = time.monotonic()
        wait_until(predicate, description=description)
        self.timeline.recovered("run", f"{description}: after {time.monotonic() - began:.2f} s")

    def books(self) -> Books:
        books = TrainingLedger(self._client, self.keys).books()
        assert books.is_balanced, books
        return books

    def processes(self) -> dict[str, int]:
        """Owners that live, by their number of episodes."""
        reply = TrainingLedger(self._client, self.keys)._run("processes")
        return {reply[index].decode(): reply[index + 1] for index in range(0, len(reply), 2)}

    def wait_for_updates(self, count: int, *, description: str) -> None:
        """More of them than there are now; whatever polls sees balanced books."""
        goal = self.consumer.version + count

        def is_there() -> bool:
            assert self.consumer.error is None, self.consumer.error
            self.books()
            return self.consumer.version >= goal

        self.wait_until(is_there, description=f"{count} more updates, because {description}")

    def settle(self) -> Books:
        """Ends the consumer and waits until the agents have filled every place: nothing runs any more."""
        self.consumer.stop()
        assert self.consumer.error is None, self.consumer.error
        self.wait_until(lambda: self.books().running == 0 and self.books().ready == NUM_PLACES, description="everything is ready")
        return self.books()

    def history(self) -> StreamHistory:
        return read_stream_history(self._folder / "redis", self.keys)

    def owners(self) -> set[str]:
        """Agent processes that ever had a group."""
        return {owner for owners in self.history().owners.values() for owner in owners}

    def stream_ids(self) -> set[bytes]:
        return {entry_id for entry_id, _ in self._client.xrange(self.keys.trajectories)}

    def _add_what_agents_noticed(self) -> None:
        for name in self._name_by_pid.values():
            for line in (self._folder / f"{name}.log").read_text().splitlines():
                if " WARNING " in line or " ERROR " in line:
                    self.timeline.noticed(name, line)

    def _start_redis(self) -> subprocess.Popen[bytes]:
        directory = self._folder / "redis"
        access_file = write_access(directory, None)
        command = redis_command(redis_executable(), port=self._port, directory=directory, access_file=access_file)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._stack.callback(_end, process)
        with redis.Redis.from_url(self.url, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 400)) as client:
            client.ping()
        return process

    def _configuration(self, model: Path, hub: TokenServer) -> Configuration:
        guessing = EnvironmentSpec(name="guessing", import_path="tests.stack.guessing:Guessing")
        return Configuration(
            run=RunSection(self.keys.run_id, str(self._folder / "run"), str(model)),
            rollout=ROLLOUT,
            redis=RedisSection(self.url),
            inference_hub=InferenceHubSection(port=hub.port),
            env_agents=EnvAgentsSection(
                port=0, renderer="qwen3", lease_s=LEASE_S, import_allowlist=("tests.stack",), environments=(guessing,)
            ),
            trainer=TrainerSection(num_updates=1),
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """As a crash would."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
