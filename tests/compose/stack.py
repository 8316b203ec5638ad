"""`docker compose` on this project's files, under a project name and ports of its own."""

import os
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from services.standalone.ports import free_ports
from tests.compose.docker_engine import Docker

DEADLINE_S = 300.0
POLL_S = 0.5


class ComposedStack:
    """One project. `compose` runs a command of Docker Compose; the addresses are the published ones."""

    def __init__(self, docker: Docker, repository: Path, folder: Path, *, redis_password: str = "") -> None:
        """Args: redis_password: as `.env` would give it; empty lets the stack make one."""
        self.docker = docker
        self.project = f"headrace-test-{uuid.uuid4().hex[:8]}"
        self.run_file = folder / "run.yaml"
        redis, hub, agents = free_ports(3)
        self.redis_url, self.hub, self.agents = (f"redis://127.0.0.1:{redis}/0", *(f"http://127.0.0.1:{p}" for p in (hub, agents)))
        self._repository = repository
        self._environment = {
            **docker.environment,
            "HEADRACE_CONFIG": str(self.run_file),
            "HEADRACE_REDIS_PASSWORD": redis_password,
            "HEADRACE_REDIS_PORT": str(redis),
            "HEADRACE_HUB_PORT": str(hub),
            "HEADRACE_AGENTS_PORT": str(agents),
        }

    def write_run_file(self, content: dict[str, Any]) -> None:
        """In place, so that containers that mount it see it. They read it under a user of their own."""
        self.run_file.write_text(yaml.safe_dump(content))
        self.run_file.chmod(0o644)

    def compose(self, *arguments: str) -> str:
        """Its output. Fails with what it printed."""
        command = [*self.docker.compose_command(), "--project-name", self.project, *arguments]
        done = subprocess.run(command, cwd=self._repository, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers, running or not."""
        filters = (f"label=com.docker.compose.project={self.project}", f"label=com.docker.compose.service={service}")
        listed = self.docker.run("ps", "--all", "--quiet", *(word for one in filters for word in ("--filter", one)))
        return listed.split()

    def inspect(self, container: str, template: str) -> str:
        return self.docker.run("inspect", "--format", template, container)

    def logs(self, service: str) -> str:
        """The last lines of a service's containers."""
        return "\n".join(self.docker.run("logs", "--tail", "60", container) for container in self.containers(service))

    def headrace(self, *arguments: str) -> str:
        """The command inside an agents' container."""
        return self.compose("exec", "-T", "env-agents", "headrace", *arguments, "--config", "/etc/headrace/run.yaml")

    def redis_password(self) -> str:
        return self.compose("exec", "-T", "redis", "cat", "/secrets/redis_password")

    def wait_until(self, is_true: Callable[[], bool], *, description: str, service: str = "trainer") -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {description}:\n{self.logs(service)}"
            time.sleep(POLL_S)

    def trainer_exit_code(self) -> int | None:
        """None while it runs."""
        (container,) = self.containers("trainer")
        status, code = self.inspect(container, "{{.State.Status}} {{.State.ExitCode}}").split()
        return int(code) if status == "exited" else None

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.agents}/status", timeout=30).raise_for_status().json()

    def variables(self) -> dict[str, str]:
        """What a process on this machine needs to take part."""
        return {
            **os.environ,
            "HEADRACE_REDIS_URL": self.redis_url,
            "HEADRACE_REDIS_PASSWORD": self.redis_password(),
            "HEADRACE_HUB_URL": self.hub,
            "HEADRACE_AGENTS_URL": self.agents,
        }


def run_file(repository: Path, *, run_id: str, num_updates: int) -> dict[str, Any]:
    """The demo's run file for a run of few updates, in a directory of its own."""
    content = yaml.safe_load((repository / "examples" / "demo.yaml").read_text())
    content["run"] |= {"id": run_id, "directory": f"runs/{run_id}"}
    content["rollout"] |= {"rollout_batch_size": 4}
    content["trainer"] |= {"num_updates": num_updates, "checkpoint": {"every_updates": 2}}
    content["trainer"]["evaluation"] = {"every_updates": 1000, "num_episodes": 16}
    return content
