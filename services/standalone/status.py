"""`headrace status`: a run's engines, ledger and environments, asked of the processes that own them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from rich.console import Console, Group
from rich.table import Table

from services.standalone.deployment import RUN_FILE
from shared.configuration import Configuration, load
from shared.errors import HeadraceError

TIMEOUT_S: Final = 10.0


class UnreachableError(HeadraceError):
    """No process of the run answers."""


def run(run_file: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Returns the exit status. Raises: HeadraceError with the sentence to show."""
    answers = ask(_resolved(load(run_file, overrides=overrides)))
    console = Console(highlight=False)
    if as_json:
        console.print_json(msgspec.json.encode(answers).decode())
    else:
        console.print(_tables(answers))
    return 0


def ask(configuration: Configuration) -> dict[str, Any]:
    """version, engines, books and environments. Raises: UnreachableError if the hub or the agents do not answer."""
    hub, agents = configuration.inference_hub.address, configuration.env_agents.address
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        return {
            "run": configuration.run.id,
            "version": _get(client, f"{hub}/status")["version"],
            "engines": _get(client, f"{hub}/engines"),
            "books": _get(client, f"{agents}/status")["books"],
            "environments": _get(client, f"{agents}/environments"),
        }


def _get(client: httpx.Client, url: str) -> Any:
    try:
        return client.get(url).raise_for_status().json()
    except httpx.HTTPError as error:
        raise UnreachableError(f"the run must answer at {url}: {error}; start it with `headrace up`, or see its logs") from error


def _resolved(configuration: Configuration) -> Configuration:
    """The run file that `headrace up` wrote, where the ports are decided; else the one given."""
    written = Path(configuration.run.directory) / RUN_FILE
    return load(written) if written.is_file() else configuration


def _tables(answers: Mapping[str, Any]) -> Group:
    books = answers["books"]
    discarded = sum(books["discarded"].values())
    ledger = (
        f"run {answers['run']} · policy version {answers['version']} · groups: {books['started']} started = {books['running']} "
        f"running + {books['ready']} ready + {books['trained']} trained + {discarded} discarded"
    )
    engines = Table("engine", "state", "version", "calls", "problem", title="engines", title_justify="left")
    for engine in answers["engines"]:
        cells = (engine["url"], engine["state"], engine["version"], engine["outstanding_calls"], engine["problem"] or "")
        engines.add_row(*map(str, cells))
    environments = Table("environment", "weight", "paused", "episodes", "success", title="environments", title_justify="left")
    for environment in answers["environments"]:
        statistics = environment["statistics"]
        rate = statistics["success_rate"]
        cells = (
            environment["name"],
            environment["weight"],
            "yes" if environment["is_paused"] else "no",
            statistics["episodes"],
            "–" if rate is None else f"{rate:.2f}",
        )
        environments.add_row(*map(str, cells))
    return Group(ledger, engines, environments)
