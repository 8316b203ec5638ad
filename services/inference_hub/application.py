"""The ASGI application: generate calls go straight to the hot path, everything else to FastAPI."""

from typing import Any

from fastapi import FastAPI

from services.inference_hub import control, refusals
from services.inference_hub.generate import Receive, Scope, Send
from services.inference_hub.hub import Hub

GENERATE_PATH = "/generate"

DESCRIPTION = """
One address in front of all inference engines. Agents call `/generate` with token ids; weight updates, an engine's death and
aborted requests are only a longer wait to them. Trainers push weights with `/weight_groups` and `/weight_updates`.
Refusals carry a sentence in `detail`.
"""

GENERATE_OPERATION: dict[str, Any] = {
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
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["input_ids"],
                    "properties": {
                        "input_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                        "sampling_params": {"type": "object"},
                        "extra_key": {"type": "string"},
                    },
                },
                "example": {"input_ids": [151644, 872, 198], "sampling_params": {"max_new_tokens": 3, "temperature": 1.0}},
            }
        },
    },
    "responses": {
        "200": {
            "description": "The whole answer.",
            "content": {
                "application/json": {
                    "example": {
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
                }
            },
        },
        "400": {"description": "The body is not JSON, or the engine refuses a sampling parameter."},
        "413": {"description": "The body is over 16 MiB."},
        "422": {"description": "input_ids is missing or not one list of token ids, or stream or n > 1 was asked for."},
        "502": {"description": "It failed on inference_hub.max_attempts attempts."},
        "503": {"description": "No engine could answer it within inference_hub.generate_timeout_s."},
    },
}


class Application:
    """The hub as an ASGI application. Its life is `hub.open_hub`'s, so it answers no lifespan messages."""

    def __init__(self, hub: Hub) -> None:
        self._generate = hub.generate
        self._control = control_plane(hub)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == GENERATE_PATH and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._control(scope, receive, send)  # type: ignore[arg-type]


def control_plane(hub: Hub) -> FastAPI:
    application = FastAPI(title="Headrace InferenceHub", description=DESCRIPTION)
    application.include_router(control.engine_routes(hub))
    application.include_router(control.weight_routes(hub))
    application.include_router(control.health_routes(hub))
    refusals.install(application)
    documentation = application.openapi()
    documentation["paths"] = {GENERATE_PATH: {"post": GENERATE_OPERATION}} | documentation["paths"]
    return application
