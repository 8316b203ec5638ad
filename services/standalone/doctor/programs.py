"""Other programs asked under a deadline."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    """What a program printed. `status` is None if it could not be started, or did not end in time."""

    status: int | None
    output: str
    errors: str

    @property
    def is_success(self) -> bool:
        return self.status == 0

    @property
    def last_error(self) -> str:
        """Its last line of complaint."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status} and said nothing"


def ask(command: Sequence[str], *, timeout_s: float) -> Reply:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Reply(None, "", f"{command[0]} did not answer within {timeout_s:g} s")
    except OSError as error:
        return Reply(None, "", f"{command[0]} cannot be run: {error.strerror}")
    return Reply(ended.returncode, ended.stdout.strip(), ended.stderr)
