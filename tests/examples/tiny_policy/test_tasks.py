from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.calculator import Calculator
from examples.tiny_policy.tasks import HELD_OUT_SHARE, Side, distinct_questions, operands_of, questions, side_of, write_task_files
from services.env_agents.datasets import TaskOpener
from services.env_agents.tasks import Task
from shared.environment_spec import ParquetTasks

OPERANDS = st.integers(0, 999)


@given(OPERANDS, OPERANDS)
def test_side_depends_neither_on_order_nor_on_operator(a, b):
    assert len({side_of(f"{a} + {b}"), side_of(f"{b} + {a}"), side_of(f"{a} - {b}"), side_of(f"{b} - {a}")}) == 1


def test_an_eighth_of_the_operands_is_held_out():
    sides = [side_of(f"{a} + {b}") for a in range(100, 200) for b in range(a, 200)]
    assert sides.count(Side.HELD_OUT) / len(sides) == pytest.approx(HELD_OUT_SHARE, abs=0.02)


def test_both_sides_share_no_operands():
    train, held_out = (operands_of(list(islice(questions(side, seed=0), 500))) for side in (Side.TRAIN, Side.HELD_OUT))
    assert not train & held_out


def test_distinct_questions_do_not_repeat():
    expressions = [question.expression for question in distinct_questions(Side.TRAIN, 2000, seed=0)]
    assert len(set(expressions)) == 2000


def test_questions_are_the_same_for_the_same_seed_and_stream():
    def first(seed, stream):
        return [question.expression for question in islice(questions(Side.TRAIN, seed=seed, stream=stream), 50)]

    assert first(0, 0) == first(0, 0)
    others = [first(0, 0), first(0, 1), first(1, 0), first(1, 1)]
    assert all(not set(one) & set(other) for one in others for other in others if one is not other)


async def test_the_calculator_accepts_the_answer_of_every_row(tmp_path):
    write_task_files(tmp_path, num_train=30, num_held_out=20, seed=3)
    for side, count in ((Side.TRAIN, 30), (Side.HELD_OUT, 20)):
        tasks = ParquetTasks(path=str(tmp_path / f"{side}.parquet"))
        source = TaskOpener(lambda messages, tools: [], seed=0).open(tasks, [], needs_prompts=False)
        assert source.count == count
        for task in (source.task(index) for index in range(count)):
            await assert_scores_1(task)


async def assert_scores_1(task: Task):
    calculator = Calculator()
    messages = await calculator.reset(task)
    assert messages[-1]["content"] == task.data["question"]
    assert await calculator.score(await calculator.calculate(task.data["expression"])) == 1
