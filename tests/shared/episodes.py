"""Finished episodes of two sampled tokens, for tests of what moves records rather than of what they hold."""

from shared.ledger import GroupRecord
from shared.trajectory import Outcome, Timings, Trajectory
from shared.versions import VersionSpan


def admitted_group(environment: str, *, size: int = 1) -> GroupRecord:
    """The first group of a run, complete with its first episode."""
    return GroupRecord(
        group_id="g",
        group_size=size,
        num_needed=1,
        environment=environment,
        task_index=0,
        attempt=0,
        admitted_version=0,
        start_number=1,
    )


def finished_episode(group: GroupRecord, sample_index: int) -> Trajectory:
    """Episode `sample_index` of `group`."""
    return Trajectory(
        run_id="run",
        trajectory_id=f"{group.group_id}-{sample_index}",
        group_id=group.group_id,
        group_size=group.group_size,
        sample_index=sample_index,
        attempt=group.attempt,
        environment=group.environment,
        task_id=str(group.task_index),
        token_bytes=bytes(8),
        loss_mask_bytes=b"\x01\x01",
        logprob_bytes=bytes(8),
        version_spans=(VersionSpan(0, 2, 0),),
        temperature=1.0,
        turns=(),
        reward=0.0,
        reward_parts={},
        outcome=Outcome.COMPLETED,
        detail="",
        timings=Timings(0, 0, 0, 0),
        finished_at=0.0,
    )
