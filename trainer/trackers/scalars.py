"""Metrics as the flat names and numbers that dashboards want."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from trainer.tracking import Evaluation, UpdateMetrics


def update_scalars(metrics: UpdateMetrics) -> dict[str, float]:
    """Every number of an update: `train/loss`, and `train/discarded_groups/stale` where a metric is itself by name."""
    return dict(_numbers("train", msgspec.to_builtins(metrics, str_keys=True)))


def evaluation_scalars(evaluation: Evaluation) -> dict[str, float]:
    """`evaluation/{environment}/{greedy or sampled}/success_rate` and so on."""
    kind = "greedy" if evaluation.greedy else "sampled"
    results = {name: {kind: msgspec.to_builtins(result)} for name, result in evaluation.results.items()}
    return dict(_numbers("evaluation", results))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """What is no number, a metric that has none for one, is left out."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, int | float):
        yield name, float(value)
