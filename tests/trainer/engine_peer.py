"""The receiving end of a weight group, as an engine's scheduler has it: joins by TCP, receives buckets, saves the tensors.

    python engine_peer.py MASTER_ADDRESS MASTER_PORT RANK WORLD_SIZE GROUP_NAME BUCKETS_JSON OUTPUT

`BUCKETS_JSON` is a list of {names, dtypes, shapes}. With an empty list the peer joins and dies; with null it joins and hangs.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, distributed_c10d, rendezvous

TIMEOUT = timedelta(seconds=60)


def join(address: str, port: int, rank: int, world_size: int, name: str, *, timeout: timedelta = TIMEOUT) -> dist.ProcessGroup:
    store, rank, world_size = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, rank, [], dist.Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def receive(group: dist.ProcessGroup, bucket: dict) -> dict[str, torch.Tensor]:
    dtypes = [getattr(torch, dtype) for dtype in bucket["dtypes"]]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(bucket["shapes"], dtypes, strict=True)]
    data = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    parts = data.split(sizes)
    return {
        name: part.view(dtype).reshape(shape)
        for name, part, dtype, shape in zip(bucket["names"], parts, dtypes, bucket["shapes"], strict=True)
    }


def main(address: str, port: str, rank: str, world_size: str, name: str, buckets: str, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = join(address, int(port), int(rank), int(world_size), name)
    if json.loads(buckets) is None:
        sys.stdin.read()
    if not json.loads(buckets):
        os._exit(0)
    received: dict[str, torch.Tensor] = {}
    for bucket in json.loads(buckets):
        received |= receive(group, bucket)
    torch.save(received, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
