"""Two ranks, one of which has a row that is not finite in its share. Each writes what it saw to rank<n>.json.

deepspeed poisoned_ranks.py MODEL_PATH DIRECTORY
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch

from tests.trainer.learning import batch, end_rank, learn, plan, section
from tests.trainer.test_guards import is_same, poisoned, state
from trainer import ranks
from trainer.model import start_ranks


def main(model_path: str, directory: str) -> None:
    torch.set_num_threads(1)
    start_ranks(timeout=timedelta(seconds=100))
    rows = batch()
    _, _, learner = learn(Path(model_path), section(learning_rate=1e-3), max_tokens=70)
    before = state(learner)
    learned = learner.learn(plan(rows, num_ranks=2, max_tokens=70, version=1), poisoned(rows, "e3"))
    is_unchanged = is_same(state(learner), before)
    again = learner.learn(plan(rows, num_ranks=2, max_tokens=70, version=1), rows)
    seen = {
        "entry_ids": list(learned.skipped.entry_ids),
        "is_unchanged": is_unchanged,
        "learns_again": again.skipped is None and not is_same(state(learner), before),
    }
    (Path(directory) / f"rank{ranks.rank()}.json").write_text(json.dumps(seen))
    end_rank()


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")])
