"""Tools: methods that the policy may call, with schemas from signatures and docstrings, and checked arguments."""

import asyncio
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

Function = TypeVar("Function", bound=Callable[..., Any])

_TOOL_MARK = "_headrace_tool"
_PROBLEM_CHARACTERS = 500
_ARGUMENT_LINE = re.compile(r"^\s*(?P<name>\w+)(?:\s*\([^)]*\))?:\s*(?P<text>.+)$")


class ToolError(Exception):
    """Raised by a tool to tell the policy what it did wrong. Any other exception ends the episode as an environment error."""


def tool(method: Function) -> Function:
    """Marks a method as callable by the policy.

    The method's annotated parameters become the schema; its docstring's first paragraph becomes the description, and lines
    `name: text` below `Args:` describe parameters. An `async def` runs on the event loop, a plain `def` in a worker thread.
    """
    setattr(method, _TOOL_MARK, True)
    return method


@dataclass(frozen=True)
class Tool:
    """One tool of an environment class."""

    name: str
    spec: Mapping[str, Any]
    """As chat templates expect it: {"type": "function", "function": {name, description, parameters}}."""
    arguments: type[msgspec.Struct]
    function: Callable[..., Any]

    async def call(self, owner: object, arguments: Mapping[str, Any]) -> str:
        """The tool's result as text.

        Raises: ToolError if the arguments do not fit the schema, or if the tool says so.
        """
        try:
            checked = msgspec.convert(arguments, self.arguments)
        except msgspec.ValidationError as error:
            # msgspec's words have the name of an unknown argument, and the policy chose that.
            raise ToolError(f"{self.name}: {str(error)[:_PROBLEM_CHARACTERS]}") from error
        keywords = msgspec.structs.asdict(checked)
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(owner, **keywords)
        else:
            result = await asyncio.to_thread(self.function, owner, **keywords)
        return as_text(result)


def as_text(value: Any) -> str:
    """How a value reads in a message: strings as they are, everything else as JSON, or `str` where JSON has no form for it."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return str(value)


def tools_of(owner: type) -> Mapping[str, Tool]:
    """The tools of an environment class by name, in the order they are defined.

    Raises: TypeError if a tool's parameter has no annotation, or one that JSON has no form for.
    """
    functions = {name: member for cls in reversed(owner.__mro__) for name, member in vars(cls).items()}
    return {name: _describe(name, function) for name, function in functions.items() if getattr(function, _TOOL_MARK, False)}


def _describe(name: str, function: Callable[..., Any]) -> Tool:
    description, argument_texts = _read_docstring(function)
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"every parameter of tool {name!r} must be named and annotated, got {parameter}")
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    parameters = _parameters_schema(arguments, argument_texts)
    spec = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return Tool(name, spec, arguments, function)


def _parameters_schema(arguments: type[msgspec.Struct], texts: Mapping[str, str]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    schema = components.pop(arguments.__name__)
    properties = {
        name: {**value, "description": texts[name]} if name in texts else value for name, value in schema["properties"].items()
    }
    parameters = {"type": "object", "properties": properties, "required": schema["required"]}
    return {**parameters, "$defs": components} if components else parameters


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the texts of the parameters below `Args:`."""
    head, _, tail = (inspect.getdoc(function) or "").partition("Args:")
    description = " ".join(head.split("\n\n")[0].split())
    matches = [_ARGUMENT_LINE.match(line) for line in tail.splitlines()]
    return description, {match["name"]: match["text"].strip() for match in matches if match}
