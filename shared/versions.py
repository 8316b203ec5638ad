"""Policy versions: which weights sampled which tokens.

A policy version is the number of weight updates published in the current lineage of checkpoints; version 0 is the model that
the run started from. A trainer that resumes from the checkpoint of version c continues at c.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

INITIAL_LABEL: Final = "default"
"""SGLang's label of the weights it was started with, unless it was told another."""


def version_of_label(label: str) -> int | None:
    """The policy version in an engine's `weight_version` label; None if the label is not one of ours."""
    if label == INITIAL_LABEL:
        return 0
    return int(label) if label.isdecimal() else None


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a trajectory were sampled by policy `version`."""

    start: int
    end: int
    version: int


def shift_spans(spans: Iterable[VersionSpan], offset: int) -> list[VersionSpan]:
    """The same spans counted from `offset` tokens earlier: output-token spans placed into a whole sequence."""
    return [VersionSpan(span.start + offset, span.end + offset, span.version) for span in spans]


def merge_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Adjacent spans of one version joined, empty ones dropped. `spans` are ordered and do not overlap."""
    merged: list[VersionSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if merged and merged[-1].end == span.start and merged[-1].version == span.version:
            merged[-1] = VersionSpan(merged[-1].start, span.end, span.version)
        else:
            merged.append(span)
    return tuple(merged)


def oldest_version(spans: Sequence[VersionSpan]) -> int:
    """The oldest policy version in a trajectory that has at least one sampled token."""
    return min(span.version for span in spans)


def lag(trained_version: int, oldest: int) -> int:
    """Updates between the policy being trained and the oldest policy that sampled.

    Tokens of a lineage that a crash cut off can carry a version above the one being trained; they are not stale, so the lag
    is 0, as it was when the cut-off lineage trained on them.
    """
    return max(0, trained_version - oldest)


def max_lag(async_generation_ratio: float) -> int:
    """The largest lag that may be trained, ⌈α⌉ updates.

    Lag is a whole number and α need not be: admission runs α batches ahead, so with α = 0.5 half of a batch starts one update
    early. Those groups are what a fractional α is for; at a bound of ⌊α⌋ each of them would be generated and thrown away.
    """
    return math.ceil(async_generation_ratio)
