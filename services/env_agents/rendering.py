"""Messages to token ids and sampled ids to actions. Sampled ids are appended as they are, never decoded and encoded again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import renderers
from pydantic import ValidationError
from renderers.configs import AutoRendererConfig

from services.env_agents.environment import Action, Message, RequestedCall
from services.env_agents.tokenizer import load_tokenizer
from shared.decoding import UNDECODABLE
from shared.errors import ConfigurationError, EpisodeError

_PROBLEMS: Mapping[str, str] = {
    renderers.ToolCallParseStatus.INVALID_JSON: "the tool call is not JSON",
    renderers.ToolCallParseStatus.UNCLOSED_BLOCK: "the tool call does not end",
    renderers.ToolCallParseStatus.MISSING_NAME: "the tool call has no name",
}

_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode


class PrefixError(EpisodeError):
    """The chat format would change tokens that were sampled already, so the episode cannot go on."""


class ChatRenderer:
    """One model's chat format: `prompt` once, then `parse` and `extend` for every turn."""

    def __init__(self, tokenizer: Any, renderer: Any) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.stop_token_ids: list[int] = renderer.get_stop_token_ids()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids up to where the policy's first turn begins."""
        token_ids: list[int] = self._renderer.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True)
        return token_ids

    def parse(self, prompt_ids: list[int], sampled_ids: list[int], tools: Sequence[Mapping[str, Any]]) -> Action:
        """What the policy said and which tools it called; a call that cannot be parsed carries its problem."""
        parsed = self._renderer.parse_response(sampled_ids, tools=list(tools) or None, prompt_ids=prompt_ids)
        return Action(parsed.content, tuple(_requested_call(call) for call in parsed.tool_calls))

    def extend(
        self, prompt_ids: list[int], sampled_ids: list[int], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The ids that `messages` add after a turn, up to where the next turn begins.

        Raises: PrefixError if the turn cannot be continued with its tokens unchanged.
        """
        bridged = self._renderer.bridge_to_next_turn(prompt_ids, sampled_ids, list(messages), tools=list(tools) or None)
        if bridged is None:
            raise PrefixError("the chat format cannot continue after this turn without changing its tokens")
        before = len(prompt_ids) + len(sampled_ids)
        if bridged.token_ids[:before] != prompt_ids + sampled_ids:
            raise PrefixError("the chat format changed tokens of earlier turns")
        added: list[int] = bridged.token_ids[before:]
        return added

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, for people to read."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _requested_call(call: Any) -> RequestedCall:
    if call.status != renderers.ToolCallParseStatus.OK:
        return RequestedCall(call.name or "", {}, _PROBLEMS.get(call.status, f"the tool call is malformed ({call.status})"))
    name, arguments = call.name, call.arguments
    if not isinstance(name, str):
        return RequestedCall("", {}, "the tool call's name is not text")
    if isinstance(arguments, str):
        try:
            arguments = _decode_arguments(arguments)
        except UNDECODABLE:
            arguments = None
    if not isinstance(arguments, dict):
        return RequestedCall(name, {}, "arguments must be a JSON object")
    return RequestedCall(name, arguments)


def load_renderer(model_path: Path, name: str, options: Mapping[str, Any]) -> ChatRenderer:
    """The chat format `name` with the tokenizer in `model_path`.

    Thinking is kept in earlier turns unless the options say otherwise: a format that removes it could not be continued.

    Raises: ConfigurationError if there is no such format, an option is unknown, or the tokenizer does not fit.
    """
    tokenizer = load_tokenizer(model_path, needs_template=name == "default")
    return ChatRenderer(tokenizer, _create(tokenizer, name, options))


def _create(tokenizer: Any, name: str, options: Mapping[str, Any]) -> Any:
    keeps_thinking = {} if name == "default" else {"thinking_retention": "all"}
    try:
        config_type = AutoRendererConfig if name == "auto" else type(renderers.config_from_name(name))
        return renderers.create_renderer(tokenizer, config_type(**{**keeps_thinking, **options}))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigurationError(f"env_agents.renderer_options must suit the renderer {name!r}: {problems}") from error
    except (ValueError, AssertionError, AttributeError, ImportError, NotImplementedError) as error:
        remedy = "; name the model's renderer instead of auto" if name == "auto" else ""
        raise ConfigurationError(f"env_agents.renderer {name!r} cannot be used with this model: {error}{remedy}") from error
