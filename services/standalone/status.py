"""`headrace status`: a run's engines, ledger and environments, asked of the processes that own them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from services.standalone import printing
from services.standalone.connections import ServiceApi
from services.standalone.run_location import locate
from shared.agents_token import agents_access
from shared.configuration import Configuration
from shared.hub_tokens import hub_tokens


def run(run_file: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Returns the exit status. Raises: HeadraceError with the sentence to show."""
    answers = ask(locate(run_file, overrides))
    if as_json:
        printing.as_json(answers)
    else:
        console = printing.console()
        console.print(tables(console, answers))
    return 0


def ask(configuration: Configuration) -> dict[str, Any]:
    """Version, engines, books, agent processes and environments. Raises: UnreachableError; RefusedError."""
    with (
        ServiceApi(configuration.inference_hub.address, access=hub_tokens().for_control) as hub,
        ServiceApi(configuration.env_agents.address, access=agents_access()) as agents,
    ):
        agents_status = agents.get("/status")
        return {
            "run": configuration.run.id,
            "version": hub.get("/status")["version"],
            "engines": hub.get("/engines"),
            "books": agents_status["books"],
            "pipeline": agents_status["pipeline"],
            "agent_processes": agents_status["processes"],
            "environments": agents.get("/environments"),
        }


def tables(console: Console, answers: Mapping[str, Any]) -> Group:
    books = answers["books"]
    discarded = sum(books["discarded"].values())
    ledger = Text(
        f"run {answers['run']} · policy version {answers['version']} · groups: {books['started']} started = {books['running']} "
        f"running + {books['ready']} ready + {books['trained']} trained + {discarded} discarded"
    )
    engines = printing.table(
        console,
        ("engine", "state", "version", "calls", "problem"),
        [
            (engine["url"], engine["state"], engine["version"], engine["outstanding_calls"], engine["problem"] or "")
            for engine in answers["engines"]
        ],
        title="engines",
    )
    processes = printing.table(
        console, ("agent process", "episodes to finish"), sorted(answers["agent_processes"].items()), title="agents"
    )
    environments = printing.table(
        console,
        ("environment", "weight", "paused", "episodes", "success"),
        [
            (
                environment["name"],
                environment["weight"],
                printing.yes_or_no(environment["is_paused"]),
                environment["statistics"]["episodes"],
                printing.number(environment["statistics"]["success_rate"]),
            )
            for environment in answers["environments"]
        ],
        title="environments",
    )
    return Group(ledger, *pipeline_lines(answers["pipeline"]), Text(), engines, Text(), processes, Text(), environments)


def pipeline_lines(report: Mapping[str, Any] | None) -> list[Text]:
    """What the last updates measured, and the trainer's advice; nothing before the first ones."""
    if report is None:
        return []
    shares = [
        f"training waits for data {printing.percent(report['wait_share'])} of the time",
        f"the trainer is idle {printing.percent(report['trainer_idle_share'])}",
        f"engines are idle {printing.percent(report['engine_idle_share'])}",
        f"they use {printing.percent(report['engine_utilisation'])} of what they can hold",
    ]
    lost = ", ".join(f"{printing.percent(share)} {reason}" for reason, share in report["discarded_token_shares"].items())
    life = ", ".join(f"{printing.percent(share)} {part}" for part, share in report["episode_shares"].items())
    return [
        Text(f"last {printing.counted(report['updates'], 'update')}, {report['update_s']:.1f} s each: {', '.join(shares)}"),
        Text(f"an episode's life: {life or '–'} · sampled tokens discarded: {lost or 'none'}"),
        *(Text(f"advice: {printing.printable(sentence)}") for sentence in report["advice"]),
    ]
