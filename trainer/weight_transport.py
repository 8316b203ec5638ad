"""The process group that carries weights to the engines, for NCCL and gloo alike.

The rendezvous is SGLang 0.5.23's: the group is made as its `init_custom_process_group` does, over a TCP store with the group's name
as prefix, beside the default group.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from shared.errors import WeightUpdateError

POLL_S = 0.0005
ABANDONED_POLL_S = 0.5
CLOSE_TIMEOUT_S = 5.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def listen(address: str, *, timeout: timedelta) -> TCPStore:
    """The rendezvous store that engines connect to, on a port of the system's choice."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)


class AbandonedRendezvous:
    """Where a group failed to form. An engine that comes there late is let in and thrown out, so that it is free again.

    torch's client knocks at a closed port until its own deadline has passed, in SGLang half an hour, but fails at once when a store
    ends that it talks to.
    """

    def __init__(self, address: str, port: int) -> None:
        """Args: of the store, which must have ended."""
        self._address = address
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._throw_out, name=f"abandoned-{port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _throw_out(self) -> None:
        store: TCPStore | None = None
        while not self._is_over.wait(ABANDONED_POLL_S):
            if store is None:
                with suppress(RuntimeError):
                    store = TCPStore(self._address, self._port, is_master=True, wait_for_workers=False)
            elif store.num_keys() > 0:
                # A client's first word is a key.
                store = None


@contextmanager
def listening_at(address: str) -> Iterator[None]:
    """gloo groups made within it tell their peers `address`, unless the user chose an interface. Otherwise they tell them what this
    machine's own name resolves to, which is often the loopback address."""
    interfaces = (name for name, found in psutil.net_if_addrs().items() if address in {entry.address for entry in found})
    interface = next(interfaces, None)
    if interface is None or GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]


class WeightGroup:
    """Rank 0 of the group of trainer and engines. JOINED → closed, or abandoned with a broadcast pending.

    A group with a broadcast that never ended is of no use to anyone: close it and join another, under another name.
    """

    def __init__(self, store: TCPStore, *, name: str, world_size: int, backend: str, timeout: timedelta) -> None:
        """Joins; gloo waits here until every engine has joined too. Raises: WeightUpdateError if they do not in time.

        Args: store: made by `listen`; engines reach this process at its address.
        """
        self.name = name
        self._store = store
        try:
            with listening_at(store.host):
                self._group, _ = distributed_c10d._new_process_group_helper(
                    world_size,
                    0,
                    [],
                    dist.Backend(backend),
                    PrefixStore(name, store),
                    group_name=distributed_c10d.GroupName(name),
                    timeout=timeout,
                )
        except RuntimeError as error:
            # torch's frames hold the store, whose end is what lets those engines go that did come.
            traceback.clear_frames(error.__traceback__)
            raise WeightUpdateError(f"weight group {name}: the {world_size - 1} engine ranks did not all join: {error}") from error
        distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}

    def broadcast(self, data: Tensor, *, timeout_s: float, is_hopeless: Callable[[], bool]) -> None:
        """Sends `data` to every engine.

        Args: is_hopeless: asked while waiting; True gives up at once, because an engine will not take part any more.
        Raises: WeightUpdateError if an engine does not take it in time.
        """
        deadline = time.monotonic() + timeout_s
        try:
            work = dist.broadcast(data, src=0, group=self._group, async_op=True)
            while not work.is_completed():
                if is_hopeless() or time.monotonic() > deadline:
                    raise WeightUpdateError(f"weight group {self.name}: a broadcast did not end within {timeout_s:g} s")
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:
            raise WeightUpdateError(f"weight group {self.name}: a broadcast failed: {error}") from error

    def close(self) -> None:
        """Leaves the group; a pending broadcast is aborted."""
        distributed_c10d._abort_process_group(self._group)
        last_reference = [self._group]
        del self._group, self._store
        # gloo cannot abort: the group's destructor waits for a peer that hangs until the group's own deadline. Waiting for one
        # that does not hang matters: a process that exits while the destructor runs is aborted by the C++ runtime.
        closing = threading.Thread(target=last_reference.clear, name=f"close-{self.name}", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
