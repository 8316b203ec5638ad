"""HTTP/1.1 messages of the benchmark, whole: the requests that callers send and the answers of the canned engine."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Token ids of a prompt and of its answer."""

    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens}/{self.output_tokens}"


def request_body(shape: Shape) -> bytes:
    return _json(
        {
            "input_ids": list(range(100_000, 100_000 + shape.prompt_tokens)),
            "sampling_params": {"max_new_tokens": shape.output_tokens, "temperature": 1.0},
            "return_logprob": True,
        }
    )


def request(port: int, shape: Shape, *, session: int) -> bytes:
    body = request_body(shape)
    return (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"X-Session-Id: episode-{session}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def answer_body(shape: Shape) -> bytes:
    """What SGLang 0.5.23 answers, in its form and order."""
    return _json(
        {
            "text": "x" * shape.output_tokens,
            "output_ids": [100_000 + index for index in range(shape.output_tokens)],
            "meta_info": {
                "id": "0" * 32,
                "finish_reason": {"type": "length", "length": shape.output_tokens},
                "prompt_tokens": shape.prompt_tokens,
                "weight_version": "0",
                "num_retractions": 0,
                "input_token_logprobs": [],
                "output_token_logprobs": [
                    [-1.2345678901234567 - index / 1000, 100_000 + index, None] for index in range(shape.output_tokens)
                ],
                "completion_tokens": shape.output_tokens,
                "cached_tokens": 0,
                "weight_versions": [{"version": "0", "start": 0, "end": shape.output_tokens}],
                "e2e_latency": 1.2345678901234567,
            },
        }
    )


CONTROL_ANSWERS: dict[str, Any] = {
    "/model_info": {"weight_version": "0", "model_path": "canned", "is_generation": True},
    "/server_info": {"version": "0.5.23", "tp_size": 1, "dp_size": 1, "disable_overlap_schedule": True},
    "/ready": {},
    "/v1/loads": {"loads": [{"max_running_requests": 16_384}]},
    "/v1/models": {"object": "list", "data": [{"id": "canned", "object": "model"}]},
}
CONTROL_ANSWERS |= {
    "/get_model_info": CONTROL_ANSWERS["/model_info"],
    "/get_server_info": CONTROL_ANSWERS["/server_info"],
}


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


VOCABULARY_ANSWER = answer(_json({"error": {"message": "token id out of vocabulary; valid range is [0, 151936)."}})).replace(
    b"200 OK", b"400 Bad Request", 1
)
"""SGLang's refusal by which the hub learns the vocabulary, here that of Qwen3."""


def control_answer(path: str) -> bytes:
    return answer(_json(CONTROL_ANSWERS.get(path, {})))
