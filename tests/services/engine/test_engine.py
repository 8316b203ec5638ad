"""What the rest relies on in a real engine that `services.engine` started."""

import httpx
import pytest
import torch
from transformers import Qwen3ForCausalLM

pytestmark = pytest.mark.engine

PROMPT = list(range(40, 90))
TEMPERATURE = 0.8


def test_logprobs_are_those_of_hugging_faces_forward(initial_engine_url, tiny_model):
    sampling = {"max_new_tokens": 40, "temperature": TEMPERATURE, "ignore_eos": True}
    request = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    answer = httpx.post(f"{initial_engine_url}/generate", json=request, timeout=60).raise_for_status().json()
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 40}]
    engine_logprobs = torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]])
    policy = Qwen3ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([PROMPT + answer["output_ids"]])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
    torch.testing.assert_close(engine_logprobs, logprobs, atol=1e-5, rtol=0)
