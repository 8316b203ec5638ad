import pytest

from examples.calculator import Calculator
from services.env_agents.environment import Action, Task


@pytest.fixture
async def calculator():
    calculator = Calculator()
    await calculator.reset(Task("0", 0, {"question": "What is 1/2 + 2?", "answer": "2.5"}))
    return calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [("12 + 34", "46"), ("-(3 - 10) * 2", "14"), ("1 / 3", "1/3"), ("0.1 + 0.2", "3/10"), ("9" * 50 + "+1", "1" + "0" * 50)],
)
async def test_expressions_are_evaluated_exactly(calculator, call, expression, result):
    step = await calculator.step(call("calculate", expression=expression))
    assert [message["content"] for message in step.messages] == [result]


@pytest.mark.parametrize(
    "expression", ["", "1 +", "x", "__import__('os')", "2 ** 999", "1 / 0", "True", "'a' * 9", "(" * 300, "\0"]
)
async def test_anything_else_is_an_error_that_the_policy_reads(calculator, call, expression):
    step = await calculator.step(call("calculate", expression=expression))
    assert step.messages[0]["content"] == "error: cannot evaluate"


@pytest.mark.parametrize(
    ("answer", "reward"), [("2.5", 1.0), (" 5/2\n", 1.0), ("2.50", 1.0), ("3", 0.0), ("it is 2.5", 0.0), ("", 0.0), ("1/0", 0.0)]
)
async def test_only_the_right_number_is_rewarded(calculator, answer, reward):
    step = await calculator.step(Action(answer))
    assert (step.done, step.reward) == (True, reward)


async def test_reasoning_gyms_own_answers_are_right():
    import reasoning_gym

    for item in reasoning_gym.create_dataset("chain_sum", size=20, seed=1, min_terms=2, max_terms=4):
        calculator = Calculator()
        await calculator.reset(Task("0", 0, {"question": item["question"], "answer": item["answer"]}))
        assert await calculator.score(item["answer"]) == 1.0
