import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_hub.update_state import TRANSITIONS, UpdateProgress, UpdateState
from shared.errors import WeightUpdateError


def progress() -> UpdateProgress:
    return UpdateProgress("u1", timeout_s=10.0, now=0.0)


def test_an_update_goes_from_preparing_to_committed():
    update = progress()
    update.advance(UpdateState.PAUSED, now=1.0)
    update.advance(UpdateState.LOADING, now=2.0)
    update.is_set_complete = True
    update.advance(UpdateState.COMMITTED, now=3.0)
    assert update.is_over
    assert update.was_loading


def test_an_incomplete_set_cannot_be_committed():
    update = progress()
    update.advance(UpdateState.PAUSED, now=1.0)
    update.advance(UpdateState.LOADING, now=2.0)
    with pytest.raises(WeightUpdateError, match="after its last bucket"):
        update.advance(UpdateState.COMMITTED, now=3.0)


def test_a_failed_update_says_why_it_cannot_go_on():
    update = progress()
    assert update.fail("engine e1 died", now=1.0)
    with pytest.raises(WeightUpdateError, match="it is failed because engine e1 died"):
        update.advance(UpdateState.LOADING, now=2.0)


def test_an_update_fails_once():
    update = progress()
    assert update.fail("first", now=1.0)
    assert not update.fail("second", now=2.0)
    assert update.failure == "first"


def test_each_transition_starts_the_deadline_anew():
    update = progress()
    assert update.remaining_s(4.0) == 6.0
    update.advance(UpdateState.PAUSED, now=9.0)
    assert update.remaining_s(10.0) == 9.0
    update.renew(now=12.0)
    assert update.remaining_s(15.0) == 7.0


@given(st.lists(st.sampled_from([*UpdateState]), max_size=12))
def test_only_a_complete_set_is_ever_committed_and_an_end_is_final(steps: list[UpdateState]):
    update = progress()
    for now, state in enumerate(steps):
        before = update.state
        try:
            update.advance(state, now=float(now))
        except WeightUpdateError:
            assert update.state is before
        else:
            assert state in TRANSITIONS[before]
    assert update.state is not UpdateState.COMMITTED
