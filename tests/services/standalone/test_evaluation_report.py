import io
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services.standalone import printing
from services.standalone.evaluation_report import Evaluation, environment_result, overview, wilson_interval
from shared.trajectory import Outcome
from tests.shared.episodes import admitted_group, finished_episode


@pytest.mark.parametrize(
    ("num_successes", "num_trials", "expected"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3.
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_interval_is_the_published_one(num_successes, num_trials, expected):
    assert wilson_interval(num_successes, num_trials) == pytest.approx(expected, abs=5e-5)


@given(st.integers(1, 2_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_holds_the_rate_and_is_the_same_for_failures(counts):
    num_successes, num_trials = counts
    low, high = wilson_interval(num_successes, num_trials)
    assert 0 <= low <= num_successes / num_trials <= high <= 1
    mirrored = wilson_interval(num_trials - num_successes, num_trials)
    assert all(math.isclose(one, 1 - other, abs_tol=1e-12) for one, other in zip((low, high), mirrored[::-1], strict=True))


def episodes(*endings: tuple[Outcome, float, str]):
    group = admitted_group("calculator", size=len(endings))
    return [
        msgspec.structs.replace(finished_episode(group, index), outcome=outcome, reward=reward, detail=detail)
        for index, (outcome, reward, detail) in enumerate(endings)
    ]


@pytest.fixture
def result():
    return environment_result(
        episodes(
            (Outcome.COMPLETED, 1.0, ""),
            (Outcome.COMPLETED, 0.5, ""),
            (Outcome.TIMEOUT, 0.0, "a step took 60 s"),
            (Outcome.ENVIRONMENT_ERROR, 0.0, "Traceback\nValueError: no page"),
            (Outcome.TIMEOUT, 0.0, "another"),
        )
    )


def evaluation(result, *, greedy=False, version=25):
    return Evaluation(
        model="m", version=version, greedy=greedy, seconds=1.0, trajectories="t.jsonl", results={"calculator": result}
    )


def test_failures_count_as_episodes_and_are_told_by_outcome(result):
    assert (result.episodes, result.success_rate, result.mean_reward) == (5, 0.2, 0.3)
    assert result.success_interval == wilson_interval(1, 5)
    assert result.outcomes == {Outcome.COMPLETED: 2, Outcome.TIMEOUT: 2, Outcome.ENVIRONMENT_ERROR: 1}
    assert [(problem.outcome, problem.detail) for problem in result.problems] == [
        (Outcome.TIMEOUT, "a step took 60 s"),
        (Outcome.ENVIRONMENT_ERROR, "Traceback\nValueError: no page"),
    ]


def test_evaluation_is_scored_if_each_environment_has_an_episode_that_says_something(result):
    broken = environment_result(episodes((Outcome.ENVIRONMENT_ERROR, 0.0, "no")))
    assert evaluation(result).is_scored
    assert not evaluation(broken).is_scored
    [late] = episodes((Outcome.TIMEOUT, -1.0, "a step took 60 s"))
    assert not evaluation(environment_result([late])).is_scored
    assert evaluation(environment_result([msgspec.structs.replace(late, has_stated_reward=True)])).is_scored


def test_overview_off_a_terminal_is_lines(result):
    shown = io.StringIO()
    console: Console = printing.console(shown)
    console.print(overview(console, evaluation(result)))
    title, header, row, *problems = shown.getvalue().splitlines()
    assert title == "held-out tasks, sampled: version 25, m"
    assert header.split("  ")[0] == "environment"
    assert row.startswith("calculator   20.0%    3.6% to 62.4%  0.300")
    assert row.endswith("timeout 2, environment_error 1")
    assert [line.partition(": ")[2] for line in problems] == ["timeout: a step took 60 s", "environment_error: ValueError: no page"]
