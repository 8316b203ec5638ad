import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from services.standalone import keeper
from services.standalone.observer import State
from services.standalone.readiness import wait_until
from services.standalone.restarts import RestartPolicy
from services.standalone.supervisor import Stage, StopRequested, Supervisor
from shared.errors import ProcessError
from tests.services.standalone.toy_processes import SLEEP, STUBBORN, WITH_GRANDCHILD, Recorder, member, stages


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left


def supervisor(tmp_path: Path, recorder: Recorder) -> Supervisor:
    return Supervisor(tmp_path, recorder)


async def test_run_ends_when_its_last_process_has_finished(tmp_path, recorder):
    await supervisor(tmp_path, recorder).run(stages(member("hub", SLEEP), member("trainer", "print('done')")))
    assert ("trainer", "done") in recorder.lines
    assert (tmp_path / "trainer.log").read_text() == "done\n"


async def test_processes_start_in_order_and_stop_in_the_reverse_one(tmp_path, recorder):
    await supervisor(tmp_path, recorder).run(
        stages(member("redis", SLEEP), member("hub", SLEEP), member("agents", SLEEP), member("trainer", ""))
    )
    started = [name for name, state in recorder.states if state is State.STARTING]
    stopped = [name for name, state in recorder.states if state is State.STOPPED]
    assert started == ["redis", "hub", "agents", "trainer"]
    assert stopped == started[::-1]


async def test_stage_waits_until_those_before_it_are_ready(tmp_path, recorder):
    first = member("redis", f"print('up', flush=True); {SLEEP}", is_ready=recorder.has_printed("redis"))
    await supervisor(tmp_path, recorder).run(stages(first, member("trainer", "")))
    assert recorder.states.index(("redis", State.READY)) < recorder.states.index(("trainer", State.STARTING))


async def test_stage_that_needs_nothing_starts_beside_the_one_before(tmp_path, recorder):
    engine = member("engine-0", f"print('up', flush=True); {SLEEP}", is_ready=recorder.has_printed("hub"))
    hub = member("hub", f"print('up', flush=True); {SLEEP}", is_ready=recorder.has_printed("engine-0"))
    await supervisor(tmp_path, recorder).run([Stage([engine]), Stage([hub], needs_previous=False), Stage([member("trainer", "")])])


async def test_process_that_dies_is_named_with_status_and_last_lines(tmp_path, recorder):
    dying = member("engine-0", "import time; print('no such model'); raise SystemExit(3)")
    with pytest.raises(ProcessError, match=r"engine-0 exited with status 3 after .*engine-0\.log") as caught:
        await supervisor(tmp_path, recorder).run(stages(member("redis", SLEEP), dying, member("trainer", SLEEP)))
    assert caught.value.last_lines == ["no such model"]
    assert ("redis", State.STOPPED) in recorder.states


async def test_last_process_that_fails_is_an_error_too(tmp_path, recorder):
    with pytest.raises(ProcessError, match="trainer exited with status 1"):
        await supervisor(tmp_path, recorder).run(stages(member("trainer", "raise SystemExit('bad batch')")))


async def test_killed_process_is_named_with_its_signal(tmp_path, recorder):
    dying = member("agents", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ProcessError, match="agents was killed by SIGKILL"):
        await supervisor(tmp_path, recorder).run(stages(dying, member("trainer", SLEEP)))


async def test_process_that_dies_before_it_is_ready_is_not_waited_for(tmp_path, recorder):
    dying = member("engine-0", "raise SystemExit(1)", is_ready=recorder.has_printed("nobody"), ready_timeout_s=3600)
    with pytest.raises(ProcessError, match="engine-0 exited"):
        await supervisor(tmp_path, recorder).run(stages(dying, member("trainer", "")))


async def test_process_that_never_gets_ready_is_a_sentence(tmp_path, recorder):
    slow = member("engine-0", SLEEP, is_ready=recorder.has_printed("nobody"), ready_timeout_s=0)
    with pytest.raises(ProcessError, match="engine-0 must be ready within 0 s and is not"):
        await supervisor(tmp_path, recorder).run(stages(slow, member("trainer", "")))


async def test_signal_stops_everything(tmp_path, recorder):
    supervised = supervisor(tmp_path, recorder)
    recorder.on_line = lambda name, line: supervised.request_stop(signal.SIGINT)
    with pytest.raises(StopRequested) as caught:
        await supervised.run(stages(member("hub", SLEEP), member("trainer", f"print('up', flush=True); {SLEEP}")))
    assert caught.value.signal_number == signal.SIGINT


async def test_process_that_ignores_sigterm_is_killed_after_its_deadline(tmp_path, recorder):
    deaf = member("hub", STUBBORN, is_ready=recorder.has_printed("hub"), stop_timeout_s=0.1)
    await supervisor(tmp_path, recorder).run(stages(deaf, member("trainer", "")))
    assert ("hub", State.STOPPED) in recorder.states


async def test_second_signal_stops_without_waiting_for_deadlines(tmp_path, recorder):
    supervised = supervisor(tmp_path, recorder)
    deaf = member("hub", STUBBORN, stop_timeout_s=3600)

    def twice(name: str, line: str) -> None:
        supervised.request_stop(signal.SIGINT)
        asyncio.get_running_loop().call_soon(supervised.request_stop, signal.SIGINT)

    recorder.on_line = twice
    with pytest.raises(StopRequested):
        await supervised.run(stages(deaf, member("trainer", SLEEP)))


async def test_what_a_process_started_ends_with_it(tmp_path, recorder):
    parent = member("engine-0", WITH_GRANDCHILD, is_ready=recorder.has_printed("engine-0"))
    await supervisor(tmp_path, recorder).run(stages(parent, member("trainer", "")))
    (line,) = [line for name, line in recorder.lines if name == "engine-0"]
    assert await wait_until(is_gone(int(line.split()[1])), timeout_s=60)


def is_gone(pid: int):
    """A probe: the process has ended. A zombie has; in a container nobody may reap it."""

    async def probe() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return probe


async def test_hook_runs_after_the_last_process_and_while_the_others_run(tmp_path, recorder):
    seen = []

    async def hook() -> None:
        seen.extend(recorder.states)

    await supervisor(tmp_path, recorder).run(stages(member("redis", SLEEP), member("trainer", "")), before_shutdown=hook)
    assert ("trainer", State.RUNNING) in seen
    assert not any(state is State.STOPPED for _, state in seen)


PATIENT = RestartPolicy(max_restarts=2, window_s=3600.0)
UNTIL = "import pathlib, time\nwhile not pathlib.Path({path!r}).exists(): time.sleep(0.01)\n"


def until(path: Path) -> str:
    """Code that waits until there is a file `path`."""
    return UNTIL.format(path=str(path))


def goes_on(tmp_path: Path, code: str) -> str:
    """Code of a last process that says that it has started, and then does `code`."""
    return f"import pathlib\npathlib.Path({str(tmp_path / 'going')!r}).touch()\n{code}"


def counting(path: Path, code: str) -> str:
    """Code of a process that notes each of its lives in `path` before it goes on with `code`, which knows `life`, from 1."""
    return (
        f"import pathlib\npath = pathlib.Path({str(path)!r})\nwith path.open('a') as file: file.write('x')\n"
        f"life = len(path.read_text())\nprint('up', flush=True)\n{code}"
    )


async def test_process_that_worked_and_was_killed_is_started_again(tmp_path, recorder):
    lives, done = tmp_path / "lives", tmp_path / "done"
    code = f"import os\nif life < 3: os.kill(os.getpid(), 9)\npathlib.Path({str(done)!r}).touch()\ntime.sleep(600)"
    code = until(tmp_path / "going") + code
    dying = member("agents", counting(lives, code), is_ready=recorder.has_printed("agents"))
    supervised = Supervisor(tmp_path, recorder, restarts=PATIENT)
    await supervised.run(stages(dying, member("trainer", goes_on(tmp_path, until(done)))))
    assert lives.read_text() == "xxx"
    assert recorder.restarted == [("agents", "was killed by SIGKILL")] * 2
    assert (tmp_path / "agents.log").read_text() == "up\n" * 3, "one log over all lives"


async def test_last_process_is_started_again_until_it_finishes(tmp_path, recorder):
    lives = tmp_path / "lives"
    trainer = member("trainer", counting(lives, "import os\nif life < 2: os.kill(os.getpid(), 9)"))
    await Supervisor(tmp_path, recorder, restarts=PATIENT).run(stages(member("hub", SLEEP), trainer))
    assert lives.read_text() == "xx"
    assert recorder.restarted == [("trainer", "was killed by SIGKILL")]


async def test_run_ends_when_a_process_dies_more_often_than_allowed(tmp_path, recorder):
    lives = tmp_path / "lives"
    dying = member("hub", counting(lives, until(tmp_path / "going") + "raise SystemExit(1)"), is_ready=recorder.has_printed("hub"))
    with pytest.raises(ProcessError, match=r"hub exited with status 1 after .*, and had been started again 2 times; see"):
        await Supervisor(tmp_path, recorder, restarts=PATIENT).run(stages(dying, member("trainer", goes_on(tmp_path, SLEEP))))
    assert lives.read_text() == "xxx"


async def test_process_that_never_worked_is_not_started_again(tmp_path, recorder):
    broken = member("engine-0", "raise SystemExit('no such model')", is_ready=recorder.has_printed("nobody"), ready_timeout_s=3600)
    with pytest.raises(ProcessError, match=r"engine-0 exited with status 1 after \d+ s; see"):
        await Supervisor(tmp_path, recorder, restarts=PATIENT).run(stages(broken, member("trainer", SLEEP)))
    assert recorder.restarted == []


async def test_later_life_that_does_not_get_ready_in_time_is_ended_and_started_again(tmp_path, recorder, monkeypatch):
    lives, done = tmp_path / "lives", tmp_path / "done"
    code = f"import os\nif life == 1: os.kill(os.getpid(), 9)\nif life == 3: pathlib.Path({str(done)!r}).touch()\ntime.sleep(600)"
    code = until(tmp_path / "going") + code

    def life() -> int:
        return len(lives.read_text()) if lives.is_file() else 0

    async def wait_until(probe, *, timeout_s) -> bool:
        while life() != 1 + len(recorder.restarted):  # noqa: ASYNC110 - what it waits for is a process
            await asyncio.sleep(0.01)
        return await probe()

    async def is_ready() -> bool:
        return life() != 2

    monkeypatch.setattr(keeper, "wait_until", wait_until)
    hanging = member("hub", counting(lives, code), is_ready=is_ready)
    supervised = Supervisor(tmp_path, recorder, restarts=PATIENT)
    await supervised.run(stages(hanging, member("trainer", goes_on(tmp_path, until(done)))))
    assert recorder.restarted == [("hub", "was killed by SIGKILL"), ("hub", "was killed by SIGTERM")]


async def test_signal_ends_a_run_that_waits_to_start_a_process_again(tmp_path, recorder):
    supervised = Supervisor(tmp_path, recorder, restarts=PATIENT)
    recorder.restarts = lambda name, ending, delay_s: supervised.request_stop(signal.SIGTERM)
    dying = member("trainer", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(StopRequested):
        await supervised.run(stages(member("hub", SLEEP), dying))
