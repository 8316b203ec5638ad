"""Trajectory records with tokens, as an agent would write them, for tests of the trainer."""

import zlib
from collections.abc import Sequence

import numpy as np

from shared.ledger import GroupRecord
from shared.trajectory import Outcome, Timings, Trajectory, Turn
from shared.versions import VersionSpan
from trainer.assembly import Episode

VOCABULARY = 100


def trajectory(
    mask: Sequence[int],
    *,
    group_id: str = "g0",
    sample_index: int = 0,
    group_size: int = 2,
    reward: float = 0.0,
    version: int = 0,
    temperature: float = 1.0,
    logprobs: Sequence[float] | None = None,
    token_ids: Sequence[int] | None = None,
    outcome: Outcome = Outcome.COMPLETED,
    turns: Sequence[Turn] = (),
) -> Trajectory:
    """An episode with loss mask `mask`, its sampled tokens all of one version."""
    num_tokens = len(mask)
    generator = np.random.default_rng(zlib.crc32(f"{group_id}{sample_index}".encode()))
    tokens = generator.integers(0, VOCABULARY, num_tokens) if token_ids is None else np.asarray(token_ids)
    values = np.where(np.asarray(mask) == 1, -1.5, 0.0) if logprobs is None else np.asarray(logprobs)
    return Trajectory(
        run_id="run",
        trajectory_id=f"{group_id}-{sample_index}",
        group_id=group_id,
        group_size=group_size,
        sample_index=sample_index,
        attempt=0,
        environment="test",
        task_id="0",
        token_bytes=tokens.astype("<i4").tobytes(),
        loss_mask_bytes=bytes(mask),
        logprob_bytes=values.astype("<f4").tobytes(),
        version_spans=(VersionSpan(0, num_tokens, version),) if num_tokens else (),
        temperature=temperature,
        turns=tuple(turns),
        reward=reward,
        reward_parts={},
        outcome=outcome,
        detail="",
        timings=Timings(0, 0, 0, 0),
        finished_at=0.0,
    )


def recorded(group: GroupRecord, sample_index: int, *, reward: float = 0.0, version: int = 0) -> Trajectory:
    """A short trainable episode of an admitted group."""
    return trajectory(
        [0, 0, 1, 1, 0, 1],
        group_id=group.group_id,
        group_size=group.group_size,
        sample_index=sample_index,
        reward=reward,
        version=version,
    )


def episode(
    group_id: str,
    sample_index: int,
    *,
    group_size: int = 2,
    oldest_version: int | None = 0,
    is_trainable: bool = True,
    turn_rewards: Sequence[float] | None = None,
) -> Episode:
    return Episode(
        entry_id=f"{group_id}/{sample_index}",
        trajectory_id=f"{group_id}-{sample_index}",
        group_id=group_id,
        group_size=group_size,
        sample_index=sample_index,
        num_tokens=10,
        sampled_by_version=() if oldest_version is None else ((oldest_version, 4),),
        reward=float(sample_index) if turn_rewards is None else sum(turn_rewards),
        turn_rewards=(float(sample_index),) if turn_rewards is None else tuple(turn_rewards),
        state_fingerprints=("",) * (1 if turn_rewards is None else len(turn_rewards)),
        timings=Timings(1.0, 2.0, 4.0, 1.0),
        is_trainable=is_trainable,
    )
