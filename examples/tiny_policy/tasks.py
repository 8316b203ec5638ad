"""Arithmetic questions of reasoning_gym's chain_sum, in two sides that share no operands.

A question lies on the side that its operands say, whatever their order and operator: 12 + 34, 34 + 12 and 34 - 12 are all for
training or all held out. Demonstrations and training draw from one side, evaluation from the other.
"""

import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Final

import pyarrow
import pyarrow.parquet
import reasoning_gym

MIN_DIGITS: Final = 2
MAX_DIGITS: Final = 3
HELD_OUT_SHARE: Final = 1 / 8
SEED_SPACING: Final = 100_000_000
"""chain_sum draws question i from seed + i, so streams of neighbouring seeds would repeat each other."""


class Side(StrEnum):
    TRAIN = "train"
    HELD_OUT = "heldout"


@dataclass(frozen=True)
class Question:
    """One row of a task file.

    Question("State the final answer to the following arithmetic problem: 12 + 34 =", "46", "12 + 34", "chain_sum", 7)
    """

    question: str
    """What the policy reads."""
    answer: str
    expression: str
    """What a correct tool call evaluates."""
    source_dataset: str
    source_index: int


def side_of(expression: str) -> Side:
    """The side that the expression's operands belong to, by a hash that does not depend on their order or on a seed."""
    operands = sorted(re.findall(r"\d+", expression))
    fraction = int.from_bytes(hashlib.sha256(" ".join(operands).encode()).digest()[:4]) / 2**32
    return Side.HELD_OUT if fraction < HELD_OUT_SHARE else Side.TRAIN


def questions(side: Side, *, seed: int, stream: int = 0) -> Iterator[Question]:
    """Endless questions of one side; a run's streams differ by `stream`, 0 or 1."""
    dataset = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=2,
        max_terms=2,
        min_digits=MIN_DIGITS,
        max_digits=MAX_DIGITS,
        seed=(2 * seed + stream) * SEED_SPACING,
        size=SEED_SPACING,
    )
    for index in count():
        entry = dataset[index]
        expression = entry["metadata"]["expression"]
        if side_of(expression) is side:
            yield Question(entry["question"], entry["answer"], expression, entry["metadata"]["source_dataset"], index)


def distinct_questions(side: Side, number: int, *, seed: int) -> list[Question]:
    """The first `number` questions of a side that differ from each other."""
    by_expression: dict[str, Question] = {}
    for question in questions(side, seed=seed):
        by_expression.setdefault(question.expression, question)
        if len(by_expression) == number:
            break
    return list(by_expression.values())


def write_task_files(directory: Path, *, num_train: int, num_held_out: int, seed: int) -> None:
    """Writes `train.parquet` and `heldout.parquet`. Raises: ValueError if they share operands, which the split rules out."""
    train = distinct_questions(Side.TRAIN, num_train, seed=seed)
    held_out = distinct_questions(Side.HELD_OUT, num_held_out, seed=seed)
    if shared := operands_of(train) & operands_of(held_out):
        raise ValueError(f"training and held-out questions must share no operands, got {min(shared)} in both")
    for side, rows in ((Side.TRAIN, train), (Side.HELD_OUT, held_out)):
        table = pyarrow.Table.from_pylist([asdict(row) for row in rows])
        pyarrow.parquet.write_table(table, directory / f"{side}.parquet")


def operands_of(rows: Collection[Question]) -> set[tuple[int, ...]]:
    """The operands of each question, in ascending order."""
    return {tuple(sorted(int(operand) for operand in re.findall(r"\d+", row.expression))) for row in rows}
