"""Brings the trainer's weights into force on the engines, through the hub, while episodes run.

One push: form a group with all live engines, unless we have it → gather the first two buckets (generation goes on) → begin: the
hub pauses the engines → send each bucket while the next is gathered → with the last one the hub commits: it compares checksums if
it is time, and generation goes on under the new weights. A push that fails in between is made anew in a new group: the engines
that had part of the weights are not routed to until a push completes, so repeating the whole is safe, and an engine that died is
left out.

Where no engine is there to take weights, a trainer that has pushed before goes on without: `catch_up`, called while it waits for
data, brings engines that join, or come back, to the version that should be in force. It is also what brings a late engine up alone.
"""

import socket
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shared.configuration import WeightPushSection
from shared.errors import ConfigurationError, EngineError, WeightUpdateError
from trainer.hub_client import (
    AlreadyInForceError,
    CommitReply,
    EngineReply,
    GroupStaleError,
    HubClient,
    NoEngineError,
    WeightGroupReply,
)
from trainer.weight_buckets import NUM_BUFFERS, Bucket, WeightSource, stream
from trainer.weight_channels import BroadcastChannel, Channel, DiskChannel, Load, TensorChannel, WrittenSet, require_directory
from trainer.weight_checksums import ChecksumBuilder
from trainer.weight_transport import AbandonedRendezvous, WeightGroup, listen

MAX_FAILURES = 4
RETRY_S = 0.5
MAX_ABANDONED = 8
JOIN_TIMEOUT = timedelta(seconds=60)
"""Of one attempt: engines that wait for one that died are blocked as long."""
MIB = 2**20

EngineIds = tuple[str, ...]


@dataclass(frozen=True)
class PushTimes:
    """Seconds of one push. Generation stood still for `pause_s` of them; over rolling groups, in each by turns."""

    total_s: float
    gather_s: float
    """Before generation was paused."""
    pause_s: float
    load_s: float
    is_deferred: bool = False
    """No engine was there: the weights are pushed when one is."""


class WeightPusher:
    """Rank 0's side of weight updates. Keeps groups from push to push, and forms others when the engines change.

    Its epoch names this life of the trainer. As long as it lives it listens at one address, so that the hub lets no second trainer
    push.
    """

    def __init__(
        self,
        hub: HubClient,
        settings: WeightPushSection,
        *,
        dtype: torch.dtype,
        device: torch.device,
        patience_s: float,
        notice: Callable[[str], None],
        can_check_values: bool = False,
        check_model: Callable[[str, str], None] = lambda engine_url, model_path: None,
    ) -> None:
        """Args: dtype: the engines', in which weights travel. device: the trainer's; gloo and disk go from the machine's memory.
        patience_s: longest wait for the hub to answer and for a first engine. notice: is told what is waited for or left out.
        check_model: raises ConfigurationError if an engine, by its URL, has another model than the trainer in its model directory.
        can_check_values: the engines compute checksums as `ChecksumBuilder` does; else they are compared with each other.

        Raises: ConfigurationError if the shared folder cannot be used.
        """
        self._hub = hub
        self._settings = settings
        self._dtype = dtype
        is_on_device = settings.transport == "tensor" or (settings.transport == "broadcast" and settings.backend == "nccl")
        self._device = device if is_on_device else torch.device("cpu")
        self._directory = require_directory(settings.directory) if settings.transport == "disk" else None
        self._timeout = timedelta(seconds=settings.timeout_s)
        self._patience_s = patience_s
        self._notice = notice
        self._can_check_values = can_check_values
        self._check_model = check_model
        self._epoch = uuid.uuid4().hex
        self._presence: TCPStore | None = None
        self._channels: dict[EngineIds | None, Channel] = {}
        self._abandoned: deque[AbandonedRendezvous] = deque()
        self._num_pushes = 0
        self._must_verify = True
        self._noticed = ""
        """The last reason why engines could not be brought up, which is told once."""

    def push(self, source: WeightSource, version: int) -> PushTimes:
        """Puts the weights of `source` in force as `version`.

        Raises: WeightUpdateError if no attempt succeeds, EngineError if the hub cannot be reached.
        """
        started = time.perf_counter()
        self._must_verify |= self._num_pushes % self._settings.verify_every == 0
        gather_s = pause_s = load_s = 0.0
        try:
            turns = self._turns()
            for engine_ids in self._channels.keys() - set(turns):
                self._leave(engine_ids)
            for engine_ids in turns:
                attempt = self._until_done(source, version, engine_ids)
                gather_s += attempt.gather_s
                pause_s += attempt.reply.pause_s
                load_s += attempt.reply.load_s
        except NoEngineError as error:
            if not self._num_pushes:
                raise
            self._notice(f"version {version} waits for an engine: {error}")
            return PushTimes(time.perf_counter() - started, gather_s, pause_s, load_s, is_deferred=True)
        self._num_pushes += 1
        self._must_verify = False
        return PushTimes(time.perf_counter() - started, gather_s, pause_s, load_s)

    def catch_up(self, source: WeightSource, version: int) -> bool:
        """Brings live engines that lack `version` to it, if there are some. Returns False if no engine can take calls.

        A hub that does not say, or an engine that fails again, is a matter for the next time.
        """
        try:
            found = self._hub.weights()
        except (WeightUpdateError, EngineError):
            return True
        if not found.wanting_engines and not found.ready_engines:
            return False
        is_ours = (found.version, found.epoch) == (version, self._epoch)
        if is_ours and not found.wanting_engines:
            return True
        self._must_verify = True
        engine_ids = tuple(sorted(found.wanting_engines)) if is_ours else None
        try:
            reply = self._push_once(source, version, engine_ids).reply
            self._notice(f"{len(reply.engines)} engines were brought to version {version}: {', '.join(reply.engines)}")
            if engine_ids is not None:
                self._leave(engine_ids)
        except AlreadyInForceError:
            return True
        except (WeightUpdateError, EngineError) as error:
            if engine_ids in self._channels:
                self._leave(engine_ids)
            if str(error) != self._noticed:
                self._noticed = str(error)
                self._notice(f"engines could not be brought to version {version} yet: {error}")
            return found.ready_engines > 0
        return True

    def close(self) -> None:
        self._leave_all()
        while self._abandoned:
            self._abandoned.pop().close()
        self._presence = None
        self._hub.close()

    def _turns(self) -> list[EngineIds | None]:
        """The groups of one push: None is all live engines, and what is left if the hub does not say which those are."""
        num_groups = self._settings.rolling_groups
        live: list[str] = []
        if num_groups > 1:
            with suppress(WeightUpdateError, EngineError):
                live = sorted(engine.id for engine in self._hub.engines() if engine.is_live)
        return [part for index in range(num_groups) if (part := tuple(live[index::num_groups]))] or [None]

    def _until_done(self, source: WeightSource, version: int, engine_ids: EngineIds | None) -> "_Attempt":
        deadline = time.monotonic() + self._patience_s
        failures = 0
        noticed = ""
        while True:
            try:
                return self._push_once(source, version, engine_ids)
            except AlreadyInForceError:
                return _Attempt(CommitReply(version, (), {}, False, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0)
            except (WeightUpdateError, EngineError) as refusal:
                self._leave_all()
                error = self._explained(refusal)
                if isinstance(error, NoEngineError) and (self._num_pushes or engine_ids is not None):
                    raise error from refusal.__cause__
                is_waiting = isinstance(error, NoEngineError | EngineError | GroupStaleError)
                failures += not is_waiting
                if failures == MAX_FAILURES or (is_waiting and time.monotonic() > deadline):
                    raise error from refusal.__cause__
                if isinstance(error, GroupStaleError):
                    continue
                if str(error) != noticed:
                    noticed = str(error)
                    self._notice(
                        f"waiting for at most {self._patience_s:g} s: {error}"
                        if is_waiting
                        else f"the weight update of version {version} failed and is made again: {error}"
                    )
                self._must_verify = True
                time.sleep(RETRY_S * 2 ** max(0, failures - 1))

    def _explained(self, error: WeightUpdateError | EngineError) -> WeightUpdateError | EngineError:
        """The same error, with what the hub knows of the engines where none can take weights."""
        if isinstance(error, NoEngineError):
            with suppress(WeightUpdateError, EngineError):
                return NoEngineError(why_no_engine(self._hub.engines()))
        return error

    def _push_once(self, source: WeightSource, version: int, engine_ids: EngineIds | None) -> "_Attempt":
        started = time.perf_counter()
        channel = self._channel(engine_ids)
        checks = ChecksumBuilder() if self._must_verify and self._can_check_values else None
        streamed = stream(
            source,
            dtype=self._dtype,
            bucket_bytes=self._settings.bucket_mib * MIB,
            device=self._device,
            observe=checks.add if checks else None,
        )
        # An error's frames would keep it, and the other ranks in the middle of their gathering, when the next attempt begins one.
        with closing(streamed) as buckets:
            parts = channel.prepared(buckets, version)
            ahead = deque(islice(parts, NUM_BUFFERS))
            gathered = time.perf_counter()
            is_rolling = engine_ids is not None
            update_id = self._hub.begin_update(
                group_name=channel.group_name, version=version, mode=self._settings.mode, is_rolling=is_rolling
            )

            def load_last(bucket: Mapping[str, object]) -> CommitReply:
                checksums = (checks.checksums() if checks else {}) if self._must_verify else None
                return self._hub.load_last_bucket(update_id, bucket, checksums)

            try:
                reply = send_all(channel, ahead, parts, load=partial(self._hub.load_bucket, update_id), load_last=load_last)
            except (WeightUpdateError, EngineError):
                with suppress(WeightUpdateError, EngineError):
                    self._hub.abandon(update_id)
                raise
        for url, problem in reply.left_out.items():
            self._notice(f"version {version} is in force without engine {url}: {problem}")
        return _Attempt(reply, gathered - started)

    def _channel(self, engine_ids: EngineIds | None) -> Channel:
        if engine_ids not in self._channels:
            self._channels[engine_ids] = self._open_channel(engine_ids)
        return self._channels[engine_ids]

    def _open_channel(self, engine_ids: EngineIds | None) -> Channel:
        engines = self._hub.engines()
        self._leave_out_misfits(engines)
        address = reachable_address(engine.url for engine in engines if engine.is_live)
        presence = self._present_at(address)
        # Each group has a store of its own: its end is what lets engines go that wait in vain for the others to join.
        store = listen(address, timeout=self._timeout) if self._settings.transport == "broadcast" else presence
        reply = self._hub.form_group(
            epoch=self._epoch,
            master_address=address,
            master_port=store.port,
            presence_port=presence.port,
            backend=self._settings.backend,
            transport=self._settings.transport,
            engine_ids=engine_ids,
        )
        try:
            channel = self._joined(store, reply)
        except WeightUpdateError as error:
            # The error's frames hold the store, which has to end before the engines that did come are let go.
            traceback.clear_frames(error.__traceback__)
            port = store.port
            del store
            try:
                # When the hub answers, it has lost the engine that did not come, and the next group is without it.
                self._hub.wait_group_ready(reply.group_name)
            finally:
                self._abandon(AbandonedRendezvous(address, port))
            raise
        try:
            self._hub.wait_group_ready(channel.group_name)
        except (WeightUpdateError, EngineError):
            channel.close()
            del store  # As above: engines that still wait there are let go by its end, and the error keeps this frame.
            raise
        return channel

    def _leave_out_misfits(self, engines: Sequence[EngineReply]) -> None:
        """Keeps live engines of another model from groups and calls. Raises: ConfigurationError for one before the first push."""
        for engine in engines:
            try:
                if engine.is_live:
                    self._check_model(engine.url, engine.model_path)
            except ConfigurationError as error:
                if not self._num_pushes:
                    raise
                self._hub.quarantine(engine.id, str(error))
                self._notice(f"training goes on without an engine: {error}")

    def _joined(self, store: TCPStore, reply: WeightGroupReply) -> Channel:
        if self._directory is not None:
            return DiskChannel(reply.group_name, self._directory)
        if self._settings.transport == "tensor":
            return TensorChannel(reply.group_name, reply.engines)
        # gloo waits for the engines here. NCCL's watchdog ends the whole process at this deadline: `broadcast` has to be first.
        is_gloo = self._settings.backend == "gloo"
        group = WeightGroup(
            store,
            name=reply.group_name,
            world_size=reply.world_size,
            backend=self._settings.backend,
            timeout=min(self._timeout, JOIN_TIMEOUT) if is_gloo else 2 * self._timeout,
        )
        return BroadcastChannel(group, timeout_s=self._settings.timeout_s)

    def _abandon(self, rendezvous: AbandonedRendezvous) -> None:
        if len(self._abandoned) == MAX_ABANDONED:
            self._abandoned.popleft().close()
        self._abandoned.append(rendezvous)

    def _present_at(self, address: str) -> TCPStore:
        if self._presence is None or self._presence.host != address:
            self._presence = listen(address, timeout=self._timeout)
        return self._presence

    def _leave(self, engine_ids: EngineIds | None) -> None:
        self._channels.pop(engine_ids).close()

    def _leave_all(self) -> None:
        for engine_ids in tuple(self._channels):
            self._leave(engine_ids)


@dataclass(frozen=True)
class _Attempt:
    """One that succeeded."""

    reply: CommitReply
    gather_s: float


def send_all(
    channel: Channel,
    ahead: deque[Bucket | WrittenSet],
    parts: Iterator[Bucket | WrittenSet],
    *,
    load: Load[None],
    load_last: Load[CommitReply],
) -> CommitReply:
    """Sends what is `ahead` and what still comes from `parts`: one is gathered while the one before is sent.

    The first two are there already, in the two buffers; the third needs the buffer of the first, so it waits for that to be sent.
    """
    with ThreadPoolExecutor(max_workers=1) as sender:
        while not (part := ahead.popleft()).is_last:
            sending = sender.submit(channel.send, part, load)
            if not ahead:
                ahead.extend(islice(parts, 1))
            sending.result()
    return channel.send(part, load_last)


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
