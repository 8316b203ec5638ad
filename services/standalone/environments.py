"""`headrace environments`: what is registered at the agents of a run that runs, and changes to it.

Every `run_…` returns the exit status, and raises HeadraceError with the sentence to show: the agents' own where they refuse.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import yaml
from rich.console import Console, Group
from rich.text import Text

from services.standalone import printing
from services.standalone.connections import ServiceApi
from shared import strict_yaml
from shared.agents_token import agents_access
from shared.configuration import Configuration
from shared.evaluation import EpisodeStatistics

TIMEOUT_S: Final = 120.0
"""Registering waits for an import, or for an environment server that is starting."""
COLUMNS: Final = ("environment", "weight", "paused", "episodes", "success", "reward", "outcomes")
"""They fit a terminal of 80 columns; what is long has a line below."""


class Problem(msgspec.Struct, frozen=True):
    """Why the latest episode that did not complete ended. `at` is RFC 3339, `process` the agent process."""

    outcome: str
    detail: str
    at: str
    process: str


class Description(msgspec.Struct, frozen=True):
    """One registered environment, as far as the list shows it."""

    name: str
    import_path: str | None
    url: str | None
    weight: float
    is_paused: bool
    statistics: EpisodeStatistics
    last_problem: Problem | None


def run_list(configuration: Configuration, *, as_json: bool) -> int:
    with _api(configuration) as api:
        found = api.get("/environments")
    if as_json:
        printing.as_json(found)
    else:
        console = printing.console()
        console.print(overview(console, msgspec.convert(found, list[Description])))
    return 0


def run_show(configuration: Configuration, name: str, *, as_json: bool) -> int:
    with _api(configuration) as api:
        found = api.get(_path(name))
    _tell(found, as_yaml(found), as_json=as_json)
    return 0


def run_add(configuration: Configuration, spec_file: Path, *, as_json: bool) -> int:
    spec = strict_yaml.load_yaml(spec_file)
    with _api(configuration) as api:
        added = api.request("POST", "/environments", spec)
    _tell(added, f"{added['name']} is registered with weight {added['weight']:g}", as_json=as_json)
    return 0


def run_pause(configuration: Configuration, name: str, *, is_paused: bool, as_json: bool) -> int:
    with _api(configuration) as api:
        changed = api.request("PATCH", _path(name), {"is_paused": is_paused})
    words = "is paused: its running groups finish, and no new ones start" if is_paused else "gets new groups again"
    _tell(changed, f"{name} {words}", as_json=as_json)
    return 0


def run_weight(configuration: Configuration, name: str, weight: float, *, as_json: bool) -> int:
    with _api(configuration) as api:
        changed = api.request("PATCH", _path(name), {"weight": weight})
    _tell(changed, f"{name} has weight {changed['weight']:g}", as_json=as_json)
    return 0


def run_remove(configuration: Configuration, name: str, *, as_json: bool) -> int:
    with _api(configuration) as api:
        api.request("DELETE", _path(name))
    _tell({"removed": name}, f"{name} is removed", as_json=as_json)
    return 0


def as_yaml(description: Mapping[str, Any]) -> str:
    """For people: in the agents' order, tracebacks as the lines they are."""
    return yaml.dump(description, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True).rstrip()


class _BlockDumper(yaml.SafeDumper):
    """Text of several lines as a block."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)


def overview(console: Console, environments: list[Description]) -> Group:
    """A table, and below it where each environment is and what was wrong last."""
    table = printing.table(console, COLUMNS, [_row(environment) for environment in environments])
    return Group(table, *(Text(_details(environment)) for environment in environments))


def _row(environment: Description) -> tuple[object, ...]:
    statistics = environment.statistics
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(statistics.outcomes.items()))
    return (
        environment.name,
        f"{environment.weight:g}",
        printing.yes_or_no(environment.is_paused),
        statistics.episodes,
        printing.number(statistics.success_rate),
        printing.number(statistics.mean_reward),
        outcomes or "–",
    )


def _details(environment: Description) -> str:
    """The last line of a traceback says what it is about; `show` has all of it."""
    words, problem = f"{environment.name}: {environment.import_path or environment.url}", environment.last_problem
    if problem is not None:
        last_line = problem.detail.strip().rpartition("\n")[2]
        words += f"; last problem: {problem.outcome}: {last_line} ({problem.at}, {problem.process})"
    return printing.one_line(words)


def _api(configuration: Configuration) -> ServiceApi:
    return ServiceApi(configuration.env_agents.address, timeout_s=TIMEOUT_S, access=agents_access())


def _path(name: str) -> str:
    return f"/environments/{quote(name, safe='')}"


def _tell(answer: Mapping[str, Any], sentence: str, *, as_json: bool) -> None:
    if as_json:
        printing.as_json(answer)
    else:
        printing.console().print(printing.printable(sentence))
