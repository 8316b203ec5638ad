"""One of two ranks that share out the weights of a policy: python gathering_ranks.py RANK PORT

Each weight is whole only after a collective, as under ZeRO-3. Rank 0 gathers as a push with a second attempt does: once up to the
second weight, once whole; then once more while the other waits for its plan. It prints what it gathered.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from trainer import gathering, ranks

DEVICE = torch.device("cpu")


class SharedPolicy(nn.Module):
    def __init__(self, rank):
        super().__init__()
        for name in ("a", "b", "c"):
            parameter = nn.Parameter(torch.full((2,), float(rank)))
            parameter.ds_id, parameter.ds_numel = 0, 2
            self.register_parameter(name, parameter)

    def named_weights(self):
        for name, parameter in self.named_parameters():
            whole = parameter.detach().clone()
            dist.all_reduce(whole)
            yield name, whole


def main(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    policy = SharedPolicy(rank + 1)
    if rank == 0:
        source = gathering.weight_source(policy)
        attempt = iter(source.gather())
        next(attempt), next(attempt)
        attempt.close()
        whole = [(name, weight.tolist()) for name, weight in source.gather()]
        gathering.finish(policy)
        late = [name for name, _ in source.gather()]
        ranks.from_rank_zero(b"plan", DEVICE)
        sys.stdout.write(f"{whole} {source.num_elements} {late}\n")
    else:
        gathering.follow(policy)
        num_passes = 0
        while ranks.from_rank_zero(b"", DEVICE) == gathering.GATHER:
            gathering.take_part(policy)
            num_passes += 1
        assert num_passes == 1
    ranks.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
