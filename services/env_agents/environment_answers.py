"""What environments answer, checked before it is used: they are somebody else's code."""

import math
import numbers

import msgspec

from services.env_agents.environment import Message, Step
from shared.errors import EpisodeError
from shared.trajectory import ToolCall


def checked_messages(messages: object) -> list[Message]:
    """Raises: EpisodeError."""
    try:
        checked = msgspec.convert(messages, list[Message])
    except msgspec.ValidationError as error:
        raise EpisodeError(
            f"an environment's messages must be a list of {{role, content}}, got {messages!r:.200}: {error}"
        ) from error
    if not checked:
        raise EpisodeError("an environment that is not done must answer with at least one message, got none")
    return checked


def checked_step(step: object) -> Step:
    """The step with plain floats. Raises: EpisodeError."""
    if not isinstance(step, Step):
        raise EpisodeError(f"step must return a Step, got {step!r:.200}")
    try:
        return Step(
            messages=step.messages,
            reward=_checked_number(step.reward),
            done=bool(step.done),
            reward_parts={str(name): _checked_number(part) for name, part in step.reward_parts.items()},
            tool_calls=msgspec.convert(msgspec.to_builtins(step.tool_calls), tuple[ToolCall, ...]),
            reward_s=_checked_number(step.reward_s),
        )
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise EpisodeError(f"a Step's fields must have the types that it declares: {error}, got {step!r:.200}") from error


def _checked_number(value: object) -> float:
    """A plain float: numpy's scalars count as numbers, and the record's codec does not know them."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise EpisodeError(f"a reward must be a finite number, got {value!r:.200}")
    return float(value)
