"""Our update on the given episodes, from a Redis whose stream holds them to weights, published and acknowledged.

A round is one update as `TrainingLoop` makes it, but for the push of weights: batch from the stream, plan, fetch, learn, publish.
Overhead is what of it is spent outside of DeepSpeed's forward, backward and step.
"""

import argparse
import asyncio
from pathlib import Path

from benchmarks.trainer.channel import Channel, peak_bytes, resident_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="ppo_max_token_len_per_gpu")
    parser.add_argument("--gradient-checkpointing", type=int, required=True)
    parser.add_argument("--redis", required=True)
    arguments = parser.parse_args()
    channel = Channel()

    import torch

    import benchmarks.trainer.update as update

    torch.set_num_threads(1)
    before = resident_bytes()
    subject = update.Update(
        arguments.model,
        redis_url=arguments.redis,
        num_episodes=arguments.episodes,
        max_tokens=arguments.tokens,
        gradient_checkpointing=bool(arguments.gradient_checkpointing),
    )
    channel.answer(tokens=subject.num_tokens)
    while channel.asked():
        asyncio.run(subject.fill_the_stream())
        timed = subject.run()
        channel.answer(**timed, peak=peak_bytes() - before)


if __name__ == "__main__":
    main()
