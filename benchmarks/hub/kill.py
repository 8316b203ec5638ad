"""One of two real SGLang engines is killed with generations in flight: every answer has to be right, and soon under way again."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

NUM_CALLS = 32
OUTPUT_TOKENS = 384
BEFORE_KILL_TOKENS = 16
"""Sampled on average for each call of the engine when it is killed."""
DEADLINE_S = 300.0
POLL_S = 0.01


@dataclass(frozen=True)
class Killed:
    num_wrong: int
    num_interrupted: int
    resume_s: float
    """From the kill until the other engine had every call that was not answered yet."""


def new_model(directory: Path) -> None:
    """The demo's tiny policy with random weights."""
    from examples.tiny_policy.demonstrations import tokenizer_for
    from examples.tiny_policy.model import new_policy
    from examples.tiny_policy.tasks import Side, questions

    tokenizer = tokenizer_for(questions(Side.TRAIN, seed=0))
    tokenizer.save_pretrained(directory)
    new_policy(tokenizer, seed=0).save_pretrained(directory)


async def kill_one(hub_port: int, engine_ports: list[int], kill: Any) -> Killed:
    """`kill` ends the first of two engines at once. Greedy answers are compared with what the second one gives by itself."""
    survivor = engine_ports[1]
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        expected = await asyncio.gather(*(generate(session, survivor, index) for index in range(NUM_CALLS)))
        calls = [asyncio.create_task(generate(session, hub_port, index)) for index in range(NUM_CALLS)]
        num_tokens = 0
        while num_tokens < BEFORE_KILL_TOKENS * NUM_CALLS // 2:
            load = await load_of(session, engine_ports[0])
            num_tokens = load["num_used_tokens"] if load["num_running_reqs"] else 0
            await asyncio.sleep(POLL_S)
        num_interrupted = load["num_running_reqs"] + load["num_waiting_reqs"]
        kill()
        began = time.perf_counter()
        while True:
            load = await load_of(session, survivor)
            unanswered = sum(not call.done() for call in calls)
            if load["num_running_reqs"] + load["num_waiting_reqs"] >= unanswered:
                break
            await asyncio.sleep(POLL_S)
        resume_s = time.perf_counter() - began
        answers = await asyncio.gather(*calls, return_exceptions=True)
    wrong = sum(answer != right for answer, right in zip(answers, expected, strict=True))
    return Killed(wrong, num_interrupted, resume_s)


async def generate(session: aiohttp.ClientSession, port: int, index: int) -> list[int]:
    """Raises: RuntimeError if the answer is an error."""
    sampling = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": [5 + index, *range(6, 14)], "sampling_params": sampling, "return_logprob": True}
    async with session.post(f"http://127.0.0.1:{port}/generate", json=body) as response:
        answer = await response.json()
        if response.status != 200 or len(answer["meta_info"]["output_token_logprobs"]) != OUTPUT_TOKENS:
            raise RuntimeError(f"a call was answered {response.status}: {str(answer)[:300]}")
        return answer["output_ids"]


async def load_of(session: aiohttp.ClientSession, port: int) -> dict[str, int]:
    async with session.get(f"http://127.0.0.1:{port}/v1/loads") as response:
        return (await response.json())["loads"][0]
