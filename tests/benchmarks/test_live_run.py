"""The processes of a run by name, from their command lines alone, and what of their output gets into a timeline."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.chaos.chaos import Chaos
from benchmarks.live_run import _name, run_file
from benchmarks.timeline import Mark, Timeline
from services.engine.launch import engine_command
from services.standalone import processes
from shared import strict_yaml
from shared.configuration import Configuration

RUN_FILE = Path("runs/x/run.yaml")


@pytest.fixture
def configuration(tmp_path) -> Configuration:
    raw = run_file(tmp_path / "run", tmp_path / "policy", seed=0, lease_s=5.0)
    decoded = strict_yaml.decode(raw, Configuration, source="test")
    engines = msgspec.structs.replace(decoded.engines, urls=("http://127.0.0.1:7001", "http://127.0.0.1:7002"))
    return msgspec.structs.replace(decoded, engines=engines)


def test_every_process_of_a_run_has_its_name(configuration):
    specs = [
        processes.redis_process("redis-server", port=7000, directory=Path("redis"), access_file=Path("access.conf")),
        *(
            processes.engine_process(configuration, RUN_FILE, index=index, port=7001 + index, num_cores=2, devices=())
            for index in (0, 1)
        ),
        processes.hub_process(RUN_FILE),
        processes.agents_process(RUN_FILE),
        processes.agents_process(RUN_FILE, index=1, port=7003),
        processes.trainer_process(configuration, RUN_FILE, master_port=7004, num_cores=2, devices=()),
    ]
    assert [_name(list(spec.command), configuration) for spec in specs] == [spec.name for spec in specs]


def test_engine_keeps_its_name_when_it_has_become_sglang(configuration):
    assert _name(list(engine_command(configuration, host="127.0.0.1", port=7002)), configuration) == "engine-1"


@pytest.mark.parametrize("words", [[], ["python", "-I", "-S", "leash.py", "1", "redis-server"], ["python", "-m", "http.server"]])
def test_process_that_is_no_part_of_a_run_has_no_name(configuration, words):
    assert _name(words, configuration) is None


def test_timeline_has_what_was_noticed_and_not_what_always_is_said():
    timeline = Timeline(lambda: 0.0)
    chaos = Chaos(timeline, live=None, watch=None)
    for name, text in [
        ("headrace", "hub was killed by SIGKILL; it is started again in 0.5 s"),
        ("headrace", "hub is ready after 1.1 s"),
        ("trainer", "update 7/10  reward 0.5"),
        ("trainer", "checkpoint of version 6"),
        ("trainer", "resuming from the checkpoint of version 6"),
        ("hub", "2026-11-21 20:24:19,351 INFO services.inference_hub.engines: engine=72 state=syncing was=ready version=3"),
        ("hub", "2026-11-21 20:24:19,351 INFO services.inference_hub.engines: engine=72 state=suspect was=ready version=3"),
        ("agents", "2026-11-21 20:24:19,351 INFO services.env_agents.application: listening on http://127.0.0.1:1"),
        ("agents", "2026-11-21 20:24:19,351 WARNING services.env_agents.rollout_loop: Redis is away"),
        ("engine-0", "2026-11-21 20:24:19,351 WARNING sglang: hot"),
    ]:
        chaos.line(name, text)
    assert [(event.mark, event.who, event.text) for event in timeline.events] == [
        (Mark.NOTICED, "headrace", "hub was killed by SIGKILL; it is started again in 0.5 s"),
        (Mark.NOTE, "headrace", "hub is ready after 1.1 s"),
        (Mark.NOTICED, "trainer", "resuming from the checkpoint of version 6"),
        (Mark.NOTICED, "hub", "engine=72 state=suspect was=ready version=3"),
        (Mark.NOTICED, "agents", "Redis is away"),
    ]
