"""Changed weights through the real hub into a real SGLang engine: afterwards it samples what the trainer would."""

import subprocess
import sys
import threading

import httpx
import pytest
import torch

from shared.configuration import WeightPushSection
from trainer.hub_client import HubClient
from trainer.model import Policy
from trainer.weight_buckets import WeightSource
from trainer.weight_push import WeightPusher

PROMPT = list(range(20, 60))
TEMPERATURE = 0.7
TOLERANCE = 1e-4

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def hub_url(engine_url, tiny_model, redis_url, keys, tmp_path, free_port):
    """A hub of this test's own in front of the engine."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f"""
run: {{id: {keys.run_id}, directory: {tmp_path}, model_path: {tiny_model}}}
redis: {{url: "{redis_url}"}}
engines: {{urls: ["{engine_url}"], device: cpu, dtype: float32}}
inference_hub: {{port: {free_port}}}
trainer: {{num_updates: 1}}
"""
    )
    command = [sys.executable, "-m", "services.inference_hub", "--config", str(run_file)]
    url = f"http://127.0.0.1:{free_port}"
    with (tmp_path / "hub.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8), trust_env=False) as client:
            while client.get(f"{url}/health").status_code != 200:
                assert process.poll() is None, (tmp_path / "hub.log").read_text()
        yield url
        process.terminate()


def perturbed(policy, seed):
    """The same model some way off, as after many updates."""
    generator = torch.Generator().manual_seed(seed)
    for _, weight in policy.named_weights():
        weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


def generate(hub_url, *, max_new_tokens=40):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": TEMPERATURE, "ignore_eos": True},
        "return_logprob": True,
    }
    return httpx.post(f"{hub_url}/generate", json=body, timeout=60, trust_env=False).raise_for_status().json()["meta_info"]


def largest_difference(policy, meta_info):
    """Between the engine's log-probabilities and the policy's own of the same tokens."""
    engine = [item[0] for item in meta_info["output_token_logprobs"]]
    tokens = torch.tensor([PROMPT + [item[1] for item in meta_info["output_token_logprobs"]]])
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, len(PROMPT) :] = True
    with torch.no_grad():
        ours = policy(tokens, mask, torch.tensor([TEMPERATURE]))[0, len(PROMPT) :]
    return (ours - torch.tensor(engine)).abs().max().item()


def new_pusher(hub_url, **settings):
    return WeightPusher(
        HubClient(hub_url, timeout_s=60),
        WeightPushSection(backend="gloo", timeout_s=60, verify_every=1, **settings),
        dtype=torch.float32,
        device=torch.device("cpu"),
        patience_s=60,
        notice=print,
        can_check_values=True,
    )


def source_of(policy):
    return WeightSource.of(policy.named_weights())


@pytest.mark.parametrize("transport", ["broadcast", "disk", "tensor"])
def test_every_transport_ends_in_the_same_verified_weights(one_rank, hub_url, tiny_model, tmp_path, transport):
    from transformers import AutoModelForCausalLM

    policy = Policy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    perturbed(policy, seed=9)
    directory = str(tmp_path) if transport == "disk" else None
    pusher = new_pusher(hub_url, transport=transport, directory=directory, bucket_mib=1)
    pusher.push(source_of(policy), 7)
    meta_info = generate(hub_url)
    assert largest_difference(policy, meta_info) <= TOLERANCE
    assert [span["version"] for span in meta_info["weight_versions"]] == ["7"]
    metrics = httpx.get(f"{hub_url}/metrics", trust_env=False).text
    assert "headrace_hub_checksum_mismatches_total 0.0" in metrics
    assert 'headrace_hub_weight_update_seconds_count{step="verify"} 1.0' in metrics
    pusher.close()


def test_the_engine_serves_what_the_trainer_pushed(one_rank, hub_url, tiny_model):
    from transformers import AutoModelForCausalLM

    policy = Policy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    original = [(name, weight.clone()) for name, weight in policy.named_weights()]
    pusher = new_pusher(hub_url)
    pusher.push(source_of(policy), 0)
    assert largest_difference(policy, generate(hub_url)) <= TOLERANCE

    for version in (1, 2, 3):
        perturbed(policy, version)
        pusher.push(source_of(policy), version)
        meta_info = generate(hub_url)
        assert largest_difference(policy, meta_info) <= TOLERANCE
        assert [span["version"] for span in meta_info["weight_versions"]] == [str(version)]

    replies = []
    running = threading.Thread(target=lambda: replies.append(generate(hub_url, max_new_tokens=400)))
    running.start()
    while httpx.get(f"{hub_url}/status", trust_env=False).json()["calls"] == 0:
        pass
    pusher.push(WeightSource.of(original), 4)
    running.join()
    spans = [(span["version"], span["start"], span["end"]) for span in replies[0]["weight_versions"]]
    assert [version for version, _, _ in spans] in (["3", "4"], ["4"])
    assert spans[-1][2] == 400
    pusher.close()
