"""`POST /generate` in /docs: the one route that FastAPI does not see."""

from collections.abc import Mapping
from typing import Any, Final

from services.inference_hub.messages import Problem

GENERATE_PATH: Final = "/generate"

_REQUEST: Final = {
    "type": "object",
    "required": ["input_ids"],
    "properties": {
        "input_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        "sampling_params": {"type": "object", "description": "SGLang's."},
        "extra_key": {"type": "string", "description": "Separates prefix caches; the hub adds its own namespace."},
    },
}

_ANSWER: Final = {
    "type": "object",
    "required": ["text", "output_ids", "meta_info"],
    "properties": {
        "text": {"type": "string"},
        "output_ids": {"type": "array", "items": {"type": "integer"}},
        "meta_info": {
            "type": "object",
            "required": ["finish_reason", "output_token_logprobs", "weight_versions"],
            "properties": {
                "finish_reason": {"type": "object"},
                "output_token_logprobs": {
                    "type": "array",
                    "description": "[log-probability, token id, null] of each output token.",
                    "items": {"type": "array"},
                },
                "weight_versions": {
                    "type": "array",
                    "description": "Output tokens [start, end) were sampled by the policy version.",
                    "items": {"type": "object", "required": ["version", "start", "end"]},
                },
            },
        },
    },
}

_ANSWER_EXAMPLE: Final = {
    "text": "3 + 4",
    "output_ids": [18, 488, 220],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "output_token_logprobs": [[-0.11, 18, None], [-0.52, 488, None], [-0.03, 220, None]],
        "weight_versions": [{"version": "12", "start": 0, "end": 2}, {"version": "13", "start": 2, "end": 3}],
    },
}

_REFUSALS: Final[Mapping[int, tuple[str, str]]] = {
    400: (
        "The body is not JSON, or the engine refuses a sampling parameter.",
        "the body of POST /generate must be JSON, got something else: JSON is malformed: invalid character (byte 0)",
    ),
    413: (
        "The body is larger than inference_hub.max_body_bytes.",
        "the body of POST /generate must be at most 16777216 bytes (inference_hub.max_body_bytes), got more; send each prompt as "
        "its own call",
    ),
    422: (
        "input_ids is missing or not one list of token ids, prompt and answer are longer than the engines' context, or stream or "
        "n > 1 was asked for.",
        "input_ids and sampling_params.max_new_tokens must together be at most 40960 tokens, the engines' context length, got "
        "39000 + 4096; ask for fewer tokens, or shorten the prompt",
    ),
    401: (
        "The hub has tokens, and the request has none of them.",
        "this request must have the header Authorization: Bearer with the hub's token, and has not; the hub's is in "
        "HEADRACE_HUB_TOKEN",
    ),
    429: (
        "As many calls wait as inference_hub.max_waiting_calls allows; Retry-After says when to send it again.",
        "at most 65536 generate calls may wait in the hub (inference_hub.max_waiting_calls), and as many do; send this one again "
        "in 5 s",
    ),
    502: (
        "It failed on inference_hub.max_attempts attempts.",
        "a generate call may fail on at most 4 attempts (inference_hub.max_attempts), and this one did: 3f1c9a0d5e77 lost the "
        "connection before it answered; see the engines' logs",
    ),
    503: (
        "No engine could answer it within inference_hub.generate_timeout_s.",
        "a generate call must be answered within 3600 s (inference_hub.generate_timeout_s), and was not after 0 attempts: no "
        "engine is ready; GET /engines says what state each engine is in",
    ),
}


def _json(schema: Mapping[str, Any], example: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema, "example": example}}


def _responses() -> dict[str, Any]:
    problem = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    refusals = {
        str(status): {"description": reason, "content": _json(problem, {"detail": sentence})}
        for status, (reason, sentence) in _REFUSALS.items()
    }
    return {"200": {"description": "The whole answer.", "content": _json(_ANSWER, _ANSWER_EXAMPLE)}, **refusals}


GENERATE_OPERATION: Final[dict[str, Any]] = {
    "tags": ["generate"],
    "summary": "Generate",
    "description": (
        "SGLang's `/generate` for one prompt of token ids; other fields are passed on. The hub sets `rid`, `return_logprob` and a "
        "cache namespace in `extra_key`. The answer is SGLang's: `meta_info.output_token_logprobs` has a log-probability for each "
        "output token and `meta_info.weight_versions` the policy version that sampled it. An engine's refusal (4xx) is passed on."
    ),
    "parameters": [
        {
            "name": "X-Session-Id",
            "in": "header",
            "required": False,
            "description": "Calls of one session go to the same engine, where their prefix is cached, while it is not overloaded.",
            "schema": {"type": "string"},
            "example": "episode-7c1d",
        },
        {
            "name": "X-Environment",
            "in": "header",
            "required": False,
            "description": "Calls that wait for an engine are served fairly among environments.",
            "schema": {"type": "string"},
            "example": "calculator",
        },
        {
            "name": "X-Purpose",
            "in": "header",
            "required": False,
            "description": "validation: this call goes before those of training.",
            "schema": {"type": "string"},
            "example": "validation",
        },
        {
            "name": "X-Ended-Sessions",
            "in": "header",
            "required": False,
            "description": "Sessions that make no more calls, with commas between: others may begin in their place.",
            "schema": {"type": "string"},
            "example": "episode-51aa,episode-51ab",
        },
    ],
    "requestBody": {
        "required": True,
        "content": _json(_REQUEST, {"input_ids": [151644, 872, 198], "sampling_params": {"max_new_tokens": 3, "temperature": 1.0}}),
    },
    "responses": _responses(),
}
