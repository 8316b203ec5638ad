"""A trajectory as people read it."""

from collections.abc import Callable, Sequence

import numpy as np

from shared.trajectory import Trajectory


def transcript(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> str:
    """The text of a trajectory, with a heading wherever the speaker changes: the policy, or what it was given to read."""
    mask = trajectory.loss_mask
    if mask.size == 0:
        return f"(no tokens: {trajectory.detail})"
    changes = np.flatnonzero(np.diff(mask)) + 1
    starts = [0, *changes.tolist()]
    ends = [*changes.tolist(), mask.size]
    parts = [
        f"{'POLICY' if mask[start] else 'CONTEXT'}\n{decode(trajectory.token_ids[start:end].tolist()).strip()}"
        for start, end in zip(starts, ends, strict=True)
    ]
    ending = f"{trajectory.outcome.upper()} reward {trajectory.reward:g} {trajectory.detail}".strip()
    return "\n\n".join([*parts, ending])
