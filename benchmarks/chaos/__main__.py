"""Kills and stops the processes of a real run for minutes, and says afterwards what was lost: nothing should be.

Redis, two SGLang engines on the CPU, the hub, two agent processes and the trainer under `headrace up`, training the demo's policy.
A seeded schedule sends SIGKILL and SIGSTOP, to one part at a time and to two; `headrace up` starts again what was killed. The
timeline and everything that the processes wrote stay in --directory. The last line is a JSON object.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmarks import live_options
from benchmarks.chaos.schedule import PARTS

if TYPE_CHECKING:
    from benchmarks.chaos.chaos import Chaos
    from shared.ledger import Books

EXAMPLES = """\
examples:
  python -m benchmarks.chaos
  python -m benchmarks.chaos --seed 7 --minutes 20
  python -m benchmarks.chaos --kinds trainer redis --minutes 2
  python -m benchmarks.chaos | tail -n 1 | jq .recovery_s_max

The exit status is 1 if a trajectory was lost or trained twice, an agent saw a failure, the books do not balance, something did
not recover, or `headrace up` gave up.
"""
STOPPED = 128 + signal.SIGTERM
"""Exit status of `headrace up` that was asked to end, and not one that gave up."""
LEASE_S = 5.0
"""Instead of 30 s: how soon another process takes the groups of one that fell silent."""
FIRST_UPDATES = 6
"""Before the first fault: there is a checkpoint by then."""
LAST_UPDATES = 5
"""After the last fault: learning goes on."""
SETTLE_S = 120.0
SHOWN_UPDATES = 20
MANY = 10_000
"""Faults, more than any run has time for."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default 0)")
    parser.add_argument("--minutes", type=float, default=5.0, help="between the first fault and the last (default 5)")
    parser.add_argument("--kinds", nargs="+", choices=PARTS, default=list(PARTS), help="what is hit (default: everything)")
    live_options.add_arguments(parser, directory="runs/chaos")
    options = parser.parse_args()
    folder, policy = live_options.prepare(options)
    report = play(folder, policy, options)
    print(json.dumps(report))
    return 0 if report["is_sound"] else 1


def play(folder: Path, policy: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run under fire, from its start to its account."""
    from benchmarks.chaos.chaos import Chaos
    from benchmarks.chaos.signs import Watch
    from benchmarks.live_run import LiveRun, run_file
    from benchmarks.timeline import Timeline
    from shared.keys import Keys

    timeline, heard = Timeline(), []
    raw = run_file(folder / "run", policy, seed=options.seed, lease_s=LEASE_S)
    live = LiveRun(folder, raw, lambda name, text: heard[0].line(name, text) if heard else None)
    say(f"starting; everything goes to {folder}")
    live.start()
    watch = None
    try:
        live.wait_until((folder / "run" / "run.yaml").is_file, "its run file is written")
        configuration = live.configuration
        watch = Watch(configuration.redis.url, Keys(configuration.run.id), configuration.inference_hub.address)
        chaos = Chaos(timeline, live, watch)
        heard.append(chaos)
        watch.start()
        live.wait_until(lambda: watch.redis and watch.redis.version >= FIRST_UPDATES, "it trains")
        strike_for(chaos, options)
        version = watch.redis.version
        live.wait_until(lambda: watch.redis.version >= version + LAST_UPDATES, "learning goes on after the last fault")
        timeline.note("chaos", f"learning goes on: version {watch.redis.version}")
        say("learning goes on; the run is brought to rest")
        live.settle(watch.books, timeout_s=SETTLE_S)
        books, running = watch.books(), watch.running()
    finally:
        if watch:
            watch.stop()
        status = live.stop()
        timeline.write(folder / "timeline.txt")
    report = reported(folder / "run", chaos, books, running)
    return report | {"exit_status": status, "is_sound": report["is_sound"] and status == STOPPED}


def strike_for(chaos: "Chaos", options: argparse.Namespace) -> None:
    """Strikes by the schedule for as long as `options` say, and returns when everything is back."""
    from benchmarks.chaos.schedule import schedule

    began = time.monotonic()
    for fault in schedule(options.seed, options.kinds, MANY):
        chaos.wait(fault.pause_s)
        if not chaos.wait_back(blow.part for blow in fault.blows):
            chaos.problems.append(f"{fault}: a part was not back after three minutes")
        if time.monotonic() - began > 60 * options.minutes:
            break
        say(f"[{time.monotonic() - began:4.0f} s of {60 * options.minutes:.0f}] fault {fault.number}: {fault}")
        num_known = len(chaos.recoveries)
        chaos.strike(fault)
        for one in chaos.recoveries[num_known:]:
            say(f"  {one.part}: goes on after {one.total_s:.1f} s, recovery {one.recovery_s:.1f} s")
    say("no more faults; everything has to come back, and learning to go on")
    if not chaos.wait_back():
        chaos.problems.append("not every process was back three minutes after the last fault")


def reported(directory: Path, chaos: "Chaos", books: "Books", running: Collection[str]) -> dict[str, Any]:
    """Prints timeline, recoveries and account of a run that has ended; the figures. Args: running: groups that never ended."""
    from benchmarks.chaos.account import account
    from benchmarks.chaos.recovery import table
    from benchmarks.stream_history import read_stream_history
    from services.standalone import run_files
    from shared.keys import Keys

    history = read_stream_history(directory / "redis", Keys(directory.name))
    lineage = [line for line in run_files.lineage(directory) if line.version <= books.version]
    found = account(history, lineage, books, running=running)
    rewards = [update.reward_mean for update in run_files.updates(directory)]
    say(f"\ntimeline, also in {directory.parent / 'timeline.txt'}:\n\n{chaos.timeline}")
    for row in table(chaos.recoveries):
        say("".join(f"{cell:<17}" for cell in row))
    say(
        f"\n{found.num_finished} trajectories finished, {found.num_trained} trained in {books.version} versions, "
        f"{len(history.discarded_groups)} groups discarded; reward of the last {SHOWN_UPDATES} updates "
        f"{mean(rewards[-SHOWN_UPDATES:]):.3f}, of the first {mean(rewards[:SHOWN_UPDATES]):.3f}"
    )
    problems = [*chaos.problems, *found.problems]
    for problem in (*problems, *(f"visible: {failure}" for failure in found.failures)):
        say(f"problem: {problem}")
    num_lost = len(found.lost) + len(found.missing)
    return {
        "lost": num_lost,
        "trained_twice": len(found.trained_twice),
        "visible_failures": len(found.failures),
        "recovery_s_max": round(max((one.recovery_s for one in chaos.recoveries), default=0.0), 1),
        "faults": chaos.num_blows,
        "with_start_up_s_max": round(max((one.total_s for one in chaos.recoveries), default=0.0), 1),
        "is_sound": not (num_lost or found.trained_twice or found.failures or problems),
    }


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
