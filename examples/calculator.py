"""Arithmetic with a calculator tool.

Tasks are rows of a Parquet file with `question` and `answer`, such as reasoning_gym's. Register it while a run goes on:

    curl -X POST http://127.0.0.1:8801/environments -H 'Content-Type: application/json' -d '{
      "name": "calculator",
      "import_path": "examples.calculator:Calculator",
      "tasks": {"kind": "parquet", "path": "train.parquet"},
      "evaluation_tasks": {"kind": "parquet", "path": "test.parquet"},
      "limits": {"max_turns": 3, "max_tokens": 512}
    }'
"""

import ast
import operator
from fractions import Fraction

from services.env_agents.environment import Environment, Message, Task, ToolError, tool

MAX_EXPRESSION_CHARACTERS = 200
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Calculator(Environment):
    """One question; any number of tool calls; a number as the answer."""

    async def reset(self, task: Task) -> list[Message]:
        self.answer = str(task.data["answer"])
        return [
            {"role": "system", "content": "Use the tool, then answer with the number."},
            {"role": "user", "content": task.data["question"]},
        ]

    @tool
    async def calculate(self, expression: str) -> str:
        """Evaluates an arithmetic expression."""
        try:
            return str(evaluate(ast.parse(expression[:MAX_EXPRESSION_CHARACTERS], mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError) as error:
            raise ToolError("cannot evaluate") from error

    async def score(self, answer: str) -> float:
        """1 if the answer is the right number, and nothing else."""
        try:
            return float("e" not in answer.lower() and Fraction(answer.strip()) == Fraction(self.answer))
        except (ValueError, ZeroDivisionError):
            return 0.0


def evaluate(node: ast.expr) -> Fraction:
    """The value of an expression of numbers, + - * / and parentheses, exactly."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(str(value))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(operand))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
    raise ValueError("only numbers, + - * / and parentheses")
