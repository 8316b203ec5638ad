"""The trajectory record: one finished episode, exactly as the policy sampled it.

Written once by an Environment Agent, read by the trainer and by tools. Token arrays travel as little-endian bytes, so that a
record of T tokens costs 9·T bytes and decodes without a copy.
"""

from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from shared.decoding import UNDECODABLE
from shared.errors import NewerSchemaError, RecordError
from shared.versions import VersionSpan, oldest_version

SCHEMA_VERSION: Final = 1
MAX_VERSION: Final = 2**53
"""Every process counts versions up to it exactly, Redis's Lua with its doubles too."""
SUCCESS_REWARD: Final = 1.0
"""An episode with at least this total reward is a success."""

TokenIds = npt.NDArray[np.int32]
LossMask = npt.NDArray[np.uint8]
Logprobs = npt.NDArray[np.float32]


class Outcome(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    """The environment said so; its reward is meaningful."""
    TRUNCATED = "truncated"
    """The token or turn limit came first; the reward is what the environment gave up to there, and limits.truncation_reward."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment raised or answered nonsense; there is no reward to learn from."""
    TIMEOUT = "timeout"
    """The environment or the whole episode passed its deadline; there is no reward to learn from, unless limits states one."""
    CANCELLED = "cancelled"
    """Nobody needed the episode any more."""

    @property
    def is_trainable(self) -> bool:
        """Whether the reward says something about the policy rather than about the environment's health."""
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED)


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call of a turn. `arguments` is the JSON text as parsed; `is_error` includes calls that could not be parsed."""

    name: str
    arguments: str
    seconds: float
    is_error: bool


class Turn(msgspec.Struct, frozen=True):
    """One turn: the policy sampled tokens [start, end), then the environment answered.

    `state_fingerprint` names the environment's state before the turn, for step-level credit (GiGPO); "" if unknown.
    """

    start: int
    end: int
    reward: float
    tool_calls: tuple[ToolCall, ...]
    state_fingerprint: str


class Timings(msgspec.Struct, frozen=True):
    """Where an episode's wall-clock seconds went. `queued` is the wait before its first generation began."""

    queued_s: float
    generating_s: float
    environment_s: float
    reward_s: float


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A finished episode of T tokens.

    Sampled tokens (mask 1) carry the engine's own log-probability at `temperature` and lie in exactly one version span;
    prompt and observation tokens (mask 0) carry 0 and may lie in none.
    """

    schema_version: int = SCHEMA_VERSION

    run_id: str
    trajectory_id: str
    """uuid7, so that ids sort by the time the episode began."""
    group_id: str
    group_size: int
    sample_index: int
    """0 … group_size-1; with `group_id` it identifies the episode whatever the attempt."""
    attempt: int
    environment: str
    task_id: str

    token_bytes: bytes
    """[T] int32."""
    loss_mask_bytes: bytes
    """[T] uint8, 1 where the policy sampled the token."""
    logprob_bytes: bytes
    """[T] float32, behaviour log-probabilities; 0 where the mask is 0."""
    version_spans: tuple[VersionSpan, ...]
    temperature: float

    turns: tuple[Turn, ...]
    reward: float
    reward_parts: dict[str, float]
    outcome: Outcome
    detail: str
    """Why the episode did not complete, in words; "" if it did."""
    timings: Timings
    finished_at: float
    """Unix seconds."""
    has_stated_reward: bool = False
    """Its environment's spec says what this ending is worth, so it teaches although its outcome says nothing of the policy."""

    def __post_init__(self) -> None:
        num_tokens = self.num_tokens
        if len(self.token_bytes) != 4 * num_tokens or len(self.logprob_bytes) != 4 * num_tokens:
            raise ValueError(
                f"token, mask and logprob arrays must have one length, got {len(self.token_bytes) / 4:g}, "
                f"{num_tokens} and {len(self.logprob_bytes) / 4:g}"
            )
        if not 0 <= self.sample_index < self.group_size:
            raise ValueError(f"sample_index must be in [0, {self.group_size}), got {self.sample_index}")
        covered = np.zeros(num_tokens, dtype=np.int64)
        for span in self.version_spans:
            if not 0 <= span.start < span.end <= num_tokens:
                raise ValueError(f"version span [{span.start}, {span.end}) must lie in [0, {num_tokens})")
            if not 0 <= span.version <= MAX_VERSION:
                raise ValueError(f"a policy version must be in [0, {MAX_VERSION}], got {span.version}")
            covered[span.start : span.end] += 1
        if np.any(covered[self.loss_mask == 1] != 1):
            raise ValueError("every sampled token must lie in exactly one version span")
        for turn in self.turns:
            if not 0 <= turn.start <= turn.end <= num_tokens:
                raise ValueError(f"turn [{turn.start}, {turn.end}) must lie in [0, {num_tokens})")

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.loss_mask_bytes)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def is_trainable(self) -> bool:
        """Its reward means something, and it has a token that the policy sampled."""
        return (self.outcome.is_trainable or self.has_stated_reward) and self.num_sampled_tokens > 0

    @property
    def token_ids(self) -> TokenIds:
        """[T] read-only view."""
        return np.frombuffer(self.token_bytes, dtype="<i4")

    @property
    def loss_mask(self) -> LossMask:
        """[T] read-only view."""
        return np.frombuffer(self.loss_mask_bytes, dtype=np.uint8)

    @property
    def logprobs(self) -> Logprobs:
        """[T] read-only view."""
        return np.frombuffer(self.logprob_bytes, dtype="<f4")

    @property
    def token_versions(self) -> npt.NDArray[np.int64]:
        """[T] the policy version of every sampled token, -1 elsewhere."""
        versions = np.full(self.num_tokens, -1, dtype=np.int64)
        for span in self.version_spans:
            versions[span.start : span.end] = span.version
        versions[self.loss_mask == 0] = -1
        return versions

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled here; None where nothing was sampled."""
        return oldest_version(self.version_spans) if self.version_spans else None


class _SchemaPeek(msgspec.Struct):
    schema_version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Trajectory)
_peek_decoder = msgspec.msgpack.Decoder(_SchemaPeek)


def encode(trajectory: Trajectory) -> bytes:
    """One trajectory as msgpack."""
    return _encoder.encode(trajectory)


def decode(record: bytes) -> Trajectory:
    """The trajectory in `record`.

    Raises: NewerSchemaError if a newer Headrace wrote it; RecordError if it is not a readable trajectory.
    """
    try:
        schema_version = _peek_decoder.decode(record).schema_version
        if schema_version > SCHEMA_VERSION:
            raise NewerSchemaError(
                f"this trajectory has schema version {schema_version}, and this Headrace reads up to {SCHEMA_VERSION}; "
                "upgrade the process that reads it"
            )
        return _decoder.decode(record)
    except UNDECODABLE as error:
        raise RecordError(f"not a trajectory record ({len(record)} bytes): {error}") from error
