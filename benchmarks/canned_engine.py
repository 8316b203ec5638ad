"""An engine that answers every generate call at once with the same 256 tokens: what is left to measure is the hub.

Served by `uvicorn benchmarks.canned_engine:application`.
"""

import json
from typing import Any

OUTPUT_TOKENS = 256

_META_INFO = {
    "id": "0" * 32,
    "finish_reason": {"type": "length", "length": OUTPUT_TOKENS},
    "prompt_tokens": 512,
    "weight_version": "0",
    "completion_tokens": OUTPUT_TOKENS,
    "cached_tokens": 0,
    "input_token_logprobs": [],
    "output_token_logprobs": [[-1.2345678901234567 - index / 1000, 1000 + index, None] for index in range(OUTPUT_TOKENS)],
    "weight_versions": [{"version": "0", "start": 0, "end": OUTPUT_TOKENS}],
    "e2e_latency": 1.2345678901234567,
}

BODIES = {
    "/generate": {
        "text": "x" * OUTPUT_TOKENS,
        "output_ids": [1000 + index for index in range(OUTPUT_TOKENS)],
        "meta_info": _META_INFO,
    },
    "/model_info": {"weight_version": "0"},
    "/server_info": {"version": "0.5.23", "tp_size": 1, "dp_size": 1},
    "/ready": {},
}
_ENCODED = {path: json.dumps(body, separators=(",", ":")).encode() for path, body in BODIES.items()}


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    body = _ENCODED.get(scope["path"], b"{}")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
