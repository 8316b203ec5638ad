"""A trainer that kills itself in the middle of its second push: python -m benchmarks.weights.killed_trainer HUB MODEL BUCKET_MIB"""

import os
import signal
import sys
from pathlib import Path

from benchmarks.weights.faults import faulty
from benchmarks.weights.pushes import open_pusher, weights_of
from trainer.weight_buckets import WeightSource


def main(hub_url: str, model_path: str, bucket_mib: str) -> None:
    weights = weights_of(Path(model_path))
    with open_pusher(hub_url, bucket_mib=int(bucket_mib)) as (pusher, _):
        pusher.push(WeightSource.of(weights), 0)
        pusher.push(faulty(weights, lambda: os.kill(os.getpid(), signal.SIGKILL), at=0.9), 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
