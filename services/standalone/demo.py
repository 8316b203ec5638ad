"""`headrace demo`: makes a tiny policy that half knows how to use a calculator, trains it, and shows what it learnt."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from rich.console import Console

from services.standalone import deployment, printing, report
from services.standalone.accounting import Account, take_account
from services.standalone.demo_display import DemoDisplay
from services.standalone.supervisor import StopRequested
from services.standalone.up import SIGNAL_STATUS
from shared.configuration import Configuration, load
from shared.errors import ConfigurationError, ProcessError

RUN_FILE = Path(__file__).parents[2] / "examples" / "demo.yaml"
RUN_FILE_DIRECTORY = "runs/demo"
"""Where the run file has its paths."""
OVERRIDES = ("redis.url=redis://127.0.0.1:0/0", "inference_hub.port=0", "env_agents.port=0")
"""Whatever else runs on this machine."""


@dataclass
class _Ending:
    """Filled in by the hook that runs while Redis and the agents still do."""

    account: Account | None = field(default=None)


def run(directory: Path, *, seed: int, overrides: Sequence[str]) -> int:
    """Returns the exit status. Raises: HeadraceError with the sentence to show."""
    started = time.monotonic()
    console = printing.console()
    try:
        _make_room(directory, console)
        run_file = _write_run_file(directory)
    except OSError as error:
        raise ConfigurationError(
            f"--directory must be one that can be made and renamed, got {directory}: {error.strerror}; give another one"
        ) from error
    _make_policy(directory / "policy", seed)
    configuration = load(run_file, overrides=(*OVERRIDES, f"run.seed={seed}", *overrides), environment_variables={})
    with DemoDisplay(console, directory, num_updates=configuration.trainer.num_updates) as display:
        account = _train(configuration, display, source=run_file)
    if account is None:
        return SIGNAL_STATUS
    report.show(console, directory, account, minutes=(time.monotonic() - started) / 60)
    return 0


def _make_room(directory: Path, console: Console) -> None:
    """An earlier demo in `directory` is kept under another name, so that this one does not continue it."""
    if directory.exists():
        written = datetime.fromtimestamp(directory.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
        kept = directory.rename(directory.with_name(f"{directory.name}-{written}"))
        console.print(f"the demo before this one is now in {kept}")
    directory.mkdir(parents=True)


def _make_policy(directory: Path, seed: int) -> None:
    """Runs the recipe in a process of its own, which shows its own progress. Raises: ProcessError if it fails."""
    command = [sys.executable, "-m", "examples.tiny_policy", "--output", str(directory), "--seed", str(seed)]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise ProcessError(f"the recipe of the tiny policy failed with status {status}; what it printed says why", last_lines=[])


def _write_run_file(directory: Path) -> Path:
    """The demo's run file with its paths in `directory`. Raises: ConfigurationError if this is no checkout."""
    if not RUN_FILE.is_file():
        raise ConfigurationError(f"the demo needs the checkout's examples, and there is no {RUN_FILE}; run it from a clone")
    run_file = directory / RUN_FILE.name
    run_file.write_text(RUN_FILE.read_text().replace(RUN_FILE_DIRECTORY, str(directory)))
    return run_file


def _train(configuration: Configuration, display: DemoDisplay, *, source: Path) -> Account | None:
    """Trains to the end; None if a signal ended it before."""
    planned = deployment.plan(configuration, has_external_redis=False)
    ending = _Ending()

    async def take() -> None:
        ending.account = await take_account(planned.configuration)

    try:
        deployment.run(planned, display, source=source, before_shutdown=take)
    except StopRequested:
        return None
    return ending.account
