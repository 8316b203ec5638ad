"""The books of one episode: tokens, mask, log-probabilities, versions and turns, aligned at every moment."""

import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from services.env_agents.generation import Generation
from shared.trajectory import Outcome, Timings, ToolCall, Trajectory, Turn
from shared.versions import VersionSpan, merge_spans, shift_spans


class EpisodeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which episode this is; the trajectory carries the same fields."""

    run_id: str
    trajectory_id: str
    group_id: str
    group_size: int
    sample_index: int
    attempt: int
    environment: str
    task_id: str


class EpisodeLog:
    """Grows by context (prompt, observations) and by turns (what the policy sampled); becomes a trajectory at any moment."""

    def __init__(self, identity: EpisodeIdentity, *, temperature: float) -> None:
        self.identity = identity
        self.token_ids: list[int] = []
        self.queued_s = 0.0
        self.generating_s = 0.0
        self.environment_s = 0.0
        self.reward_s = 0.0
        self._temperature = temperature
        self._loss_mask = bytearray()
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._turns: list[Turn] = []
        self._reward_parts: dict[str, float] = {}
        self._has_stated_reward = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self._loss_mask)

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self._turns)

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Tokens that the policy reads and did not sample."""
        self.token_ids.extend(token_ids)
        self._loss_mask.extend(bytes(len(token_ids)))
        self._logprobs.extend([0.0] * len(token_ids))

    def add_turn(self, generation: Generation, *, state_fingerprint: str) -> None:
        """Tokens that the policy sampled; the environment has not answered yet."""
        start = self.num_tokens
        self.token_ids.extend(generation.token_ids)
        self._loss_mask.extend(b"\x01" * len(generation.token_ids))
        self._logprobs.extend(generation.logprobs)
        self._spans.extend(shift_spans(generation.version_spans, start))
        self._turns.append(Turn(start, self.num_tokens, 0.0, (), state_fingerprint))

    def answer_turn(self, *, reward: float, reward_parts: Mapping[str, float], tool_calls: tuple[ToolCall, ...]) -> None:
        """What the environment made of the last turn."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], tool_calls=tool_calls)
        self.add_reward(reward, reward_parts)

    def add_reward(self, reward: float, parts: Mapping[str, float]) -> None:
        """To the last turn, and to the episode's named parts."""
        turn = self._turns[-1]
        self._turns[-1] = msgspec.structs.replace(turn, reward=turn.reward + reward)
        for name, part in parts.items():
            self._reward_parts[name] = self._reward_parts.get(name, 0.0) + part

    def state_reward(self, reward: float, part: str) -> None:
        """The episode is worth exactly `reward`, whatever it had before and however it ends."""
        self.add_reward(reward - self.reward, {part: reward - self.reward})
        self._has_stated_reward = True

    def trajectory(self, outcome: Outcome, detail: str) -> Trajectory:
        """The finished episode."""
        return Trajectory(
            **msgspec.structs.asdict(self.identity),
            token_bytes=np.asarray(self.token_ids, dtype="<i4").tobytes(),
            loss_mask_bytes=bytes(self._loss_mask),
            logprob_bytes=np.asarray(self._logprobs, dtype="<f4").tobytes(),
            version_spans=merge_spans(self._spans),
            temperature=self._temperature,
            turns=tuple(self._turns),
            reward=self.reward,
            reward_parts=self._reward_parts,
            outcome=outcome,
            detail=detail,
            timings=Timings(self.queued_s, self.generating_s, self.environment_s, self.reward_s),
            finished_at=time.time(),
            has_stated_reward=self._has_stated_reward,
        )
