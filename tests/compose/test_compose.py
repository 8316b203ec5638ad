"""The composed system as a user has it: built, brought up, used by REST, trained in, stopped in the middle, joined from outside."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import redis

from tests.compose.docker_engine import Docker
from tests.compose.stack import ComposedStack, run_file

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

SERVICE_IMAGES = {"headrace/inference-hub:0.1.0", "headrace/env-agents:0.1.0"}
OUR_IMAGES = {*SERVICE_IMAGES, "headrace/engine:0.1.0", "headrace/trainer:0.1.0"}
LARGEST_SERVICE_IMAGE = 250_000_000
SERVICES = ("redis", "inference-hub", "env-agents", "engine", "trainer", "gateway")
BATCH_GROUPS = 4
STOPPED_BY_SIGKILL = 137


@pytest.mark.parametrize("image", sorted(OUR_IMAGES))
def test_images_run_as_a_user_and_say_what_they_are(images: Docker, image: str) -> None:
    (described,) = json.loads(images.run("image", "inspect", image))
    settings = described["Config"]
    assert settings["User"] == "headrace"
    labels = settings["Labels"]
    assert labels["org.opencontainers.image.title"] == "Headrace"
    assert labels["org.opencontainers.image.version"] == "0.1.0"
    assert ("Healthcheck" in settings) == (image != "headrace/trainer:0.1.0")


@pytest.mark.parametrize("image", sorted(SERVICE_IMAGES))
def test_service_images_are_small_and_without_torch(images: Docker, image: str) -> None:
    assert int(images.run("image", "inspect", "--format", "{{.Size}}", image)) <= LARGEST_SERVICE_IMAGE
    assert not images.succeeds("run", "--rm", "--entrypoint", "python", image, "-c", "import torch")


def test_it_trains_and_the_books_balance(stack: ComposedStack) -> None:
    status = json.loads(stack.headrace("status", "--json"))
    assert status["version"] >= 3
    assert [engine["state"] for engine in status["engines"]] == ["ready"]
    shown = {environment["name"]: environment for environment in status["environments"]}
    assert shown["calculator"]["statistics"]["episodes"] > 0
    assert shown["chain"]["weight"] == 0.25
    books = stack.status()
    assert books["is_balanced"]
    assert books["books"]["trained"] >= 3 * BATCH_GROUPS
    assert len(books["processes"]) == 2


def test_an_environment_is_managed_by_rest_in_words(stack: ComposedStack) -> None:
    lake = {"name": "lake", "import_path": "examples.lookup_chain:LookupChain", "is_paused": True}
    with httpx.Client(base_url=stack.agents, timeout=60) as client:
        assert client.post("/environments", json=lake).status_code == 201
        assert client.patch("/environments/lake", json={"weight": 0.5}).json()["weight"] == 0.5
        refused = client.patch("/environments/lake", json={"wieght": 1})
        assert refused.status_code == 422
        assert "weight" in refused.json()["detail"]
        assert client.delete("/environments/lake").status_code == 204
        assert client.get("/environments/lake").status_code == 404
        assert client.get("/docs").status_code == 200


def test_transcripts_are_read_inside_and_outside(stack: ComposedStack) -> None:
    inside = stack.headrace("rollouts", "--last", "1", "--environment", "calculator", "--json")
    assert json.loads(inside)["environment"] == "calculator"
    command = [sys.executable, "-m", "services.standalone.command_line", "rollouts", "--last", "1", "--config", str(stack.run_file)]
    outside = subprocess.run(command, env=stack.variables(), capture_output=True, text=True, check=True).stdout
    assert "policy" in outside


def test_nothing_is_published_beyond_loopback_and_redis_wants_its_password(stack: ComposedStack) -> None:
    for service in SERVICES:
        for container in stack.containers(service):
            ports = json.loads(stack.inspect(container, "{{json .NetworkSettings.Ports}}")) or {}
            assert {binding["HostIp"] for bindings in ports.values() for binding in bindings or []} <= {"127.0.0.1"}
    with redis.Redis.from_url(stack.redis_url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


@pytest.mark.parametrize("service", ["inference-hub", "env-agents", "engine", "trainer", "gateway"])
def test_processes_run_unprivileged_on_a_read_only_file_system(stack: ComposedStack, service: str) -> None:
    for container in stack.containers(service):
        assert stack.inspect(container, "{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}}") == "true [ALL]"
        assert stack.inspect(container, "{{.Config.User}}") not in ("", "root", "0")


def test_stopped_in_the_middle_it_ends_in_time_and_goes_on_where_it_was(stack: ComposedStack, repository: Path) -> None:
    stack.write_run_file(run_file(repository, run_id="composed", num_updates=400))
    stack.compose("up", "--detach", "--scale", "env-agents=2")
    stack.wait_until(lambda: stack.status()["books"]["version"] >= 5, description="two more updates")
    stack.compose("stop", "--timeout", "10")
    codes = {service: [int(stack.inspect(c, "{{.State.ExitCode}}")) for c in stack.containers(service)] for service in SERVICES}
    assert STOPPED_BY_SIGKILL not in {code for found in codes.values() for code in found}, codes

    stack.compose("up", "--detach", "--scale", "env-agents=2", "--scale", "trainer=0")
    books = stack.status()
    assert books["is_balanced"]
    assert books["books"]["unsaved"] == 0, "the trainer's last checkpoint did not hold what it had trained"
    stopped_at = books["books"]["version"]
    stack.write_run_file(run_file(repository, run_id="composed", num_updates=stopped_at + 1))
    stack.compose("run", "--rm", "trainer")
    after = stack.status()
    assert after["is_balanced"]
    assert after["books"]["version"] == stopped_at + 1


def test_a_trainer_on_the_host_trains_a_composed_stack(
    new_stack: Callable[..., ComposedStack], repository: Path, tmp_path: Path
) -> None:
    stack = new_stack(run_id="outside", num_updates=2, redis_password='it"s \\x61 secret#')
    stack.compose("up", "--detach", "--scale", "trainer=0")
    (container,) = stack.containers("engine")
    stack.docker.run("cp", f"{container}:/app/runs/demo/policy", str(tmp_path / "policy"))
    deepspeed = Path(sys.executable).with_name("deepspeed")
    variables = {**stack.variables(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    variables["PATH"] = f"{deepspeed.parent}{os.pathsep}{variables['PATH']}"

    def train(directory: str) -> "subprocess.CompletedProcess[str]":
        command = [str(deepspeed), "trainer/train.py", "--config", str(stack.run_file)]
        command += ["--set", f"run.directory={tmp_path / directory}", "--set", f"run.model_path={tmp_path / 'policy'}"]
        return subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True, check=False, timeout=300)

    trained = train("run")
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    assert stack.status()["books"]["version"] == 2
    refused = train("without-its-checkpoint")
    assert refused.returncode != 0
    assert "run.directory must hold the newest checkpoint of run 'outside'" in refused.stderr
