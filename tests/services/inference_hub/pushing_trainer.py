"""A trainer in a process of its own that pushes one version, and kills itself when it has gathered so many weights.

python pushing_trainer.py HUB_URL VERSION KILL_AFTER
"""

import os
import signal
import sys
from datetime import timedelta

import torch

from shared.configuration import WeightPushSection
from tests.services.inference_hub.constant_weights import SHAPES
from trainer import weight_push
from trainer.hub_client import HubClient
from trainer.model import start_ranks
from trainer.weight_buckets import WeightSource


def main(hub_url, version, kill_after):
    start_ranks(timeout=timedelta(seconds=60))
    weight_push.MIB = 24

    def gather():
        for index, (name, shape) in enumerate(SHAPES.items()):
            if index == int(kill_after):
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, torch.full(shape, float(version))

    pusher = weight_push.WeightPusher(
        HubClient(hub_url, timeout_s=30),
        WeightPushSection(backend="gloo", bucket_mib=1, timeout_s=30),
        dtype=torch.float32,
        device=torch.device("cpu"),
        patience_s=30,
        notice=print,
    )
    pusher.push(WeightSource(gather, 30), int(version))


if __name__ == "__main__":
    main(*sys.argv[1:])
