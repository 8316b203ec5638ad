"""`headrace doctor`: every fact is looked up, judged, and shown as a row."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.text import Text

from services.standalone import printing
from services.standalone.doctor import engines, gpus, machine, model, packages, parts, redis_part, run_directory
from services.standalone.doctor.finding import Finding, Severity, problem
from services.standalone.run_location import locate
from shared.configuration import Configuration
from shared.errors import ConfigurationError
from shared.keys import Keys

STYLE_BY_SEVERITY: Final = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}

Progress = Callable[[str], None]
"""Told what is looked at next."""


class Report(msgspec.Struct, frozen=True):
    """What `--json` shows."""

    findings: Sequence[Finding]
    num_problems: int
    num_warnings: int


def run(run_file: Path | None, overrides: Sequence[str], *, as_json: bool) -> int:
    """Returns the exit status: 1 if there is a problem. Raises: ConfigurationError."""
    if run_file is None and overrides:
        raise ConfigurationError("--set must belong to a run file, and there is none; give it with --config")
    console = printing.console()
    if console.is_terminal and not as_json:
        with console.status("") as status:
            findings = examine(run_file, overrides, progress=lambda what: status.update(f"looking at {what}"))
    else:
        findings = examine(run_file, overrides, progress=lambda what: None)
    report = Report(findings, _count(findings, Severity.PROBLEM), _count(findings, Severity.WARNING))
    if as_json:
        printing.as_json(report)
    else:
        console.print(lines(report))
    return 1 if report.num_problems else 0


def examine(run_file: Path | None, overrides: Sequence[str], *, progress: Progress) -> list[Finding]:
    """Of the machine; with a run file, also of the run. One that cannot be used is a finding."""
    if run_file is None:
        return examine_machine(None, progress)
    try:
        configuration = locate(run_file, overrides)
    except ConfigurationError as error:
        rule = "the run file can be read"
        return [problem("run file", str(error), rule, "correct it"), *examine_machine(None, progress)]
    return [*examine_machine(configuration, progress), *examine_run(configuration, progress)]


def examine_machine(configuration: Configuration | None, progress: Progress) -> list[Finding]:
    progress("packages")
    installed = packages.look()
    if configuration is None:
        rows = packages.check(installed)
    else:
        rows = packages.check(installed, engine_version=configuration.inference_hub.engine_version)
    progress("GPUs")
    has_torch = "torch" in installed.version_by_name
    rows += gpus.check(gpus.look(has_torch=has_torch), configuration)
    progress("memory and disk")
    written = run_directory.look(Path(configuration.run.directory if configuration else "."))
    rows += machine.check(machine.look(written.existing), has_torch=has_torch, needs_compiler=installed.compiles)
    progress("Docker")
    return [*rows, machine.check_docker(machine.look_at_docker())]


def examine_run(configuration: Configuration, progress: Progress) -> list[Finding]:
    run, agents_section = configuration.run, configuration.env_agents
    progress("the model")
    rows = [run_directory.check(run_directory.look(Path(run.directory)))]
    rows += model.check(model.look(Path(run.model_path), agents_section), agents_section.renderer)
    progress("hub and agents")
    hub = parts.look_at_hub(configuration.inference_hub.address)
    agents = parts.look_at_agents(agents_section.address)
    is_run_up = hub.answer is not None or agents.answer is not None
    rows += [parts.check(part, is_run_up=is_run_up) for part in (hub, agents)]
    progress("Redis")
    redis = redis_part.look(configuration.redis, Keys(run.id))
    rows += redis_part.check(redis, require_aof=configuration.redis.require_aof, is_run_up=is_run_up)
    progress("engines")
    views = engines.look_at_hubs_engines(configuration.inference_hub.address)
    urls = dict.fromkeys([*configuration.engines.urls, *(view.url for view in views or ())])
    for url in urls:
        facts = engines.look(url, views)
        rows += engines.check(facts, engine_version=configuration.inference_hub.engine_version, is_run_up=is_run_up)
    return rows


def lines(report: Report) -> Text:
    """A line each, with what to do only where there is something to do."""
    num_ok = _count(report.findings, Severity.OK)
    summary = f"problems: {report.num_problems}, warnings: {report.num_warnings}, ok: {num_ok}"
    return Text("\n").join([*map(_line, report.findings), Text(summary)])


def _line(finding: Finding) -> Text:
    words = f"{finding.check}: {finding.found} ({finding.rule})"
    said = printing.one_line(f"{words}; {finding.remedy}" if finding.remedy else words)
    return Text.assemble((f"{finding.severity:<8} ", STYLE_BY_SEVERITY[finding.severity]), said)


def _count(findings: Sequence[Finding], severity: Severity) -> int:
    return sum(finding.severity is severity for finding in findings)
