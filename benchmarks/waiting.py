"""Waiting for processes of a benchmark."""

import subprocess
import time
from collections.abc import Callable

POLL_S = 0.1


def wait_until(
    is_true: Callable[[], object], what: str, *, timeout_s: float, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Raises: TimeoutError, at once if `process` has ended."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            raise TimeoutError(f"within {timeout_s:g} s it should be that {what}")
        time.sleep(POLL_S)
