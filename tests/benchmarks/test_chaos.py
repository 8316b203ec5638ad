"""The schedule of faults, what counts as recovered, and the account afterwards: what the chaos run decides by."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.account import account
from benchmarks.chaos.recovery import Recovery, covered_s, recovery, table
from benchmarks.chaos.schedule import APART_S, PARTS, PAUSE_S, STOP_S, Action, schedule
from benchmarks.chaos.signs import EngineView, HubView, RedisView, agent_goes_on, engine_goes_on, has_more, hub_goes_on
from benchmarks.stream_history import StreamHistory
from benchmarks.timeline import Timeline
from services.standalone.run_files import Lineage
from shared.trajectory import Outcome

KINDS = list(PARTS)


@given(st.integers(), st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
def test_schedule_is_a_function_of_its_seed_and_a_longer_one_begins_with_a_shorter_one(seed, kinds):
    assert schedule(seed, kinds, 30) == schedule(seed, kinds, 60)[:30]


def test_another_seed_is_another_schedule():
    assert schedule(0, KINDS, 10) != schedule(1, KINDS, 10)


@given(st.integers())
def test_every_kind_is_killed_and_stopped_before_any_comes_again(seed):
    singles = [fault for fault in schedule(seed, KINDS, 15) if len(fault.blows) == 1]
    assert sorted((fault.blows[0].kind, fault.blows[0].action) for fault in singles) == sorted(itertools.product(KINDS, Action))


@given(st.integers(), st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
def test_faults_are_within_their_bounds_and_every_third_hits_two_different_processes(seed, kinds):
    for fault in schedule(seed, kinds, 60):
        assert PAUSE_S[0] <= fault.pause_s <= PAUSE_S[1]
        is_pair = fault.number % 3 == 0 and kinds not in (["hub"], ["redis"], ["trainer"])
        assert len(fault.blows) == len({blow.part for blow in fault.blows}) == (2 if is_pair else 1)
        for index, blow in enumerate(fault.blows):
            assert blow.part in PARTS[blow.kind]
            assert blow.kind in kinds
            assert (STOP_S[0] <= blow.stop_s <= STOP_S[1]) if blow.action is Action.STOP else blow.stop_s == 0
            assert (APART_S[0] <= blow.after_s <= APART_S[1]) if index else blow.after_s == 0


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(0.0, 30.0)], 10.0),
        ([(11.0, 12.0), (11.5, 13.0)], 2.0),
        ([(0.0, 11.0), (19.0, 99.0)], 2.0),
        ([(1.0, 2.0)], 0.0),
    ],
)
def test_overlapping_intervals_count_once_and_only_within_the_window(intervals, expected):
    assert covered_s((10.0, 20.0), intervals) == expected


def test_recovery_is_what_is_left_of_the_time_beside_starting_and_standing_still():
    found = recovery(
        "hub", Action.KILL, "hub", blow_at=100.0, goes_on_at=110.0, starting=[(101.0, 104.0)], standing=[(103.0, 107.0)]
    )
    assert (found.total_s, found.standing_s, found.start_up_s, found.recovery_s) == (10.0, 4.0, 2.0, 4.0)


def test_table_has_the_median_and_the_maximum_of_each_kind_and_action():
    recoveries = [Recovery("hub", Action.KILL, "hub", total, 1.0, 0.0) for total in (2.0, 3.0, 9.0)]
    assert table(recoveries)[1:] == [("kill hub", "3", "2.0 s", "8.0 s", "1.0 s", "9.0 s")]


def test_counter_of_a_new_process_counts_from_0():
    assert has_more(5, 6)
    assert not has_more(5, 5)
    assert has_more(5, 1), "a hub that started again has answered one"
    assert not has_more(5, 0)


def hub(*engines: tuple[int, float]) -> HubView:
    return HubView(0.0, {f"e{index}": EngineView(True, num_open, completed) for index, (num_open, completed) in enumerate(engines)})


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (hub((3, 10), (2, 20)), False),
        (hub((0, 10), (2, 20)), False),
        (hub((0, 10), (2, 21)), True),
        (hub((3, 10), (2, 25)), False),
        (hub((3, 11), (2, 20)), True),
        (HubView(0.0, {"e1": EngineView(True, 0, 21)}), True),
    ],
    ids=["nothing", "no answers yet", "elsewhere", "its calls wait", "by itself", "forgotten"],
)
def test_run_goes_on_without_an_engine_when_its_calls_are_answered(now, expected):
    assert engine_goes_on(hub((3, 10), (2, 20)), now, "e0") is expected


def test_hub_works_when_it_has_answered_a_call():
    assert not hub_goes_on(hub((1, 10)), hub((1, 10)))
    assert hub_goes_on(hub((1, 10)), hub((1, 1)))


def test_run_goes_on_without_an_agent_when_nobody_waits_for_its_groups():
    before = RedisView(0.0, 1, 1, {"g0": "dead", "g1": "other"}, {"dead": 100.0, "other": 100.0})
    assert not agent_goes_on(before, before, "dead")
    assert agent_goes_on(before, replace(before, owners={"g0": "other", "g1": "other"}), "dead")
    assert agent_goes_on(before, replace(before, owners={}), "dead")
    assert agent_goes_on(before, replace(before, alive_until_ms={"dead": 101.0}), "dead")


def trajectory(name: str, group: str, *, index: int = 0, outcome: Outcome = Outcome.COMPLETED, detail: str = ""):
    return SimpleNamespace(trajectory_id=name, group_id=group, sample_index=index, outcome=outcome, detail=detail)


def history(*trajectories, left=(), discarded=()) -> StreamHistory:
    return StreamHistory({one.trajectory_id: one for one in trajectories}, set(left), set(discarded))


def books(*, version: int, trained: int, is_balanced: bool = True):
    return SimpleNamespace(version=version, trained=trained, is_balanced=is_balanced)


def line(version: int, *trajectory_ids: str) -> Lineage:
    return Lineage(version, (f"g{version}",), trajectory_ids, 0)


A, B, C = trajectory("a", "g1"), trajectory("b", "g2"), trajectory("c", "g3")


def test_account_of_a_sound_run_finds_nothing():
    found = account(history(A, B, C, left="ab"), [line(1, "a"), line(2, "b")], books(version=2, trained=2), running=[])
    assert (found.lost, found.missing, found.trained_twice, found.failures, found.problems) == ((), (), (), (), ())
    assert (found.num_finished, found.num_trained) == (3, 2)


def test_trajectory_that_left_the_stream_untrained_is_lost_unless_its_group_was_discarded():
    lineage, counts = [line(1, "a")], books(version=1, trained=1)
    assert account(history(A, B, left="ab"), lineage, counts, running=[]).lost == ("b",)
    assert account(history(A, B, left="ab", discarded=["g2"]), lineage, counts, running=[]).lost == ()


def test_trajectory_that_redis_forgot_is_lost():
    assert account(history(A), [line(1, "a", "b")], books(version=1, trained=1), running=[]).lost == ("b",)


def test_trajectory_of_two_versions_was_trained_twice():
    assert account(history(A), [line(1, "a"), line(2, "a")], books(version=2, trained=2), running=[]).trained_twice == ("a",)


def test_group_that_never_ends_is_missing_an_episode():
    assert account(history(A), [line(1, "a")], books(version=1, trained=1), running=["g9"]).missing == ("g9",)


def test_books_and_lineage_must_agree():
    found = account(history(A), [line(1, "a")], books(version=2, trained=2, is_balanced=False), running=[])
    assert len(found.problems) == 3


def test_episode_recorded_twice_is_a_problem():
    again = trajectory("z", "g1")
    assert account(history(A, again), [line(1, "a")], books(version=1, trained=1), running=[]).problems == (
        "episode 0 of group g1 was recorded 2 times",
    )


def test_episodes_that_saw_a_failure_are_told_with_its_last_line():
    failed = trajectory("f", "g4", outcome=Outcome.ENVIRONMENT_ERROR, detail="Traceback\nthe hub refused")
    found = account(history(A, failed), [line(1, "a")], books(version=1, trained=1), running=[])
    assert found.failures == ("environment_error f: the hub refused",)


def test_timeline_is_in_order_and_says_who_and_when(tmp_path):
    times = iter([0.0, 2.0, 1.0])
    timeline = Timeline(lambda: next(times))
    timeline.recovered("hub", "answers again")
    timeline.fault("hub", "SIGKILL")
    timeline.write(tmp_path / "timeline.txt")
    first, second = (tmp_path / "timeline.txt").read_text().splitlines()
    assert first.split() == ["1.00", "s", "FAULT", "hub", "SIGKILL"]
    assert second.split() == ["2.00", "s", "RECOVERED", "hub", "answers", "again"]
