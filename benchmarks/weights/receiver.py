"""A rank of a bare gloo group that receives broadcasts: python -m benchmarks.weights.receiver PORT RANK WORLD_SIZE BYTES"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(port: str, rank: str, world_size: str, num_bytes: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=600)
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size), timeout=timeout)
    data = torch.ones(int(num_bytes), dtype=torch.uint8)
    goes_on = torch.ones(1)
    while True:
        dist.broadcast(goes_on, src=0)
        if not goes_on.item():
            return
        dist.barrier()
        dist.broadcast(data, src=0)
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
