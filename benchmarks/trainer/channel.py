"""Rounds on demand in a process of its own: the parent asks by a line, the child answers by a line of JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

KIB = 1024


class Contestant:
    """The parent's end. READY after `wait`; each `ask` is one round; `close` ends the process."""

    def __init__(self, module: str, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def wait(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}; its output is in {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self.wait()


class Channel:
    """The child's end. What libraries print goes to the log instead of into the answers."""

    def __init__(self) -> None:
        self._answers: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def asked(self) -> bool:
        """Waits for the next round; False if there is none."""
        return bool(sys.stdin.readline())

    def answer(self, **values: Any) -> None:
        self._answers.write(json.dumps(values) + "\n")


def resident_bytes() -> int:
    """What this process holds in memory now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that it held so far. Not getrusage's: that begins with what the parent held when it started this process."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{key}:"))
