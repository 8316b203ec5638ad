"""Memory of every process over the time of a soak, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.sampling import Sample


def plot(samples: Sequence[Sample], path: Path, *, warm_up_s: float) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4))
    minutes = [sample.at_s / 60 for sample in samples]
    for part in sorted(samples[0].processes):
        axes.plot(minutes, [sample.processes[part].rss_mb if part in sample.processes else None for sample in samples], label=part)
    axes.axvspan(0, warm_up_s / 60, color="0.9", label="warm-up")
    axes.set(xlabel="minutes", ylabel="resident memory, MB", ylim=(0, None))
    axes.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.2))
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
