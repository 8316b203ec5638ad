"""The yardsticks: a bare gloo broadcast, and the common way of an update."""

import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT = timedelta(seconds=600)


class BareBroadcast:
    """A gloo group of as many ranks in processes of their own, which stay, with memory that they have touched before."""

    def __init__(self, num_bytes: int, num_receivers: int) -> None:
        command = [sys.executable, "-m", "benchmarks.weights.broadcasts", str(num_bytes), str(num_receivers)]
        self._sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.seconds()

    def seconds(self) -> float:
        """Of one broadcast, until every receiver has it."""
        assert self._sender.stdin is not None
        assert self._sender.stdout is not None
        self._sender.stdin.write("again\n")
        return float(self._sender.stdout.readline())

    def close(self) -> None:
        assert self._sender.stdin is not None
        self._sender.stdin.close()
        self._sender.wait()


def _send(num_bytes: int, num_receivers: int) -> None:
    """A broadcast for each line of standard input."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    sizes = [str(num_receivers + 1), str(num_bytes)]
    module = "benchmarks.weights.receiver"
    receivers = [
        subprocess.Popen([sys.executable, "-m", module, str(store.port), str(rank), *sizes], stdin=subprocess.DEVNULL)
        for rank in range(1, num_receivers + 1)
    ]
    dist.init_process_group("gloo", store=store, rank=0, world_size=num_receivers + 1, timeout=TIMEOUT)
    data = torch.ones(num_bytes, dtype=torch.uint8)
    goes_on = torch.ones(1)
    for _ in sys.stdin:
        dist.broadcast(goes_on, src=0)
        dist.barrier()
        began = time.perf_counter()
        dist.broadcast(data, src=0)
        dist.barrier()
        print(time.perf_counter() - began, flush=True)
    dist.broadcast(torch.zeros(1), src=0)
    for receiver in receivers:
        receiver.wait()


def common_way_s(engine_urls: list[str], weights: list[tuple[str, torch.Tensor]], version: int) -> float:
    """Seconds without generation of the common way, straight at the engines: abort all, push each parameter, flush, go on.

    The hub begins the aborted calls again, as agents would.
    """
    from trainer.weight_transport import WeightGroup, listen

    store = listen("127.0.0.1", timeout=TIMEOUT)
    name = f"common-{uuid.uuid4().hex}"
    with httpx.Client(trust_env=False, timeout=300) as client, ThreadPoolExecutor(len(engine_urls)) as pool:

        def everywhere(path: str, body: dict[str, object], **of_each: list[int]) -> None:
            bodies = [{**body, **{key: values[index] for key, values in of_each.items()}} for index in range(len(engine_urls))]
            calls = [pool.submit(client.post, f"{url}/{path}", json=each) for url, each in zip(engine_urls, bodies, strict=True)]
            for call in calls:
                call.result().raise_for_status()

        size = len(engine_urls) + 1
        master = {
            "master_address": "127.0.0.1",
            "master_port": store.port,
            "world_size": size,
            "group_name": name,
            "backend": "gloo",
        }
        joining = threading.Thread(
            target=everywhere, args=("init_weights_update_group", master), kwargs={"rank_offset": list(range(1, size))}
        )
        joining.start()
        group = WeightGroup(store, name=name, world_size=size, backend="gloo", timeout=TIMEOUT)
        joining.join()
        began = time.perf_counter()
        everywhere("pause_generation", {"mode": "abort"})
        everywhere("begin_weight_update", {})
        for index, (weight_name, weight) in enumerate(weights):
            is_last = index == len(weights) - 1
            description = {"names": [weight_name], "dtypes": ["float32"], "shapes": [list(weight.shape)], "group_name": name}
            label = {"weight_version": str(version) if is_last else None, "flush_cache": is_last}
            loading = threading.Thread(target=everywhere, args=("update_weights_from_distributed", {**description, **label}))
            loading.start()
            group.broadcast(weight, timeout_s=300, is_hopeless=lambda: False)
            loading.join()
        everywhere("end_weight_update", {})
        everywhere("continue_generation", {})
        pause_s = time.perf_counter() - began
        everywhere("destroy_weights_update_group", {"group_name": name})
    group.close()
    return pause_s


if __name__ == "__main__":
    _send(*(int(argument) for argument in sys.argv[1:]))
