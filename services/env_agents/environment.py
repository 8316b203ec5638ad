"""The interface that environments are written against.

    class Calculator(Environment):
        async def reset(self, task):
            self.answer = task.data["answer"]
            return [{"role": "user", "content": task.data["question"]}]

        @tool
        def calculate(self, expression: str) -> str:
            "Evaluates an arithmetic expression."
            ...

        async def score(self, answer):
            return float(answer.strip() == self.answer)

One object lives for one episode: open → reset → step until done → close. Whatever it raises ends its episode, not the run.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from services.env_agents.chat import Message
from services.env_agents.rewards import FinishedEpisode
from services.env_agents.tasks import Task
from services.env_agents.tools import Tool, ToolError, tool, tools_of
from shared.trajectory import ToolCall

__all__ = ["Action", "Environment", "FinishedEpisode", "Message", "RequestedCall", "Step", "Task", "ToolError", "tool"]


class RequestedCall(msgspec.Struct, frozen=True):
    """A tool call that the policy made. `problem` says why it could not be parsed, and is "" if it could."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


class Action(msgspec.Struct, frozen=True):
    """One turn of the policy: its text without thoughts and calls, and the calls in order."""

    text: str
    tool_calls: tuple[RequestedCall, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment answers. An episode that is not done needs at least one message.

    {"messages": [{"role": "tool", "name": "calculate", "content": "46"}], "reward": 0.0, "done": False}
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    """Added to the episode's reward."""
    done: bool = False
    reward_parts: Mapping[str, float] = {}
    """Named parts, for reading only; added up over the turns."""
    tool_calls: tuple[ToolCall, ...] = ()
    """What was called and how long it took."""
    reward_s: float = 0.0
    """Seconds of the step that went into computing the reward."""


class Environment:
    """Base of every environment. Subclasses write `reset`, and either `score` with `@tool` methods, or `step`."""

    needs_prompts: ClassVar[bool] = False
    """Whether `reset` takes its messages from `task.prompt`, so that a row without a prompt cannot be a task."""

    _tools: ClassVar[Mapping[str, Tool]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._tools = tools_of(cls)

    async def open(self) -> None:
        """Waits for what the episode needs from elsewhere, such as a free place on a server; bounded by limits.open_timeout_s."""

    async def reset(self, task: Task) -> list[Message]:
        """Starts the episode; returns the messages before the policy's first turn."""
        raise NotImplementedError

    async def step(self, action: Action) -> Step:
        """Answers one turn: runs its tool calls, or scores its text as the final answer when it makes none."""
        if action.tool_calls:
            return await self.call_tools(action.tool_calls)
        started = time.perf_counter()
        reward = await self.score(action.text)
        return Step(reward=reward, done=True, reward_s=time.perf_counter() - started)

    def only_scores(self, action: Action) -> bool:
        """Whether `step` does nothing but `score` this turn, which limits.score_timeout_s bounds, and not limits.step_timeout_s."""
        return type(self).step is Environment.step and not action.tool_calls

    async def score(self, answer: str) -> float:
        """The reward of the final answer."""
        raise NotImplementedError

    async def close(self) -> None:
        """Gives back what the episode held; called once, also when it failed or was cancelled."""

    def state(self) -> str | None:
        """The environment's state in words, for step-level credit; None stands for the messages it answered last."""
        return None

    def tool_specs(self) -> list[Mapping[str, Any]]:
        """The tools as chat templates expect them; asked after `reset`."""
        return [tool.spec for tool in self._tools.values()]

    async def call_tools(self, calls: Sequence[RequestedCall]) -> Step:
        """Runs calls in order; each one's result, or what is wrong with it, becomes a tool message."""
        messages: list[Message] = []
        records: list[ToolCall] = []
        for call in calls:
            started = time.perf_counter()
            try:
                text, is_error = await self.call_tool(call), False
            except ToolError as error:
                text, is_error = f"error: {error}", True
            messages.append({"role": "tool", "name": call.name, "content": text})
            arguments = msgspec.json.encode(call.arguments).decode()
            records.append(ToolCall(call.name, arguments, time.perf_counter() - started, is_error))
        return Step(messages=messages, tool_calls=tuple(records))

    async def call_tool(self, call: RequestedCall) -> str:
        """One call's result as text. Raises: ToolError with what the policy should read."""
        if call.problem:
            raise ToolError(call.problem)
        if call.name not in self._tools:
            raise ToolError(f"no tool {call.name!r}; tools: {', '.join(self._tools) or 'none'}")
        return await self._tools[call.name].call(self, call.arguments)
