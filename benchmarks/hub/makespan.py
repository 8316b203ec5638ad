"""How long multi-turn episodes take on simulated engines behind a router: all begin at once, as a batch of rollouts does."""

import asyncio
import json
import random
import time
from dataclasses import dataclass

import aiohttp

NUM_EPISODES = 1_024
MAX_TURNS = 24
MAX_NEW_TOKENS = 4_096
MAX_TOOL_S = 120.0


@dataclass(frozen=True)
class Turn:
    added_tokens: int
    """The first prompt, or what the tool answered."""
    output_tokens: int
    tool_s: float
    """Until the next turn, in virtual seconds."""


def episodes(number: int, *, seed: int) -> list[list[Turn]]:
    """Long-tailed: turns 2 + lognormal (mean about 6), answers lognormal (mean about 250 tokens, at most 4,096), tool answers about
    800 tokens after a first prompt of 2,000, tools of about 4 s and at most 120 s."""
    chance = random.Random(seed)

    def turn(index: int) -> Turn:
        return Turn(
            added_tokens=2_000 if index == 0 else 50 + round(min(8_000, chance.lognormvariate(6.2, 1.0))),
            output_tokens=16 + round(min(MAX_NEW_TOKENS - 16, chance.lognormvariate(5.0, 1.0))),
            tool_s=min(MAX_TOOL_S, chance.lognormvariate(0.5, 1.3)),
        )

    return [[turn(index) for index in range(min(MAX_TURNS, 2 + round(chance.lognormvariate(1.1, 0.8))))] for _ in range(number)]


@dataclass
class Played:
    """Virtual seconds until the last episode ended, and of all prompt tokens after first turns the share found in a cache."""

    makespan_s: float
    hit_rate: float
    mean_episode_s: float


def request_body(episode: int, prompt_tokens: int, output_tokens: int) -> bytes:
    """A prompt that begins with all earlier prompts of its episode, and ends with what tells the engine how long to answer."""
    ids = f"{episode}," * (prompt_tokens - 1) + str(output_tokens)
    sampling = json.dumps({"max_new_tokens": MAX_NEW_TOKENS})
    return f'{{"input_ids":[{ids}],"sampling_params":{sampling},"return_logprob":true}}'.encode()


async def play(port: int, plans: list[list[Turn]], *, speed: float) -> Played:
    """Raises: RuntimeError if a call fails."""
    known_tokens = cached_tokens = 0
    durations_s: list[float] = []
    ended: list[str] = []

    async def episode(session: aiohttp.ClientSession, index: int, turns: list[Turn]) -> None:
        nonlocal known_tokens, cached_tokens
        name = f"episode-{index}"
        headers = {"Content-Type": "application/json", "X-Session-Id": name, "X-SMG-Routing-Key": name}
        known = 0
        for turn in turns:
            prompt_tokens = known + turn.added_tokens
            body = request_body(index, prompt_tokens, turn.output_tokens)
            if ended:
                headers["X-Ended-Sessions"] = ",".join(ended)
                ended.clear()
            async with session.post(f"http://127.0.0.1:{port}/generate", data=body, headers=headers) as response:
                if response.status != 200:
                    raise RuntimeError(f"a call was answered {response.status}: {(await response.text())[:300]}")
                meta_info = (await response.json())["meta_info"]
            headers.pop("X-Ended-Sessions", None)
            known_tokens += known
            cached_tokens += min(known, meta_info["cached_tokens"])
            known = prompt_tokens + turn.output_tokens
            await asyncio.sleep(turn.tool_s / speed)
        ended.append(name)
        durations_s.append((time.perf_counter() - began) * speed)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        began = time.perf_counter()
        for index, turns in enumerate(plans):
            tasks.create_task(episode(session, index, turns))
    return Played(max(durations_s), cached_tokens / known_tokens, sum(durations_s) / len(durations_s))
