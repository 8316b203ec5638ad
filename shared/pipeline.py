"""How the parts of a run keep each other busy, as the trainer tells the rest of the run after every update."""

from collections.abc import Mapping

import msgspec


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the last updates' wall-clock time, and what would help. Shares are None where nothing was measured."""

    version: int
    """Updates published."""
    time: float
    """Unix seconds of the report."""
    updates: int
    """The newest so many are what the shares are of."""
    update_s: float
    """Wall-clock seconds of one of them, on average."""
    wait_share: float
    """Of that time, training waited for data."""
    trainer_idle_share: float
    """Of that time, the trainer's ranks did not learn: they waited for data, weights travelled, checkpoints, evaluations."""
    engine_idle_share: float | None
    """Of the time in which engines were ready for calls, they had none."""
    engine_utilisation: float | None
    """Of what engines can hold at the same time, in calls or in tokens of their KV cache, whichever is nearer its limit.
    An upper bound: a call counts with all that it may yet sample."""
    episode_shares: Mapping[str, float]
    """Of the life of the episodes that were trained: queued, generating, environment, reward."""
    discarded_token_shares: Mapping[str, float]
    """Of all tokens that were sampled and either trained or discarded meanwhile, by reason of their discarding."""
    advice: tuple[str, ...]
    """Sentences; empty until enough updates are measured."""


def encode(report: PipelineReport) -> bytes:
    return msgspec.json.encode(report)


def decode(record: bytes) -> PipelineReport | None:
    """None for the report of another release, which says other things."""
    try:
        return msgspec.json.decode(record, type=PipelineReport)
    except msgspec.ValidationError:
        return None
