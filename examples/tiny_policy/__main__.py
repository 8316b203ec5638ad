"""`python -m examples.tiny_policy`: makes the demo's policy and its tasks."""

import argparse
import os
import sys
from pathlib import Path

EXAMPLES = """examples:
  python -m examples.tiny_policy --output runs/demo/policy
  python -m examples.tiny_policy --output runs/policy-1 --seed 1

The directory then holds a Hugging Face model with its tokenizer, train.parquet, heldout.parquet and recipe.json, which says how
well the policy does on the held-out tasks. The same seed makes the same policy on the same machine.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_policy",
        description="Makes a half-million-parameter policy that half knows how to use a calculator, and its tasks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="the directory to write, made if it does not exist")
    parser.add_argument("--seed", type=int, default=0, help="of weights, tasks and demonstrations (default: %(default)s)")
    parser.add_argument("--train-tasks", type=int, default=4096, help="rows of train.parquet (default: %(default)s)")
    parser.add_argument("--heldout-tasks", type=int, default=512, help="rows of heldout.parquet (default: %(default)s)")
    options = parser.parse_args()

    # OpenMP reads it when torch is imported. Threads that spin while they wait for each other are many times slower when
    # anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from examples.tiny_policy.recipe import make

    make(options.output, seed=options.seed, num_train=options.train_tasks, num_held_out=options.heldout_tasks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
