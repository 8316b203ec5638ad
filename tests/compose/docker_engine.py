"""A Docker engine to test with: the one that runs, or one of our own for the time of the tests."""

import ipaddress
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60


class NoEngineError(Exception):
    """No Docker engine can run here; says why."""


class Docker:
    """The docker command, on one engine."""

    def __init__(self, host: str | None) -> None:
        # The older builder: the newer one needs a plug-in that Debian does not have, and the Dockerfile needs neither.
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "0", **({"DOCKER_HOST": host} if host else {})}
        self.environment.setdefault("DOCKER_CLI_HINTS", "false")

    def run(self, *arguments: str, stdin: IO[bytes] | None = None) -> str:
        """Its output. Raises: CalledProcessError."""
        done = subprocess.run(
            ["docker", *arguments], env=self.environment, stdin=stdin, stdout=subprocess.PIPE, check=True, text=True
        )
        return done.stdout.strip()

    def succeeds(self, *arguments: str, timeout_s: float = 30) -> bool:
        try:
            done = subprocess.run(["docker", *arguments], env=self.environment, capture_output=True, timeout=timeout_s, check=False)
        except (subprocess.TimeoutExpired, FileNotFoundError):
            return False
        return done.returncode == 0

    def has_image(self, name: str) -> bool:
        return self.succeeds("image", "inspect", name)

    def label(self, image: str, name: str) -> str:
        """A label of an image; empty if it has none or is not there."""
        template = '{{with .Config.Labels}}{{index . "' + name + '"}}{{end}}'
        return self.run("image", "inspect", "--format", template, image) if self.has_image(image) else ""

    def bridge_address(self) -> str:
        """This machine's address as containers see it."""
        subnet = self.run("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}")
        return str(next(ipaddress.ip_network(subnet).hosts()))

    def compose_command(self) -> list[str]:
        """Compose as a plug-in, or as the command that Debian packages."""
        return ["docker", "compose"] if self.succeeds("compose", "version") else ["docker-compose"]


@contextmanager
def docker_engine() -> Iterator[Docker]:
    """Raises: NoEngineError if none runs and none can be started."""
    docker = Docker(None)
    if docker.succeeds("info"):
        yield docker
        return
    missing = [name for name in ("docker", "dockerd", "debootstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        reason = f"not installed: {', '.join(missing)}" if missing else "not root"
        raise NoEngineError(
            f"no Docker engine answers and none can be started here ({reason}); as root on Debian: "
            "apt-get install docker.io docker-compose debootstrap"
        )
    folder = Path(tempfile.mkdtemp(prefix="headrace-docker-"))
    host = f"unix://{folder}/docker.sock"
    command = ["dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec"]
    command += ["--pidfile", folder / "pid", "--host", host]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        docker = Docker(host)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not docker.succeeds("info"):
            if process.poll() is not None or time.monotonic() > deadline:
                last = (folder / "log").read_text(errors="replace").splitlines()[-3:]
                raise NoEngineError(f"dockerd does not start here: {' | '.join(last)}")
            time.sleep(0.2)
        yield docker
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(folder, ignore_errors=True)
