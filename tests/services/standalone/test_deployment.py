import fcntl
import socket
from pathlib import Path

import pytest

from services.standalone import deployment
from services.standalone.ports import LOOPBACK, free_ports
from shared import strict_yaml
from shared.configuration import Configuration, dump, load
from shared.errors import ConfigurationError
from tests.services.standalone.toy_processes import Recorder

NO_PORTS = {
    "redis": {"url": "redis://127.0.0.1:0/0"},
    "inference_hub": {"port": 0},
    "env_agents": {"port": 0},
    "engines": {"count": 2, "device": "cpu"},
}


def configuration(directory: Path, **sections: dict) -> Configuration:
    run = {"id": "x", "directory": str(directory), "model_path": str(directory)}
    raw = {"run": run, "trainer": {"num_updates": 1}, **NO_PORTS, **sections}
    return strict_yaml.decode(raw, Configuration, source="test")


def test_every_port_that_was_0_is_decided_and_different(tmp_path):
    planned = deployment.plan(configuration(tmp_path), has_external_redis=False)
    run = planned.configuration
    redis_port = int(run.redis.url.rpartition(":")[2].partition("/")[0])
    ports = [redis_port, run.inference_hub.port, run.env_agents.port, planned.master_port, *planned.engine_ports]
    assert 0 not in ports
    assert len(set(ports)) == 6
    assert run.engines.urls == tuple(f"http://127.0.0.1:{port}" for port in planned.engine_ports)


def test_engines_that_run_already_are_kept_and_not_started(tmp_path):
    engines = {"count": 1, "device": "cpu", "urls": ["http://10.0.0.7:30000"]}
    planned = deployment.plan(configuration(tmp_path, engines=engines), has_external_redis=False)
    assert planned.configuration.engines.urls[0] == "http://10.0.0.7:30000"
    assert len(planned.engine_ports) == 1


def test_no_engine_is_started_where_the_count_is_0(tmp_path):
    engines = {"count": 0, "device": "cpu", "urls": ["http://10.0.0.7:30000"]}
    assert deployment.plan(configuration(tmp_path, engines=engines), has_external_redis=False).engine_ports == []


@pytest.mark.parametrize(("section", "key"), [("inference_hub", "inference_hub.port"), ("env_agents", "env_agents.port")])
def test_taken_port_is_refused_by_its_key(tmp_path, section, key):
    with socket.create_server((LOOPBACK, 0)) as listener:
        run = configuration(tmp_path, **{section: {"port": listener.getsockname()[1]}})
        with pytest.raises(ConfigurationError, match=rf"{key} must be a free port"):
            deployment.plan(run, has_external_redis=False)


def test_external_redis_that_does_not_answer_is_a_sentence(tmp_path):
    (port,) = free_ports(1)
    run = configuration(tmp_path, redis={"url": f"redis://127.0.0.1:{port}/0"})
    with pytest.raises(ConfigurationError, match=rf"redis\.url must be a reachable Redis, got .*{port}"):
        deployment.plan(run, has_external_redis=True)


def test_external_redis_is_used_as_it_is(tmp_path, redis_url):
    planned = deployment.plan(configuration(tmp_path, redis={"url": redis_url}), has_external_redis=True)
    assert planned.configuration.redis.url == redis_url


def test_resolved_run_file_reads_back_as_the_plan(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    planned = deployment.plan(configuration(tmp_path), has_external_redis=False)
    planned.run_file.write_text(deployment.dump(planned.configuration))
    assert load(planned.run_file, environment_variables={}) == planned.configuration


def test_resumed_run_has_its_engines_where_they_were(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first = deployment.plan(configuration(tmp_path), has_external_redis=False)
    first.run_file.write_text(deployment.dump(first.configuration))
    again = deployment.plan(configuration(tmp_path), has_external_redis=False)
    assert again.engine_ports == first.engine_ports


def test_resumed_run_moves_its_engines_where_a_port_is_taken(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first = deployment.plan(configuration(tmp_path), has_external_redis=False)
    first.run_file.write_text(deployment.dump(first.configuration))
    with socket.create_server((LOOPBACK, first.engine_ports[0])):
        again = deployment.plan(configuration(tmp_path), has_external_redis=False)
    assert not set(again.engine_ports) & set(first.engine_ports)


def test_the_users_run_file_is_never_written_over(tmp_path):
    planned = deployment.plan(configuration(tmp_path), has_external_redis=False)
    with pytest.raises(ConfigurationError, match=r"run\.directory must not hold the run file itself"):
        deployment.run(planned, Recorder(), source=tmp_path / "run.yaml")


def test_password_reaches_the_processes_that_need_it_and_no_file_that_others_read(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADRACE_REDIS_PASSWORD", raising=False)
    (tmp_path / "redis").mkdir()
    run = configuration(tmp_path, redis={"url": "redis://:secret@127.0.0.1:0/0"})
    planned = deployment.plan(run, has_external_redis=False)
    members = [member for stage in deployment._service_stages(planned, lock=0) for member in stage.members]
    specs = {member.spec.name: member.spec for member in [*members, deployment._trainer(planned)]}
    told = {name for name, spec in specs.items() if spec.environment.get("HEADRACE_REDIS_PASSWORD") == "secret"}
    assert told == {"hub", "agents", "trainer"}
    assert not [spec.command for spec in specs.values() if "secret" in " ".join(spec.command)]
    assert "secret" not in dump(planned.configuration)


def test_external_redis_that_could_lose_the_books_is_refused(tmp_path, serve_redis):
    run = configuration(tmp_path, redis={"url": serve_redis("--appendonly", "no")})
    with pytest.raises(ConfigurationError, match=r"append-only file must be on.*without --external-redis"):
        deployment.plan(run, has_external_redis=True)


def test_directory_in_use_is_refused(tmp_path):
    (tmp_path / "redis").mkdir()
    planned = deployment.plan(configuration(tmp_path), has_external_redis=False)
    with (tmp_path / "redis" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match=r"run\.directory must be used by one run at a time"):
            deployment.run(planned, Recorder(), source=tmp_path / "mine.yaml")


def test_run_may_have_several_agent_processes_each_at_a_port_of_its_own(tmp_path):
    (tmp_path / "redis").mkdir()
    planned = deployment.plan(configuration(tmp_path, up={"agent_processes": 3}), has_external_redis=False)
    members = [member for stage in deployment._service_stages(planned, lock=0) for member in stage.members]
    agents = {member.spec.name: member.spec for member in members if member.spec.name.startswith("agents")}
    assert list(agents) == ["agents", "agents-1", "agents-2"]
    ports = [planned.configuration.env_agents.port, *planned.other_agent_ports]
    assert len(set(ports)) == 3
    assert not [word for word in agents["agents"].command if word.startswith("env_agents.port")], "it is in the run file"
    for name, port in zip(["agents-1", "agents-2"], planned.other_agent_ports, strict=True):
        assert f"env_agents.port={port}" in agents[name].command
