"""The measurements as a table that people read and one JSON line that programs do."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.asynchrony.experiments import Comparison, WasteCase
from benchmarks.asynchrony.outcome import Outcome

FIGURES = (
    "queue_scheduling",
    "replication_64x16",
    "replication_16x64",
    "environment_async",
    "redundancy",
    "rlvr_128",
    "swe",
    "alfworld",
    "worst_vs_bound",
    "completion_bias",
    "wasted_share_alpha_2",
    "real_stack_speedup",
)


@dataclass(frozen=True)
class Row:
    """One comparison, measured. Seconds are virtual, of one update."""

    comparison: Comparison
    synchronous_s: float
    ours_s: float
    bound_s: float
    wasted_share: float
    sample_bias: float
    max_lag: int
    busy_share: float

    @property
    def ratio(self) -> float:
        return self.synchronous_s / self.ours_s

    @property
    def versus_bound(self) -> float:
        return self.ours_s / self.bound_s

    @property
    def is_bounded(self) -> bool:
        """All samples can begin with the update, as the bound assumes. At α = 0 without redundant groups a filtered group's
        replacement begins only when that group has ended."""
        return (
            not self.comparison.workload.filtered_share
            or self.comparison.ours.redundant_groups > 0
            or self.comparison.ours.ratio > 0
        )


def row(comparison: Comparison, synchronous: Outcome, ours: Outcome) -> Row:
    system = comparison.ours
    gpus = system.gpus + (system.training_gpus if system.train_s else 0)
    return Row(
        comparison=comparison,
        synchronous_s=synchronous.update_s(0),
        ours_s=ours.update_s(comparison.warm_up),
        bound_s=ours.bound_s(gpus=gpus),
        wasted_share=ours.wasted_share,
        sample_bias=ours.sample_bias(),
        max_lag=ours.max_lag,
        busy_share=ours.busy_share,
    )


_COLUMNS = ("sync s", "ours s", "ratio", "publ.", "bound s", "T/bound", "wasted", "bias")
_HEADER = f"{'experiment':<46}" + "".join(f" {name:>8}" for name in _COLUMNS)


def line(measured: Row) -> str:
    comparison = measured.comparison
    published = "" if comparison.published is None else f"{comparison.published:.2f}"
    mark = " " if measured.is_bounded else "*"
    return (
        f"{comparison.name:<46} {measured.synchronous_s:>8.1f} {measured.ours_s:>8.1f} {measured.ratio:>7.2f}× {published:>8} "
        f"{measured.bound_s:>8.1f} {measured.versus_bound:>8.2f}{mark}{measured.wasted_share:>8.1%} {measured.sample_bias:>8.2f}"
    )


def table(rows: Sequence[Row]) -> str:
    lines = [_HEADER, *map(line, rows)]
    lines += ["", "settings"]
    for measured in rows:
        comparison = measured.comparison
        lines.append(f"  {comparison.name}: {comparison.setting}")
        lines.append(f"    synchronous: {comparison.versus}" + (f"; ours: {comparison.note}" if comparison.note else ""))
    lines += [
        "",
        "bound: T <= (N/K)(μ_gen + E μ_train) + (N/W) μ_reward + L/(α+1), W reward workers if they are few",
        "* not a bound there: what replaces a filtered group begins when that has ended, and the formula has all N begin at once",
        "bias: mean latency of trained episodes / of all (1 is unbiased)",
        "ours: on_stale mask, the default, unless the name says another",
    ]
    return "\n".join(lines)


def waste_line(case: WasteCase, outcome: Outcome) -> str:
    stale = outcome.discarded.get("stale", 0)
    return (
        f"{case.name:<38} {outcome.update_s(6):>8.1f} {outcome.wasted_share:>7.1%} {stale:>6} "
        f"{outcome.task_bias():>6.3f} {outcome.sample_bias():>8.3f}"
    )


def waste_table(measured: Sequence[tuple[WasteCase, Outcome]]) -> str:
    header = f"{'stale groups':<38} {'ours s':>8} {'wasted':>7} {'stale':>6} {'tasks':>6} {'episodes':>8}   (bias)"
    lines = [header, *(waste_line(case, outcome) for case, outcome in measured)]
    if measured:
        lines.append(f"  16×8; {measured[0][0].workload}; 24 GPUs × 4 places sample, 8 train; {measured[0][0].num_updates} updates")
    return "\n".join(lines)


def json_line(rows: Sequence[Row], wasted: Sequence[tuple[WasteCase, Outcome]], real_stack_speedup: float | None) -> str:
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    for measured in rows:
        name = measured.comparison.figure
        if name is not None:
            figures[name] = min(figures[name] or float("inf"), round(measured.ratio, 3))
    if any(measured.is_bounded for measured in rows):
        figures["worst_vs_bound"] = round(max(measured.versus_bound for measured in rows if measured.is_bounded), 3)
    ours = [(case, outcome) for case, outcome in wasted if case.system.on_stale == "mask"]
    if ours:
        figures["completion_bias"] = round(min(outcome.task_bias() for _, outcome in ours), 3)
        figures["wasted_share_alpha_2"] = round(next(outcome.wasted_share for case, outcome in ours if case.system.ratio == 2), 3)
    figures["real_stack_speedup"] = None if real_stack_speedup is None else round(real_stack_speedup, 3)
    return json.dumps(figures)
