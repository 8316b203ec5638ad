import sys

import pytest

from services.standalone.doctor import machine, programs
from services.standalone.doctor.finding import Severity
from services.standalone.doctor.machine import EARLIEST_TIME_S, GIB, Docker, Machine

FINE = {
    "num_cores": 8,
    "memory_bytes": 32 * GIB,
    "disk_bytes": 100 * GIB,
    "disk": "/data",
    "shared_memory_bytes": 8 * GIB,
    "compiler": "/usr/bin/cc",
    "time_s": EARLIEST_TIME_S + 1,
}


def rows(*, has_torch: bool = True, needs_compiler: bool = True, **changes) -> dict[str, Severity]:
    facts = Machine(**{**FINE, **changes})
    return {one.check: one.severity for one in machine.check(facts, has_torch=has_torch, needs_compiler=needs_compiler)}


def test_good_machine_has_nothing_to_do():
    assert set(rows().values()) == {Severity.OK}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cores", {"num_cores": 1}),
        ("memory", {"memory_bytes": 2 * GIB}),
        ("disk", {"disk_bytes": GIB}),
        ("shared memory", {"shared_memory_bytes": GIB // 16}),
    ],
)
def test_little_of_something_is_a_warning(name, change):
    assert [check for check, severity in rows(**change).items() if severity is Severity.WARNING] == [name]


def test_shared_memory_of_a_container_names_the_flag():
    facts = Machine(**{**FINE, "shared_memory_bytes": GIB // 16})
    (found,) = [one for one in machine.check(facts, has_torch=True, needs_compiler=True) if one.check == "shared memory"]
    assert found.found == "0.1 GiB in /dev/shm"
    assert "--shm-size" in found.remedy


def test_shared_memory_does_not_matter_where_torch_is_not_installed():
    assert "shared memory" not in rows(has_torch=False, shared_memory_bytes=0)


def test_what_the_system_does_not_tell_has_no_row():
    assert "memory" not in rows(memory_bytes=None)


def test_compiler_is_a_problem_only_where_something_compiles():
    assert rows(compiler=None)["c compiler"] is Severity.PROBLEM
    assert rows(compiler=None, needs_compiler=False)["c compiler"] is Severity.OK


def test_clock_that_was_never_set_is_a_problem():
    assert rows(time_s=3600.0)["clock"] is Severity.PROBLEM


@pytest.mark.parametrize(
    ("docker", "severity", "found"),
    [
        (Docker(has_client=False), Severity.OK, "not installed"),
        (Docker(True, problem="permission denied"), Severity.WARNING, "no engine answers: permission denied"),
        (Docker(True, "28.1.0"), Severity.WARNING, "engine 28.1.0, no Compose"),
        (Docker(True, "28.1.0", "1.29.2"), Severity.WARNING, "engine 28.1.0, Compose 1.29.2"),
        (Docker(True, "28.1.0", "2.35.1"), Severity.OK, "engine 28.1.0, Compose 2.35.1"),
    ],
)
def test_docker_is_never_more_than_a_warning(docker, severity, found):
    row = machine.check_docker(docker)
    assert (row.severity, row.found) == (severity, found)


def test_this_machine_can_be_looked_at(tmp_path):
    facts = machine.look(tmp_path)
    assert facts.num_cores >= 1
    assert facts.disk_bytes > 0


def test_program_that_hangs_or_is_not_there_is_a_reply():
    hanging = programs.ask([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.05)
    assert hanging.status is None
    assert "did not answer within 0.05 s" in hanging.last_error
    assert "cannot be run" in programs.ask(["no-such-program"], timeout_s=1).last_error


def test_programs_last_line_of_complaint_is_its_reason():
    failing = programs.ask([sys.executable, "-c", "import sys; sys.exit('first\\nthe reason\\n\\n')"], timeout_s=60)
    assert (failing.is_success, failing.last_error) == (False, "the reason")
