"""The whole recipe in order: tasks, tokenizer, model, warm start, and what came out."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from transformers.utils.logging import disable_progress_bar

from examples.tiny_policy.demonstrations import CAREFUL, CARELESS, Demonstration, Demonstrator, Slips, tokenizer_for
from examples.tiny_policy.model import new_policy
from examples.tiny_policy.tasks import Side, questions, write_task_files
from examples.tiny_policy.warm_start import CARELESS_STEPS, CLEAN_MAX_STEPS, Fit, Observer, learn_careless, learn_clean, measure

DEMONSTRATION_STREAM: Final = 1
"""Of questions; the task files come from stream 0."""
NUM_THREADS: Final = 1
"""Fixed, because sums in another order would make another policy of the same seed. One, because two bring little on tensors this
small, and wait for each other at every operation when something else wants a core."""
NUM_MEASURED: Final = 256
LINE_EVERY_STEPS: Final = 25


def make(directory: Path, *, seed: int, num_train: int, num_held_out: int) -> None:
    """Writes the policy, its tokenizer, its tasks and recipe.json into `directory`."""
    started = time.monotonic()
    torch.set_num_threads(NUM_THREADS)
    disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    write_task_files(directory, num_train=num_train, num_held_out=num_held_out, seed=seed)
    tokenizer = tokenizer_for(questions(Side.TRAIN, seed=0))
    tokenizer.save_pretrained(directory)
    policy = new_policy(tokenizer, seed=seed)

    console = Console(highlight=False, soft_wrap=True)
    with Demonstrator(tokenizer) as demonstrator, _progress(console) as observe:

        def play(side: Side, slips: Slips) -> Iterator[Demonstration]:
            return demonstrator.episodes(questions(side, seed=seed, stream=DEMONSTRATION_STREAM), slips, Random(seed))

        unseen = list(islice(play(Side.HELD_OUT, CAREFUL), NUM_MEASURED))
        learn_clean(policy, play(Side.TRAIN, CAREFUL), observe)
        mastered = measure(policy, unseen)
        learn_careless(policy, play(Side.TRAIN, CARELESS), observe)
    policy.save_pretrained(directory)
    fit = measure(policy, unseen)
    summary = {
        "seed": seed,
        "num_parameters": policy.num_parameters(),
        "vocabulary_size": len(tokenizer),
        "tokens_per_episode": sum(len(episode.token_ids) for episode in unseen) / len(unseen),
        "sampled_tokens_per_episode": sum(sum(episode.loss_mask) for episode in unseen) / len(unseen),
        "unseen_after_careful": asdict(mastered),
        "unseen": asdict(fit),
        "seconds": time.monotonic() - started,
    }
    (directory / "recipe.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(
        f"{policy.num_parameters():,} parameters in {directory} after {summary['seconds']:.0f} s: "
        f"success on unseen tasks {fit.sampled:.2f} sampled, {fit.greedy:.2f} greedy"
    )


@contextmanager
def _progress(console: Console) -> Iterator[Observer]:
    """A bar on a terminal, a line now and then elsewhere."""
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[detail]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {
            "careful": progress.add_task("careful demonstrations", total=CLEAN_MAX_STEPS, detail=""),
            "careless": progress.add_task("careless demonstrations", total=CARELESS_STEPS, detail=""),
        }

        def observe(stage: str, step: int, fit: Fit) -> None:
            detail = f"loss {fit.loss:.3f}, greedy success {fit.greedy:.2f}"
            progress.update(bars[stage], completed=step + 1, detail=detail)
            if not console.is_terminal and (step + 1) % LINE_EVERY_STEPS == 0:
                console.print(f"{stage} demonstrations, step {step + 1}: {detail}")

        yield observe
