"""Chat messages: what environments say, and what a dataset's prompt column means."""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from shared.decoding import UNDECODABLE


class Message(TypedDict):
    """What the environment says, as chat templates expect it. `name` is the tool's, in a tool message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: NotRequired[str]


def as_messages(prompt: Any) -> list[Message]:
    """The messages that a prompt in a dataset stands for: messages (verl), their JSON (ROLL), or text of the user.

    Raises: ValueError if it is none of these.
    """
    if isinstance(prompt, str):
        return _decoded(prompt) or [{"role": "user", "content": prompt}]
    return _checked(prompt)


def _decoded(text: str) -> list[Message] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        return _checked(msgspec.json.decode(text))
    except (*UNDECODABLE, ValueError):  # Text that only looks like a list.
        return None


def _checked(prompt: Any) -> list[Message]:
    try:
        messages = msgspec.convert([_without_nulls(message) for message in prompt], list[Message])
    except (TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"a prompt must be text or a list of {{role, content}}, got {prompt!r:.100}: {error}") from error
    if not messages:
        raise ValueError("a prompt must have at least one message, got none")
    return messages


def _without_nulls(message: Any) -> Any:
    """Parquet gives every message all the keys that any of them has."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None}
