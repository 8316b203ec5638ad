"""The curves as a table, a picture, a file and the JSON line."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import matplotlib as mpl

from benchmarks.learning.experiment import Curve, Scale

mpl.use("Agg")

from matplotlib import pyplot as plt

UNCORRECTED = "vanilla"


def line(curve: Curve) -> str:
    measured = " ".join(f"{success:.2f}" for success in curve.success)
    return f"{curve.arm.name:<24} seed {curve.seed}  {measured}  final {curve.final:.3f}"


def table(curves: Sequence[Curve], scale: Scale) -> str:
    """Means over the seeds, and the least of them."""
    lines = [f"{'':<24} {'final':>7} {'least':>7} {'area':>7} {'seeds':>6}"]
    for name, of_arm in by_arm(curves).items():
        finals = [curve.final for curve in of_arm]
        area = fmean(curve.area for curve in of_arm)
        lines.append(f"{name:<24} {fmean(finals):>7.3f} {min(finals):>7.3f} {area:>7.3f} {len(of_arm):>6}")
    lines.append(
        f"success on {scale.eval_episodes} unseen tasks at temperature 1; {scale.num_updates} updates of "
        f"{scale.groups} groups of {scale.group_size}; final: mean of the last three measurements, {scale.eval_every} updates apart"
    )
    return "\n".join(lines)


def by_arm(curves: Iterable[Curve]) -> Mapping[str, list[Curve]]:
    grouped = defaultdict(list)
    for curve in curves:
        grouped[curve.arm.name].append(curve)
    return grouped


def write(curves: Sequence[Curve], folder: Path) -> None:
    """curves.json, and learning.png with a panel for each lag."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "curves.json").write_text(json.dumps([asdict(curve) for curve in curves], indent=1) + "\n")
    lags = sorted({curve.arm.lag for curve in curves} - {0})
    figure, panels = plt.subplots(1, max(1, len(lags)), sharey=True, squeeze=False, figsize=(4 * max(1, len(lags)), 3.6))
    for panel, lag in zip(panels[0], lags or [0], strict=True):
        for name, of_arm in by_arm(curve for curve in curves if curve.arm.lag in (0, lag)).items():
            is_synchronous = of_arm[0].arm.lag == 0
            success = [fmean(values) for values in zip(*(curve.success for curve in of_arm), strict=True)]
            label = name if is_synchronous else of_arm[0].arm.pg_variant
            panel.plot(of_arm[0].updates, success, label=label, color="black" if is_synchronous else None)
        panel.set(title=f"α = {lag}", xlabel="update", ylim=(0, 1))
    panels[0][0].set_ylabel("success on unseen tasks")
    panels[0][-1].legend(fontsize="small")
    figure.savefig(folder / "learning.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def json_line(curves: Sequence[Curve]) -> str:
    """Final success, means of the seeds; null for what did not run."""
    finals = {name: fmean(curve.final for curve in of_arm) for name, of_arm in by_arm(curves).items()}
    corrected = {
        curve.arm.name: finals[curve.arm.name] for curve in curves if 0 < curve.arm.lag <= 2 and curve.arm.pg_variant != UNCORRECTED
    }
    figures = {
        "synchronous": finals.get("synchronous"),
        "worst_corrected_alpha_2": min(corrected.values(), default=None),
        "vanilla_alpha_4": finals.get(f"{UNCORRECTED}, α = 4"),
    }
    return json.dumps({name: None if value is None else round(value, 3) for name, value in figures.items()})
