import tomllib

import pytest

from services.standalone.doctor import packages
from services.standalone.doctor.finding import Finding, Severity
from services.standalone.doctor.packages import Packages, Requirement, is_satisfied, parse_requirements

REQUIREMENTS = (Requirement("aiohttp", ">=3.11", "hub"), Requirement("uvloop", ">=0.21", "hub"))


def row(name: str, *, python=(3, 11, 7), versions=None, requirements=REQUIREMENTS, engine_version="0.5.23") -> Finding:
    facts = Packages(python, requirements, versions or {})
    return next(one for one in packages.check(facts, engine_version=engine_version) if one.check == name)


def test_every_extra_that_a_part_needs_is_in_the_distribution(repository):
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(packages.PURPOSE_BY_EXTRA) <= set(extras)


def test_python_that_is_too_old_is_a_problem():
    assert row("python", python=(3, 10, 12)).severity is Severity.PROBLEM
    assert row("python", python=(3, 11, 0)) == Finding("python", Severity.OK, "3.11.0", "Python >= 3.11")


def test_requirements_of_extras_are_read_from_metadata():
    lines = ["msgspec>=0.20", 'aiohttp>=3.11; extra == "hub"', 'transformers<6,>=5; extra == "agents"', 'torch; extra == "x"']
    assert parse_requirements(lines) == [
        Requirement("aiohttp", ">=3.11", "hub"),
        Requirement("transformers", "<6,>=5", "agents"),
        Requirement("torch", "", "x"),
    ]


def test_part_that_is_not_installed_names_its_extra():
    """It may run on another machine, so this is no problem yet."""
    found = row("packages: hub", versions={"aiohttp": "3.12"})
    assert found.severity is Severity.WARNING
    assert found.found == "missing: uvloop"
    assert found.remedy == "in the checkout, pip install '.[hub]', if it is to run on this machine"


def test_package_of_a_version_that_does_not_fit_is_a_problem():
    found = row("packages: hub", versions={"aiohttp": "3.9.5", "uvloop": "0.22"})
    assert found.severity is Severity.PROBLEM
    assert found.found == "aiohttp 3.9.5 is not >=3.11"


def test_part_that_is_installed_shows_its_versions():
    found = row("packages: hub", versions={"aiohttp": "3.11", "uvloop": "0.22.1"})
    assert (found.severity, found.found) == (Severity.OK, "aiohttp 3.11, uvloop 0.22.1")


def test_source_tree_that_was_never_installed_is_not_judged():
    found = row("packages", requirements=())
    assert (found.severity, found.found) == (Severity.OK, "not looked at")


@pytest.mark.parametrize(
    ("installed", "wanted", "severity"),
    [
        ("0.5.23", "0.5.23", Severity.OK),
        ("0.5.22", "0.5.23", Severity.PROBLEM),
        ("0.5.22", "any", Severity.OK),
        (None, "0.5.23", Severity.WARNING),
    ],
)
def test_sglang_is_the_version_that_the_run_names(installed, wanted, severity):
    versions = {} if installed is None else {"sglang": installed}
    assert row("sglang", versions=versions, engine_version=wanted).severity is severity


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("5.19.0", ">=5,<6", True),
        ("6.0.0", "<6,>=5", False),
        ("0.19.8", "==0.19.8", True),
        ("2.13.0+cpu", "==2.13", True),
        ("3.9", ">=3.11", False),
        ("26.0.1", "", True),
        ("1.0rc1", "!=1.0", False),
    ],
)
def test_versions_compare_by_their_numbers(version, wanted, expected):
    assert is_satisfied(version, wanted) is expected


@pytest.mark.parametrize(("versions", "compiles"), [({"sglang": "1"}, True), ({"deepspeed": "1"}, True), ({"torch": "2"}, False)])
def test_compiler_is_needed_by_those_who_compile(versions, compiles):
    assert Packages((3, 11, 0), (), versions).compiles is compiles


def test_this_installation_is_seen():
    assert packages.look().version_by_name["httpx"]
