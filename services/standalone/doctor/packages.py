"""Python and the packages of each part, as their metadata tells: nothing is imported."""

import operator
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from services.standalone.doctor.finding import Finding, ok, problem, warning
from shared.configuration import InferenceHubSection

DISTRIBUTION: Final = "headrace"
OLDEST_PYTHON: Final = (3, 11)
PURPOSE_BY_EXTRA: Final = {
    "hub": "the hub needs its packages",
    "agents": "the agents need their packages",
    "trainer": "the trainer needs its packages",
    "standalone": "`headrace up` and `headrace demo` need their packages",
}
ANY_VERSION: Final = "any"
ENGINE_README: Final = "services/engine/README.md"

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?P<versions>[^;]*)(?:;.*extra\s*==\s*[\"'](?P<extra>[^\"']+)[\"'])?")
_CLAUSE = re.compile(r"(?P<operator>[<>=!]=|<|>)\s*(?P<version>\S+)")
_OPERATORS = {"==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Requirement:
    """One package that an extra of this distribution asks for. `versions` is as pip spells it: `>=5,<6`."""

    name: str
    versions: str
    extra: str


@dataclass(frozen=True)
class Packages:
    """What is installed. `requirements` are empty where Headrace runs without being installed."""

    python: tuple[int, int, int]
    requirements: Sequence[Requirement]
    version_by_name: Mapping[str, str]

    @property
    def compiles(self) -> bool:
        """DeepSpeed and SGLang compile at first use."""
        return not {"deepspeed", "sglang"}.isdisjoint(self.version_by_name)


def look() -> Packages:
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        lines = []
    requirements = parse_requirements(lines)
    names = [*{requirement.name for requirement in requirements}, "torch", "sglang"]
    found = {name: version for name in names if (version := installed_version(name)) is not None}
    return Packages(sys.version_info[:3], requirements, found)


def parse_requirements(lines: Sequence[str]) -> list[Requirement]:
    """Requirements of extras, from the lines of a distribution's metadata."""
    matches = [match for line in lines if (match := _REQUIREMENT.match(line)) and match["extra"]]
    return [Requirement(match["name"], match["versions"].strip(), match["extra"]) for match in matches]


def check(packages: Packages, *, engine_version: str = InferenceHubSection().engine_version) -> list[Finding]:
    """Rows of Python, of each part, of torch and of SGLang. A part that is not installed may run elsewhere: a warning."""
    if packages.requirements:
        parts = [_check_part(extra, packages) for extra in PURPOSE_BY_EXTRA]
    else:
        parts = [ok("packages", "not looked at", "Headrace runs from its sources here, so nothing says which ones it needs")]
    return [_check_python(packages.python), *parts, _check_torch(packages), _check_engine(packages, engine_version)]


def _check_python(python: tuple[int, int, int]) -> Finding:
    found, rule = ".".join(map(str, python)), f"Python >= {'.'.join(map(str, OLDEST_PYTHON))}"
    if python >= OLDEST_PYTHON:
        return ok("python", found, rule)
    return problem("python", found, rule, "make the virtual environment with a newer Python")


def _check_part(extra: str, packages: Packages) -> Finding:
    name, rule = f"packages: {extra}", PURPOSE_BY_EXTRA[extra]
    requirements = [requirement for requirement in packages.requirements if requirement.extra == extra]
    installed = packages.version_by_name
    install = f"in the checkout, pip install '.[{extra}]'"
    if missing := [requirement.name for requirement in requirements if requirement.name not in installed]:
        return warning(name, f"missing: {', '.join(missing)}", rule, f"{install}, if it is to run on this machine")
    unfit = [one for one in requirements if not is_satisfied(installed[one.name], one.versions)]
    if unfit:
        found = ", ".join(f"{one.name} {installed[one.name]} is not {one.versions}" for one in unfit)
        return problem(name, found, rule, install)
    return ok(name, ", ".join(f"{one.name} {installed[one.name]}" for one in requirements), rule)


def _check_torch(packages: Packages) -> Finding:
    rule = "engines and the trainer compute with torch"
    version = packages.version_by_name.get("torch")
    if version is None:
        return warning("torch", "not installed", rule, f"install it where they run; {ENGINE_README} says which")
    return ok("torch", version, rule)


def _check_engine(packages: Packages, wanted: str) -> Finding:
    rule = f"inference_hub.engine_version is {wanted}"
    version = packages.version_by_name.get("sglang")
    if version is None:
        return warning("sglang", "not installed", rule, f"install it where engines run; {ENGINE_README} says how")
    if wanted not in (ANY_VERSION, version):
        remedy = f"install sglang {wanted}, or set inference_hub.engine_version={ANY_VERSION} to accept every one"
        return problem("sglang", version, rule, remedy)
    return ok("sglang", version, rule)


def is_satisfied(version: str, wanted: str) -> bool:
    """Whether a version is within `>=5,<6`, by its numbers: what follows them (`+cpu`, `rc1`) is not looked at."""
    return all(
        _OPERATORS[clause["operator"]](*_same_length(_numbers(version), _numbers(clause["version"])))
        for clause in _CLAUSE.finditer(wanted.replace(",", " "))
    )


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in match[0].split(".")] if match else []


def _same_length(first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
    length = max(len(first), len(second))
    return first + [0] * (length - len(first)), second + [0] * (length - len(second))


def installed_version(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
