"""trainer/train.py as a process that kills itself with SIGKILL at a named moment of an update.

    python killed_trainer.py MOMENT COUNT --config run.yaml …

The moment is that of the COUNT-th time the function of `MOMENTS` returns (or is about to be called), counted from 1.
"""

import functools
import importlib
import os
import signal
import sys

MOMENTS = {
    "after assemble": ("trainer.lead", "Lead", "next_batch", "after"),
    "after fetch": ("shared.stream", "TrajectoryConsumer", "fetch", "after"),
    "after forward and backward": ("trainer.learner", "Learner", "_accumulate", "after"),
    "after step": ("trainer.learner", "Learner", "learn", "after"),
    "in the middle of a push": ("trainer.hub_client", "HubClient", "begin_update", "after"),
    "after push": ("trainer.lead", "Lead", "push", "after"),
    "after lineage": ("shared.ledger", "TrainingLedger", "publish", "before"),
    "after publish": ("trainer.lead", "Lead", "publish", "after"),
    "while copying a checkpoint": ("trainer.random_state", "RandomState", "capture", "before"),
    "in the middle of writing a checkpoint": ("trainer.snapshots", "SnapshotFile", "write", "after"),
    "before the rename of a checkpoint": ("pathlib", "Path", "rename", "before"),
    "after the rename of a checkpoint": ("pathlib", "Path", "rename", "after"),
    "before acknowledge": ("trainer.lead", "Lead", "acknowledge", "before"),
    "after acknowledge": ("trainer.lead", "Lead", "acknowledge", "after"),
}


def kill_at(moment: str, count: int) -> None:
    """Wraps the moment's function, so that this process dies at its `count`-th call."""
    module, owner_name, name, when = MOMENTS[moment]
    owner = getattr(importlib.import_module(module), owner_name)
    function = getattr(owner, name)
    calls = iter(range(1, sys.maxsize))

    @functools.wraps(function)
    def dying(*arguments, **keywords):
        is_time = next(calls) == count
        if is_time and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **keywords)
        if is_time:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


if __name__ == "__main__":
    from trainer.train import main

    kill_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
