"""A rank of a bare gloo group that receives broadcasts: python -m benchmarks.weights.receiver PORT RANK WORLD_SIZE BYTES COUNT"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore


def main(port: str, rank: str, world_size: str, num_bytes: str, count: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size), timeout=timeout)
    data = torch.empty(int(num_bytes), dtype=torch.uint8)
    for _ in range(int(count)):
        dist.barrier()
        dist.broadcast(data, src=0)
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
