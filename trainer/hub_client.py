"""The inference hub's control plane, as the trainer calls it: weight groups and weight updates."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from shared.decoding import UNDECODABLE
from shared.errors import EngineError, WeightUpdateError
from shared.hub_tokens import hub_tokens
from trainer.pipeline import EngineReading

T = TypeVar("T")

QUESTION_TIMEOUT_S = 5.0
"""Short: a question asked in passing is not worth a pause of training."""


class GroupStaleError(WeightUpdateError):
    """The weight group does not have exactly the live engines; a new one has to be formed."""


class NoEngineError(WeightUpdateError):
    """No live engine is there to take weights."""


class AlreadyInForceError(WeightUpdateError):
    """Every engine holds this version; an answer that said so was lost."""


class GroupMember(msgspec.Struct, frozen=True):
    id: str
    url: str
    tensor_parallel_size: int = 1


class EngineReply(msgspec.Struct, frozen=True):
    id: str
    url: str
    state: str
    model_path: str = ""
    problem: str | None = None
    """Why it is not ready, as a sentence."""

    @property
    def is_live(self) -> bool:
        """It can take weights."""
        return self.state in ("ready", "syncing")


class WeightGroupReply(msgspec.Struct, frozen=True):
    group_name: str
    world_size: int
    engines: tuple[GroupMember, ...]


class WeightUpdateReply(msgspec.Struct, frozen=True):
    update_id: str


class CommitReply(msgspec.Struct, frozen=True):
    """Times in seconds. `pause_s` is the wall time without generation; the others lie within it."""

    version: int
    engines: tuple[str, ...]
    """URLs of those that hold the version."""
    left_out: dict[str, str]
    """URL of each that was left out on the way → why."""
    is_verified: bool
    pause_s: float
    pause_call_s: float
    load_s: float
    verify_s: float
    resume_s: float


class BucketReply(msgspec.Struct, frozen=True):
    report: CommitReply | None = None
    """Of the last bucket."""


class WeightsReply(msgspec.Struct, frozen=True):
    """What is in force, and which engines lack it."""

    version: int
    epoch: str
    ready_engines: int
    wanting_engines: tuple[str, ...]


class Refusal(msgspec.Struct, frozen=True):
    detail: str
    code: str | None = None


ERROR_BY_CODE: dict[str | None, type[WeightUpdateError]] = {
    "group_stale": GroupStaleError,
    "no_engine": NoEngineError,
    "already_in_force": AlreadyInForceError,
}


class HubClient:
    """Raises: EngineError if the hub cannot be reached, WeightUpdateError with the hub's sentence if it refuses."""

    def __init__(self, address: str, *, timeout_s: float, run_id: str | None = None) -> None:
        """Args: run_id: the hub refuses weights of a run that it does not serve; None is not compared."""
        self._address = address
        self._run_id = run_id
        self._client = httpx.Client(
            base_url=address,
            headers=hub_tokens().for_control,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=False,
        )

    def close(self) -> None:
        self._client.close()

    def engines(self) -> list[EngineReply]:
        return self._call("GET", "/engines", list[EngineReply])

    def quarantine(self, engine_id: str, problem: str) -> None:
        """Leaves an engine out until the hub loses it, as in a restart."""
        self._call("POST", f"/engines/{engine_id}/quarantine", dict, {"problem": problem})

    def usage(self) -> list[EngineReading]:
        """How long each engine was ready, idle and busy up to now."""
        return self._call("GET", "/usage", list[EngineReading], timeout_s=QUESTION_TIMEOUT_S)

    def weights(self) -> WeightsReply:
        return self._call("GET", "/weights", WeightsReply, timeout_s=QUESTION_TIMEOUT_S)

    def form_group(
        self,
        *,
        epoch: str,
        master_address: str,
        master_port: int,
        backend: str,
        presence_port: int | None = None,
        transport: str = "broadcast",
        engine_ids: Sequence[str] | None = None,
    ) -> WeightGroupReply:
        """Args: presence_port: where this trainer listens as long as it lives. engine_ids: None for all live engines."""
        master: dict[str, Any] = {"master_address": master_address, "master_port": master_port, "presence_port": presence_port}
        master |= {"backend": backend, "transport": transport}
        body = {"epoch": epoch, **master, "engine_ids": engine_ids, "run_id": self._run_id}
        return self._call("POST", "/weight_groups", WeightGroupReply, body)

    def wait_group_ready(self, group_name: str) -> None:
        self._call("POST", f"/weight_groups/{group_name}/ready", dict)

    def begin_update(self, *, group_name: str, version: int, mode: str, is_rolling: bool = False) -> str:
        body = {"group_name": group_name, "version": version, "mode": mode, "rolling": is_rolling}
        return self._call("POST", "/weight_updates", WeightUpdateReply, body).update_id

    def load_bucket(self, update_id: str, bucket: Mapping[str, Any]) -> None:
        """Returns when every engine has loaded the bucket, which is sent meanwhile. Args: bucket: what its transport says of it."""
        self._call("POST", f"/weight_updates/{update_id}/buckets", BucketReply, {**bucket, "is_last": False})

    def load_last_bucket(self, update_id: str, bucket: Mapping[str, Any], checksums: Mapping[str, str] | None) -> CommitReply:
        """The same, and returns when the weights are in force.

        Args: checksums: to compare the engines' with; {} compares theirs with each other, None compares nothing.
        """
        body = {**bucket, "is_last": True, "commit": {"checksums": checksums}}
        report = self._call("POST", f"/weight_updates/{update_id}/buckets", BucketReply, body).report
        if report is None:
            raise WeightUpdateError(
                f"the inference hub at {self._address} must commit with the last bucket, and does not; update it"
            )
        return report

    def abandon(self, update_id: str) -> None:
        self._call("DELETE", f"/weight_updates/{update_id}", dict)

    def _call(
        self,
        method: str,
        path: str,
        reply_type: type[T],
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> T:
        timeout = self._client.timeout if timeout_s is None else timeout_s
        try:
            response = self._client.request(method, path, json=body, timeout=timeout)
        except httpx.TransportError as error:
            raise EngineError(f"the inference hub at {self._address} must answer {method} {path}, got {_words(error)}") from error
        try:
            if response.is_success:
                return msgspec.json.decode(response.content, type=reply_type)
            refusal = msgspec.json.decode(response.content, type=Refusal)
        except UNDECODABLE as error:
            raise WeightUpdateError(
                f"the inference hub at {self._address} answered {method} {path} with status {response.status_code} and "
                f"{response.text[:200]!r}"
            ) from error
        raise ERROR_BY_CODE.get(refusal.code, WeightUpdateError)(refusal.detail)


def _words(error: httpx.TransportError) -> str:
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}"
