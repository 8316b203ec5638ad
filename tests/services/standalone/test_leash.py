import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.standalone import leash
from services.standalone.readiness import wait_until

LEASH = [sys.executable, "-I", "-S", str(Path(leash.__file__))]
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:4], sys.argv[4], str(os.getpid()), sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent():
    with subprocess.Popen([sys.executable, "-c", PARENT, *LEASH], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signals a parent's death on Linux only")
async def test_child_ends_when_its_parent_is_killed(parent):
    child = psutil.Process(int(parent.stdout.readline()))

    async def is_leashed() -> bool:
        return "leash.py" not in " ".join(child.cmdline())

    assert await wait_until(is_leashed, timeout_s=60)
    parent.kill()

    async def is_gone() -> bool:
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    assert await wait_until(is_gone, timeout_s=60)


def test_command_keeps_arguments_and_status():
    command = [*LEASH, str(os.getpid()), sys.executable, "-c", "import sys; print(sys.argv[1]); sys.exit(7)", "an argument"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("an argument\n", 7)


def test_command_that_does_not_exist_is_a_sentence():
    result = subprocess.run([*LEASH, str(os.getpid()), "no-such-program"], capture_output=True, text=True, check=False)
    assert result.stderr == "cannot run no-such-program: No such file or directory\n"
    assert result.returncode == 1
