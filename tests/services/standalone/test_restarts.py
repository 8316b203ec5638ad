import pytest

from services.standalone.restarts import EndedLife, RestartPolicy, delay_s, has_worked

POLICY = RestartPolicy(max_restarts=3, window_s=100.0)


def life(*, is_first=False, status=-9, lived_s=50.0, was_ready: bool | None = True) -> EndedLife:
    return EndedLife(is_first, status, lived_s, was_ready)


def test_delays_double_while_lives_are_short_and_are_bounded():
    delays = [delay_s(life(), short_lives, [], POLICY, now=0.0) for short_lives in (0, 1, 2, 3, 7, 5_000)]
    assert delays == [0.5, 0.5, 1.0, 2.0, 30.0, 30.0]


def test_so_many_restarts_within_the_window_and_no_more():
    assert delay_s(life(), 0, [10.0, 20.0], POLICY, now=50.0) == 0.5
    assert delay_s(life(), 0, [10.0, 20.0, 30.0], POLICY, now=50.0) is None
    assert delay_s(life(), 0, [10.0, 20.0, 30.0], POLICY, now=111.0) == 0.5, "the first one is out of the window"


def test_no_restart_is_allowed_where_the_limit_is_0():
    assert delay_s(life(), 0, [], RestartPolicy(0, 100.0), now=0.0) is None


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (life(was_ready=True, status=2), True),
        (life(was_ready=False, status=-9), False),
        (life(was_ready=None, status=-9, lived_s=1.0), True),
        (life(was_ready=None, status=137, lived_s=1.0), True),
        (life(was_ready=None, status=1, lived_s=59.0), False),
        (life(was_ready=None, status=1, lived_s=60.0), True),
        (life(was_ready=None, status=2, lived_s=3600.0), False),
    ],
)
def test_first_life_proves_itself_by_readiness_or_by_its_length(first, expected):
    assert has_worked(first) is expected


def test_what_never_worked_is_not_started_again_but_a_later_life_is():
    failed = {"status": 1, "was_ready": False, "lived_s": 1.0}
    assert delay_s(life(is_first=True, **failed), 1, [], POLICY, now=0.0) is None
    assert delay_s(life(is_first=False, **failed), 1, [0.0], POLICY, now=1.0) == 0.5
