"""TRL's GRPOTrainer on the given episodes: its own `train`, with a rollout function that has them already.

A round is one step of its training loop, from `on_step_begin` to `on_step_end`: padding, loss, gradients, optimizer.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.trainer import workload
from benchmarks.trainer.channel import Channel, peak_bytes, resident_bytes

NEVER = 10**6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="per_device_train_batch_size")
    parser.add_argument("--gradient-checkpointing", type=int, required=True)
    arguments = parser.parse_args()
    channel = Channel()

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    episodes = workload.tokens_of(arguments.episodes, len(tokenizer))
    config = GRPOConfig(
        output_dir=str(arguments.model.parent / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=arguments.rows,
        gradient_accumulation_steps=arguments.episodes // arguments.rows,
        gradient_checkpointing=bool(arguments.gradient_checkpointing),
        num_generations=workload.GROUP_SIZE,
        max_completion_length=workload.MAX_TOKENS,
        max_steps=NEVER,
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    before = resident_bytes()

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(episodes)
        completions = [episode[workload.PROMPT_TOKENS :] for episode in episodes]
        return {
            "prompt_ids": [episode[: workload.PROMPT_TOKENS] for episode in episodes],
            "completion_ids": completions,
            "logprobs": [[-9.0] * len(completion) for completion in completions],
        }

    class Rounds(TrainerCallback):  # type: ignore[misc] # transformers has no types here.
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not channel.asked():
                raise SystemExit
            self.started, self.cpu_started = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds, cpu_s = time.perf_counter() - self.started, time.process_time() - self.cpu_started
            channel.answer(seconds=seconds, cpu_s=cpu_s, peak=peak_bytes() - before)

    trainer = GRPOTrainer(
        model=str(arguments.model),
        reward_funcs=lambda completions, **_: workload.rewards(len(completions)),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": str(index)} for index in range(arguments.episodes)]),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[Rounds()],
    )
    channel.answer(tokens=sum(map(len, episodes)), implementation=trainer.model.config._attn_implementation)
    trainer.train()


if __name__ == "__main__":
    main()
