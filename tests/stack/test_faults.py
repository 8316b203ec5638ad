"""What must hold when a process is killed in the middle of work: read from the append-only file, which no process of ours edits."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.stream_history import StreamHistory
from benchmarks.timeline import Timeline
from tests.stack.faulty_run import NUM_PLACES, ROLLOUT, FaultyRun
from tests.stack.guessing import NUM_TURNS
from tests.stack.token_server import TokenServer

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

GROUP_SIZE = ROLLOUT.num_return_sequences_in_group


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[TokenServer]:
    with TokenServer(tiny_model).serving() as hub:
        yield hub


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, hub: TokenServer, timeline: Timeline) -> Iterator[FaultyRun]:
    with ExitStack() as stack:
        yield FaultyRun(tmp_path, tiny_model, hub, stack, timeline)


def check_everything(run: FaultyRun) -> StreamHistory:
    """The books balance, no finished trajectory is lost, none was consumed twice, and admission was never exceeded."""
    books, history = run.settle(), run.history()
    trained = run.consumer.trajectory_ids
    assert len(trained) == len(set(trained)), "a trajectory was consumed twice"
    assert books.trained == run.consumer.version * ROLLOUT.rollout_batch_size
    assert len(trained) == GROUP_SIZE * books.trained

    episodes = Counter((trajectory.group_id, trajectory.sample_index) for trajectory in history.entered.values())
    assert set(episodes.values()) == {1}, "an episode of a group was recorded twice"
    given_up = {history.entered[trajectory_id].group_id for trajectory_id in history.left - set(trained)}
    assert len(given_up) <= history.num_discarded_groups == sum(books.discarded.values())
    in_groups = [trajectory_id for trajectory_id, trajectory in history.entered.items() if trajectory.group_id not in given_up]
    assert set(in_groups) == set(trained) | history.remaining, "a finished trajectory is neither trained nor in the stream"
    assert len(run.stream_ids()) == len(history.remaining) == GROUP_SIZE * (books.ready + books.unsaved)

    assert books.started == len(history.admitted)
    for num_groups, version in history.admitted:
        assert num_groups <= math.floor((version + 1 + ROLLOUT.async_generation_ratio) * ROLLOUT.rollout_batch_size)
    return history


def test_redis_killed_under_load_loses_nothing_and_everyone_goes_on(run, hub):
    run.start_agents("one")
    with run.consumer.running():
        run.wait_for_updates(3, description="the run is under way")
        for _ in range(3):
            run.kill_redis()
            run.restart_redis()
            run.wait_for_updates(2, description="agents and consumer go on by themselves")
        history = check_everything(run)
    finished = {session for session, count in hub.num_answered.items() if count >= NUM_TURNS}
    assert finished == history.entered.keys(), "what the agents finished is what entered the stream"


def test_episodes_that_end_while_redis_is_away_are_recorded_when_it_is_back(run, hub):
    hub.is_open.clear()
    run.start_agents("one")
    with run.consumer.running():
        run.wait_until(lambda: hub.num_waiting() == GROUP_SIZE * NUM_PLACES, description="every place is taken and generates")
        run.kill_redis()
        hub.is_open.set()
        run.wait_until(
            lambda: sum(count == NUM_TURNS for count in hub.num_answered.values()) == GROUP_SIZE * NUM_PLACES,
            description="every episode has had its last turn, and nobody could record it",
        )
        finished = set(hub.num_answered)
        run.restart_redis()
        run.wait_for_updates(3, description="the run goes on")
        history = check_everything(run)
    assert finished <= history.entered.keys()


def test_groups_of_a_killed_process_are_adopted_and_the_books_balance(run, hub):
    killed = run.start_agents("killed")
    with run.consumer.running():
        run.wait_for_updates(2, description="the run is under way")
        hub.is_open.clear()
        run.wait_until(lambda: run.books().running > 0 and hub.num_waiting() > 0, description="episodes are in the middle")
        run.kill_agents(killed)
        left = run.books().running
        assert left > 0
        hub.is_open.set()
        run.start_agents("heir")
        run.wait_for_updates(3, description="its groups are adopted and the run goes on")
        history = check_everything(run)
    adopted = [owners for owners in history.owners.values() if len(set(owners)) == 2]
    assert 1 <= len(adopted) <= left, "what grew too old meanwhile is given up instead"


def test_two_processes_share_the_places_and_outlive_one_of_them(run, hub):
    first = run.start_agents("first")
    run.start_agents("second")
    run.wait_until(lambda: len(run.processes()) == 2, description="both live")
    with run.consumer.running():
        run.wait_until(lambda: len(run.owners()) == 2, description="each has had groups")
        run.wait_for_updates(3, description="both work")
        both = run.owners()
        run.kill_agents(first)
        num_before = len(run.history().owners)
        run.wait_for_updates(6, description="the other goes on alone")
        history = check_everything(run)
    [gone] = [owner for owner in both if owner.endswith(f":{first.pid}")]
    later = list(history.owners.values())[num_before:]
    assert later
    assert all(gone not in owners for owners in later)
    assert gone not in run.processes()
