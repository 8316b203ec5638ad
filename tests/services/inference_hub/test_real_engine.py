"""The hub in front of a real SGLang engine, with the trainer's own weight push over gloo."""

import asyncio
import uuid
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from shared.configuration import WeightPushSection
from shared.errors import WeightUpdateError
from trainer.hub_client import HubClient
from trainer.weight_buckets import WeightSource, stream
from trainer.weight_channels import layout
from trainer.weight_push import WeightPusher
from trainer.weight_transport import WeightGroup, listen

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TIMEOUT_S = 60.0


@pytest.fixture
def model(tiny_model: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def pusher_of(served, mode: str = "in_place") -> WeightPusher:
    return WeightPusher(
        HubClient(served.url, timeout_s=TIMEOUT_S),
        WeightPushSection(backend="gloo", timeout_s=TIMEOUT_S, mode=mode),
        dtype=torch.float32,
        device=torch.device("cpu"),
        patience_s=TIMEOUT_S,
        notice=print,
    )


def detached(model: Qwen3ForCausalLM) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def changed(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Another policy: the same architecture with weights moved far enough that log-probabilities differ by tenths."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def logprobs(model: Qwen3ForCausalLM, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[T] log-probability of each output token."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]


def behaviour(answer: dict) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def request(prompt: list[int], length: int, *, temperature: float = 1.0) -> dict:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": length, "temperature": temperature, "ignore_eos": True}}


async def sampling(served, engine_url: str, num_tokens: int) -> None:
    """Returns when the requests that the engine runs have `num_tokens` tokens or more, prompts included."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with served.http.get(f"{engine_url}/v1/loads") as response:
                [load] = (await response.json())["loads"]
            if load["num_running_reqs"] and load["num_used_tokens"] >= num_tokens:
                return


async def synced(served, model: Qwen3ForCausalLM, mode: str = "in_place") -> WeightPusher:
    """Pushes the model as version 0, as a trainer does when it starts: earlier tests left the engine with other weights."""
    await served.wait_until(lambda: bool(served.hub.registry.live), description="the engine is alive")
    pusher = pusher_of(served, mode)
    await asyncio.to_thread(pusher.push, WeightSource.of(detached(model)), 0)
    return pusher


async def push(pusher: WeightPusher, model: Qwen3ForCausalLM, version: int) -> None:
    await asyncio.to_thread(pusher.push, WeightSource.of(detached(model)), version)


async def test_an_answer_has_the_policys_logprobs(serve_hub, engine_url, model):
    async with serve_hub(engine_url) as served:
        pusher = await synced(served, model)
        status, answer = await served.generate(PROMPT, 32)
        pusher.close()
    assert status == 200
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": len(answer["output_ids"])}]
    torch.testing.assert_close(behaviour(answer), logprobs(model, PROMPT, answer["output_ids"]), atol=1e-4, rtol=0)


async def test_an_engine_says_what_it_can_run(serve_hub, engine_url):
    async with serve_hub(engine_url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.live), description="the engine is alive")
        _, [usage] = await served.get("/usage")
    assert usage["max_running_calls"] >= 1
    assert usage["max_tokens"] >= 1


async def test_an_aborted_request_is_joined_as_if_it_had_never_stopped(serve_hub, engine_url, model):
    async with serve_hub(engine_url) as served:
        pusher = await synced(served, model)
        _, expected = await served.post("/generate", request(PROMPT, 400, temperature=0.0))
        call = asyncio.create_task(served.post("/generate", request(PROMPT, 400, temperature=0.0)))
        (engine,) = served.hub.registry.routable
        for num_tokens in (40, 80):
            await sampling(served, engine_url, num_tokens)
            await engine.client.post("abort_request", {"rid": "", "abort_all": True}, timeout_s=TIMEOUT_S)
        status, answer = await call
        num_resumed_tokens = served.hub.metrics.collectors.get_sample_value("headrace_hub_resumed_tokens_total")
        pusher.close()
    assert status == 200
    assert num_resumed_tokens > 0
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 400}]
    torch.testing.assert_close(behaviour(answer), behaviour(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_update_in_flight_is_exact_to_the_token(serve_hub, engine_url, model, tiny_model, mode):
    async with serve_hub(engine_url) as served:
        pusher = await synced(served, model, mode)
        new = changed(Qwen3ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
        calls = [asyncio.create_task(served.post("/generate", request([20 + i, *PROMPT], 400))) for i in range(4)]
        await sampling(served, engine_url, 4 * 20)
        await push(pusher, new, 1)
        answers = [answer for _, answer in await asyncio.gather(*calls)]
        after = (await served.generate(PROMPT, 16))[1]
        pusher.close()
    torch.testing.assert_close(behaviour(after), logprobs(new, PROMPT, after["output_ids"]), atol=1e-4, rtol=0)
    for i, answer in enumerate(answers):
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"]
        boundary = spans[0]["end"]
        old = logprobs(model, [20 + i, *PROMPT], answer["output_ids"])
        difference = (behaviour(answer) - old).abs()
        assert difference[:boundary].max() <= 1e-4
        assert difference[boundary] > 1e-4


@pytest.mark.parametrize("stopped", ["scheduler", "whole"])
async def test_a_call_in_an_engine_that_hangs_is_answered_when_one_works_again(
    serve_hub, initial_engine_url, engine_process, stopped
):
    """Stopped, the scheduler alone leaves an engine whose HTTP process still answers every probe."""
    processes = [psutil.Process(engine_process.pid), *psutil.Process(engine_process.pid).children(recursive=True)]
    if stopped == "scheduler":
        processes = [process for process in processes if "scheduler" in " ".join(process.cmdline())]
        assert len(processes) == 1
    async with serve_hub(initial_engine_url, hang_timeout_s=5.0, probe_interval_s=0.2) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        _, expected = await served.post("/generate", request(PROMPT, 400, temperature=0.0))
        call = asyncio.create_task(served.post("/generate", request(PROMPT, 400, temperature=0.0)))
        await sampling(served, initial_engine_url, 40)
        try:
            for process in processes:
                process.suspend()
            await served.wait_until(lambda: not served.hub.registry.live, description="the engine is taken out")
            (listed,) = (await served.get("/engines"))[1]
            assert not call.done()
        finally:
            for process in processes:
                process.resume()
        status, answer = await call
    assert "must make progress within 5 s while it has calls (inference_hub.hang_timeout_s)" in listed["problem"]
    assert (status, answer["output_ids"]) == (200, expected["output_ids"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [5, 10**9]}, "below"),
        ({"input_ids": [5] * 3_000}, "input_ids must hold at most 2042 tokens"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 5_000}}, "must together be at most 2048 tokens"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"warmth": 1}}, "warmth"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
    ],
)
async def test_a_bad_request_is_refused_with_a_sentence_and_disturbs_nobody(serve_hub, initial_engine_url, body, words):
    async with serve_hub(initial_engine_url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        (engine,) = served.hub.registry.routable
        other = asyncio.create_task(served.post("/generate", request(PROMPT, 200)))
        await served.wait_until(lambda: engine.num_outstanding_calls == 1, description="the engine has the other call")
        status, refusal = await served.post("/generate", body)
        assert 400 <= status < 500
        assert words in str(refusal)
        assert (await other)[0] == 200
        assert served.hub.registry.routable


async def test_a_trainer_that_dies_in_a_broadcast_is_survived(serve_hub, engine_url, model):
    async with serve_hub(engine_url) as served:
        (await synced(served, model)).close()
        hub = HubClient(served.url, timeout_s=TIMEOUT_S)
        timeout = timedelta(seconds=TIMEOUT_S)
        store = listen("127.0.0.1", timeout=timeout)
        reply = await asyncio.to_thread(
            hub.form_group, epoch=uuid.uuid4().hex, master_address="127.0.0.1", master_port=store.port, backend="gloo"
        )
        group = await asyncio.to_thread(
            WeightGroup, store, name=reply.group_name, world_size=reply.world_size, backend="gloo", timeout=timeout
        )
        await asyncio.to_thread(hub.wait_group_ready, group.name)
        update_id = await asyncio.to_thread(hub.begin_update, group_name=group.name, version=1, mode="in_place")
        held = asyncio.create_task(served.generate(PROMPT, 8))
        source = WeightSource.of(detached(model))
        [bucket] = stream(source, dtype=torch.float32, bucket_bytes=2**30, device=torch.device("cpu"))
        group.close()
        del store
        with pytest.raises(WeightUpdateError, match=engine_url):
            await asyncio.to_thread(hub.load_last_bucket, update_id, layout(bucket), None)
        assert not served.hub.registry.routable
        pusher = pusher_of(served)
        await push(pusher, model, 1)
        pusher.close()
        hub.close()
        status, answer = await held
    assert status == 200
    assert answer["meta_info"]["weight_versions"][0]["version"] == "1"


async def test_an_engine_of_ours_tells_the_time_to_first_token(serve_hub, initial_engine_url):
    async with serve_hub(initial_engine_url) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="the engine is ready")
        (engine,) = served.hub.registry.routable
        await served.post("/generate", request(PROMPT, 50), headers={"X-Environment": "calculator"})
        labels = {"engine": engine.id, "environment": "calculator"}
        first_s, all_s = (
            served.hub.metrics.collectors.get_sample_value(f"headrace_hub_{name}_seconds_sum", labels)
            for name in ("first_token", "engine")
        )
    assert 0 < first_s < all_s
