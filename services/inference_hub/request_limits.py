"""How many tokens the engines take in one request. Pure."""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from services.inference_hub.resume import RefusedError


class RequestLimits(msgspec.Struct, frozen=True):
    """Of one engine, or of all; None where they do not say."""

    prompt_tokens: int | None = None
    """What context and KV cache have room for, with a few tokens left to sample."""
    context_tokens: int | None = None
    """Prompt and answer together."""
    vocabulary: int | None = None
    """Ids of tokens are below it."""

    def check(self, prompt_tokens: int, max_new_tokens: int | None) -> None:
        """Raises: RefusedError, 422, for a request that every attempt would be refused with."""
        if self.prompt_tokens is not None and prompt_tokens > self.prompt_tokens:
            raise RefusedError(
                422,
                f"input_ids must hold at most {self.prompt_tokens} tokens, for which the engines' context and KV cache have room, "
                f"got {prompt_tokens}; shorten the prompt, or start engines with a longer context or a larger cache",
            )
        if self.context_tokens is None:
            return
        if prompt_tokens + (max_new_tokens or 0) > self.context_tokens:
            raise RefusedError(
                422,
                f"input_ids and sampling_params.max_new_tokens must together be at most {self.context_tokens} tokens, the engines' "
                f"context length, got {prompt_tokens} + {max_new_tokens or 0}; ask for fewer tokens, or shorten the prompt",
            )


class _Limited(Protocol):
    @property
    def request_limits(self) -> RequestLimits: ...


def common_limits(engines: Iterable[_Limited]) -> RequestLimits:
    """What each of `engines` takes, so that a call may go on at any of them."""
    all_limits = [engine.request_limits for engine in engines]
    prompts = [limits.prompt_tokens for limits in all_limits if limits.prompt_tokens is not None]
    contexts = [limits.context_tokens for limits in all_limits if limits.context_tokens is not None]
    vocabularies = [limits.vocabulary for limits in all_limits if limits.vocabulary is not None]
    return RequestLimits(min(prompts, default=None), min(contexts, default=None), min(vocabularies, default=None))
