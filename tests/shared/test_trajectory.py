import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import trajectory as trajectories
from shared.errors import NewerSchemaError, RecordError
from shared.trajectory import SCHEMA_VERSION, Outcome, Timings, ToolCall, Trajectory, Turn
from shared.versions import VersionSpan


def make_trajectory(token_ids: list[int], loss_mask: list[int], spans: tuple[VersionSpan, ...]) -> Trajectory:
    mask = np.array(loss_mask, dtype=np.uint8)
    return Trajectory(
        run_id="run",
        trajectory_id="t",
        group_id="g",
        group_size=4,
        sample_index=3,
        attempt=1,
        environment="calculator",
        task_id="17",
        token_bytes=np.array(token_ids, dtype="<i4").tobytes(),
        loss_mask_bytes=mask.tobytes(),
        logprob_bytes=np.where(mask == 1, -0.5, 0).astype("<f4").tobytes(),
        version_spans=spans,
        temperature=0.7,
        turns=(Turn(0, min(1, len(mask)), 0.5, (ToolCall("calculate", '{"expression": "1+1"}', 0.01, is_error=False),), ""),),
        reward=0.5,
        reward_parts={"answer": 0.5},
        outcome=Outcome.COMPLETED,
        detail="",
        timings=Timings(0.1, 0.2, 0.3, 0.4),
        finished_at=1.5,
    )


@st.composite
def trajectory_strategy(draw: st.DrawFn) -> Trajectory:
    segments = draw(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 9)), max_size=6))
    mask: list[int] = []
    spans = []
    for length, is_sampled, version in segments:
        if is_sampled:
            spans.append(VersionSpan(len(mask), len(mask) + length, version))
        mask += [int(is_sampled)] * length
    token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
    return make_trajectory(token_ids, mask, tuple(spans))


@given(trajectory_strategy())
def test_a_record_round_trips(trajectory: Trajectory) -> None:
    decoded = trajectories.decode(trajectories.encode(trajectory))
    assert decoded == trajectory
    assert decoded.token_ids.dtype == np.int32
    assert decoded.logprobs.dtype == np.float32
    assert np.all(decoded.logprobs[decoded.loss_mask == 0] == 0)


@given(trajectory_strategy())
def test_every_sampled_token_has_a_version_and_no_other_token_has_one(trajectory: Trajectory) -> None:
    np.testing.assert_array_equal(trajectory.token_versions >= 0, trajectory.loss_mask == 1)


def test_views_show_what_was_written() -> None:
    trajectory = make_trajectory([5, 6, 7], [0, 1, 1], (VersionSpan(1, 2, 3), VersionSpan(2, 3, 4)))
    np.testing.assert_array_equal(trajectory.token_ids, [5, 6, 7])
    np.testing.assert_array_equal(trajectory.token_versions, [-1, 3, 4])
    assert trajectory.num_sampled_tokens == 2
    assert trajectory.oldest_version == 3


def test_an_episode_that_sampled_nothing_has_no_oldest_version() -> None:
    assert make_trajectory([5], [0], ()).oldest_version is None


def test_a_newer_schema_is_refused_with_a_sentence() -> None:
    newer = msgspec.msgpack.encode({"schema_version": SCHEMA_VERSION + 1, "field_of_the_future": 1})
    with pytest.raises(NewerSchemaError, match=rf"schema version {SCHEMA_VERSION + 1}.*reads up to {SCHEMA_VERSION}.*upgrade"):
        trajectories.decode(newer)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_are_refused_without_a_crash(junk: bytes) -> None:
    with pytest.raises(RecordError):
        trajectories.decode(junk)


@given(trajectory_strategy(), st.data())
def test_a_truncated_record_is_refused(trajectory: Trajectory, data: st.DataObject) -> None:
    record = trajectories.encode(trajectory)
    with pytest.raises(RecordError):
        trajectories.decode(record[: data.draw(st.integers(0, len(record) - 1))])


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"token_bytes": b"\0" * 8}, "one length, got 2, 3 and 3"),
        ({"version_spans": (VersionSpan(1, 2, 0),)}, "exactly one version span"),
        ({"version_spans": (VersionSpan(1, 3, 0), VersionSpan(2, 3, 1))}, "exactly one version span"),
        ({"version_spans": (VersionSpan(1, 4, 0),)}, r"must lie in \[0, 3\)"),
        ({"version_spans": (VersionSpan(1, 3, 0),) * 257}, "exactly one version span"),
        (
            {"version_spans": (VersionSpan(1, 3, 2**63),)},
            r"a policy version must be in \[0, 9007199254740992\], got 9223372036854775808",
        ),
        ({"version_spans": (VersionSpan(1, 3, -1),)}, "a policy version must be in"),
        ({"turns": (Turn(2, 4, 0.0, (), ""),)}, r"turn \[2, 4\) must lie in \[0, 3\)"),
        ({"turns": (Turn(2, 1, 0.0, (), ""),)}, r"turn \[2, 1\) must lie in \[0, 3\)"),
        ({"sample_index": 4}, r"sample_index must be in \[0, 4\), got 4"),
    ],
)
def test_a_record_that_contradicts_itself_cannot_be_made_or_read(changes: dict[str, object], rule: str) -> None:
    good = make_trajectory([5, 6, 7], [0, 1, 1], (VersionSpan(1, 3, 0),))
    with pytest.raises(ValueError, match=rule):
        msgspec.structs.replace(good, **changes)
    fields = msgspec.to_builtins(good, builtin_types=(bytes,)) | msgspec.to_builtins(changes, builtin_types=(bytes,))
    with pytest.raises(RecordError, match=rule):
        trajectories.decode(msgspec.msgpack.encode(fields))


def test_only_outcomes_that_speak_of_the_policy_are_trainable() -> None:
    assert [outcome for outcome in Outcome if outcome.is_trainable] == [Outcome.COMPLETED, Outcome.TRUNCATED]
