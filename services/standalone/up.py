"""`headrace up`: a whole run on this machine, in the foreground."""

import os
from collections.abc import Sequence
from pathlib import Path

from services.standalone import deployment, printing
from services.standalone.supervisor import StopRequested
from services.standalone.terminal import Terminal
from shared.configuration import load

SIGNAL_STATUS = 128
"""A shell's convention: 128 plus the number of the signal that ended a process."""


def run(run_file: Path, overrides: Sequence[str], *, external_redis: bool) -> int:
    """Returns the exit status. Raises: HeadraceError with the sentence to show."""
    configuration = load(run_file, overrides=overrides)
    planned = deployment.plan(configuration, has_external_redis=external_redis or bool(os.environ.get("HEADRACE_REDIS_URL")))
    terminal = Terminal(printing.console())
    try:
        deployment.run(planned, terminal, source=run_file)
    except StopRequested as stop:
        return SIGNAL_STATUS + stop.signal_number
    finally:
        terminal.close()
    return 0
