"""The picture of a run: success by update above, lag and pauses below."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from services.standalone.run_files import Evaluation, Update

mpl.use("Agg")

from matplotlib import pyplot as plt


def draw(path: Path, *, title: str, updates: Sequence[Update], sampled: Sequence[Evaluation], greedy: Sequence[Evaluation]) -> None:
    """Writes the picture as PNG."""
    figure, (success, health) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained")
    versions = [update.version for update in updates]
    success.set_title(title)
    success.plot(versions, [update.success_rate for update in updates], color="tab:blue", alpha=0.5, label="training episodes")
    for evaluations, label, colour in (
        (sampled, "unseen tasks, sampled at T = 1", "tab:orange"),
        (greedy, "unseen tasks, greedy", "tab:green"),
    ):
        points = [evaluation.version for evaluation in evaluations], [evaluation.success_rate for evaluation in evaluations]
        success.plot(*points, marker="o", color=colour, label=label)
    success.set(ylabel="success", ylim=(0, 1.02))
    success.grid(alpha=0.3)
    success.legend(loc="lower right")

    health.step(versions, [update.lag_max for update in updates], where="mid", color="tab:purple")
    health.set(xlabel="update", ylabel="oldest lag", ylim=(0, None))
    health.yaxis.label.set_color("tab:purple")
    health.yaxis.get_major_locator().set_params(integer=True)
    pauses = health.twinx()
    pauses.plot(versions, [1000 * update.weight_pause_s for update in updates], color="tab:red", alpha=0.6)
    pauses.set(ylabel="pause, ms", ylim=(0, None))
    pauses.yaxis.label.set_color("tab:red")
    figure.savefig(path, dpi=120)
    plt.close(figure)
