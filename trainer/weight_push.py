"""Brings the trainer's weights into force on the engines, through the hub, while episodes run.

One push: flatten the weights (generation goes on) → join a group with all live engines, unless we are in it → begin: the hub
pauses generation → broadcast each bucket while the hub has the engines load it → commit: generation goes on under the new
weights. A push that fails in between is given up and made anew in a new group: the engines that had part of the weights are
not routed to until a push completes, so repeating the whole is safe, and an engine that died is left out.
"""

import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from shared.configuration import WeightPushSection
from shared.errors import EngineError, WeightUpdateError
from trainer.hub_client import CommitReply, EngineReply, GroupStaleError, HubClient, NoEngineError
from trainer.weight_transport import Bucket, WeightGroup, flatten, listen

MAX_FAILURES = 4
RETRY_S = 0.5
MIB = 2**20


@dataclass(frozen=True)
class PushTimes:
    """Seconds of one push. Generation stood still for `pause_s` of them."""

    total_s: float
    gather_s: float
    pause_s: float
    load_s: float


class WeightPusher:
    """Rank 0's side of weight updates. Keeps one group from push to push, and forms another when the engines change."""

    def __init__(
        self,
        hub: HubClient,
        settings: WeightPushSection,
        *,
        dtype: torch.dtype,
        device: torch.device,
        patience_s: float,
        notice: Callable[[str], None],
    ) -> None:
        """Args: dtype: the engines', in which weights travel. device: the trainer's, for nccl; gloo sends from memory.
        patience_s: longest wait for the hub to answer and for an engine to be there. notice: is told what is waited for.
        """
        self._hub = hub
        self._settings = settings
        self._dtype = dtype
        self._device = device if settings.backend == "nccl" else torch.device("cpu")
        self._timeout = timedelta(seconds=settings.timeout_s)
        self._patience_s = patience_s
        self._notice = notice
        self._group: WeightGroup | None = None

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> PushTimes:
        """Puts `weights` in force as `version`.

        Raises: WeightUpdateError if no attempt succeeds, EngineError if the hub cannot be reached.
        """
        started = time.perf_counter()
        buckets = flatten(weights, dtype=self._dtype, bucket_bytes=self._settings.bucket_mib * MIB, device=self._device)
        gathered = time.perf_counter()
        reply = self._push_until_done(buckets, version)
        return PushTimes(
            total_s=time.perf_counter() - started,
            gather_s=gathered - started,
            pause_s=reply.pause_s,
            load_s=reply.load_s,
        )

    def close(self) -> None:
        self._leave_group()
        self._hub.close()

    def _push_until_done(self, buckets: list[Bucket], version: int) -> CommitReply:
        deadline = time.monotonic() + self._patience_s
        failures = 0
        noticed = ""
        while True:
            try:
                return self._push_once(buckets, version)
            except (WeightUpdateError, EngineError) as refusal:
                self._leave_group()
                error = self._explained(refusal)
                is_waiting = isinstance(error, NoEngineError | EngineError | GroupStaleError)
                failures += not is_waiting
                if failures == MAX_FAILURES or (is_waiting and time.monotonic() > deadline):
                    raise error from refusal.__cause__
                if isinstance(error, GroupStaleError):
                    continue
                if is_waiting and str(error) != noticed:
                    noticed = str(error)
                    self._notice(f"waiting for at most {self._patience_s:g} s: {error}")
                time.sleep(RETRY_S * 2**failures)

    def _explained(self, error: WeightUpdateError | EngineError) -> WeightUpdateError | EngineError:
        """The same error, with what the hub knows of the engines where none can take weights."""
        if isinstance(error, NoEngineError):
            with suppress(WeightUpdateError, EngineError):
                return NoEngineError(why_no_engine(self._hub.engines()))
        return error

    def _push_once(self, buckets: list[Bucket], version: int) -> CommitReply:
        if self._group is None:
            self._group = self._join_group()
        update_id = self._hub.begin_update(group_name=self._group.name, version=version, mode=self._settings.mode)
        try:
            for index, bucket in enumerate(buckets):
                self._send(self._group, update_id, bucket, is_last=index == len(buckets) - 1)
            return self._hub.commit(update_id)
        except (WeightUpdateError, EngineError):
            with suppress(WeightUpdateError, EngineError):
                self._hub.abandon(update_id)
            raise

    def _send(self, group: WeightGroup, update_id: str, bucket: Bucket, *, is_last: bool) -> None:
        """The broadcast and the request that makes engines receive it, at the same time; either one's failure ends both."""
        with ThreadPoolExecutor(max_workers=1) as requests:
            loading = requests.submit(self._hub.load_bucket, update_id, bucket, is_last=is_last)
            try:
                group.broadcast(
                    bucket.data,
                    timeout_s=self._settings.timeout_s,
                    is_hopeless=lambda: loading.done() and loading.exception() is not None,
                )
            finally:
                loading.result()

    def _join_group(self) -> WeightGroup:
        address = reachable_address([engine.url for engine in self._hub.engines()])
        store = listen(address, timeout=self._timeout)
        reply = self._hub.form_group(
            epoch=uuid.uuid4().hex, master_address=address, master_port=store.port, backend=self._settings.backend
        )
        group = WeightGroup(
            store,
            name=reply.group_name,
            world_size=reply.world_size,
            backend=self._settings.backend,
            timeout=self._timeout,
        )
        try:
            self._hub.wait_group_ready(group.name)
        except (WeightUpdateError, EngineError):
            group.close()
            raise
        return group

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def why_no_engine(engines: Sequence[EngineReply]) -> str:
    """Why none of `engines`, all that the hub has, takes weights."""
    if not engines:
        return "an engine must be registered at the inference hub, and none is; list it in engines.urls, or POST it to /engines"
    each = "; ".join(f"{engine.url} is {engine.state}{f': {engine.problem}' if engine.problem else ''}" for engine in engines)
    return f"one of the inference hub's {len(engines)} engines must be able to take weights, and none is: {each}"


def reachable_address(engine_urls: Iterable[str]) -> str:
    """This machine's address on the route to the engines: of one on another machine if there is any, else loopback."""
    addresses = {_address_towards(urlsplit(url).hostname or "127.0.0.1") for url in engine_urls}
    beyond = sorted(address for address in addresses if not address.startswith("127."))
    return beyond[0] if beyond else "127.0.0.1"


def _address_towards(host: str) -> str:
    """The source address that the system would use; a UDP socket that connects sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            name: Any = probe.getsockname()
            return str(name[0])
    except OSError as error:
        raise EngineError(f"the address of engine {host!r} must resolve from the trainer's machine: {error}") from error
