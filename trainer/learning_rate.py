"""The learning rate of each update: warm-up, then a schedule over the updates of the run."""

import math

from shared.configuration import TrainerSection


def learning_rate(trainer: TrainerSection, version: int) -> float:
    """The rate of the update that trains `version`, the same for all of its steps.

        warm-up    η · (v + 1) / W                     for v < W
        linear     η + (η_end - η) · p                 p = (v + 1 - W) / (N - W), so that the last update, v = N - 1, has η_end
        cosine     η_end + (η - η_end) · (1 + cos πp) / 2

    A run that goes on after `num_updates` was raised follows the new, longer schedule from there.
    """
    top, end = trainer.learning_rate, trainer.final_learning_rate
    done, warmup = version + 1, trainer.warmup_updates
    if done <= warmup:
        return top * done / warmup
    progress = min(1.0, (done - warmup) / max(1, trainer.num_updates - warmup))
    if trainer.learning_rate_schedule == "linear":
        return top + (end - top) * progress
    if trainer.learning_rate_schedule == "cosine":
        return end + (top - end) * (1 + math.cos(math.pi * progress)) / 2
    return top
