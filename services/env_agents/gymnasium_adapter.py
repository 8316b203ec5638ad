"""Any `gymnasium.Env` as an environment of text. Its methods block, so they run in worker threads."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import msgspec
import numpy as np

from services.env_agents.environment import Action, Environment, Message, Step, Task
from services.env_agents.tools import as_text
from shared.decoding import UNDECODABLE

_INTEGER = re.compile(r"-?\d+")


class GymnasiumEnvironment(Environment):
    """Observations as user messages, the policy's text as actions.

    A subclass may say what the game is (`instructions`), how an observation reads (`describe`) and what a text means (`choose`).
    `make(**arguments)` makes the Gymnasium environment at every reset; its own time limits end the episode like any other end.
    """

    instructions: str = ""

    def __init__(self, make: Callable[..., "gymnasium.Env[Any, Any]"], **arguments: Any) -> None:
        self._make = make
        self.arguments = arguments
        self._env: gymnasium.Env[Any, Any] | None = None
        self._observation: Any = None

    @property
    def env(self) -> "gymnasium.Env[Any, Any]":
        """The Gymnasium environment; there is one after `reset`."""
        assert self._env is not None
        return self._env

    def describe(self, observation: Any) -> str:
        """How an observation reads."""
        return as_text(observation.tolist() if isinstance(observation, np.ndarray | np.generic) else observation)

    def choose(self, text: str) -> Any:
        """The action that a text means: of a discrete space the last whole number in it, otherwise its JSON.

        Raises: ValueError, with what the policy should read.
        """
        space = self.env.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            numbers = _INTEGER.findall(text)
            action: Any = int(numbers[-1]) if numbers else None
        elif isinstance(space, gymnasium.spaces.Text):
            action = text
        else:
            action = _array(text, space)
        if action is None or not space.contains(action):
            raise ValueError(f"an action must be in {space}")
        return action

    async def reset(self, task: Task) -> list[Message]:
        observation = await asyncio.to_thread(self._start, task)
        instructions: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*instructions, {"role": "user", "content": self._seen(observation)}]

    async def step(self, action: Action) -> Step:
        try:
            chosen = self.choose(action.text)
        except ValueError as error:
            return Step(messages=[{"role": "user", "content": f"error: {error}"}])
        observation, reward, is_terminated, is_truncated, _ = await asyncio.to_thread(self.env.step, chosen)
        answer: Message = {"role": "user", "content": self._seen(observation)}
        return Step(messages=[answer], reward=float(reward), done=bool(is_terminated or is_truncated))

    async def close(self) -> None:
        if self._env is not None:
            await asyncio.to_thread(self._env.close)

    def state(self) -> str | None:
        return self.describe(self._observation)

    def _start(self, task: Task) -> Any:
        self._env = self._make(**self.arguments)
        observation, _ = self._env.reset(seed=task.seed, options=dict(task.data) or None)
        return observation

    def _seen(self, observation: Any) -> str:
        self._observation = observation
        return self.describe(observation)


def _array(text: str, space: "gymnasium.Space[Any]") -> Any:
    """The JSON list in a text as an element of an array-valued space. Raises: ValueError if it is none."""
    try:
        return np.asarray(msgspec.json.decode(text), dtype=space.dtype)
    except (*UNDECODABLE, TypeError, ValueError) as error:
        raise ValueError(f"an action must be in {space}, as JSON") from error
