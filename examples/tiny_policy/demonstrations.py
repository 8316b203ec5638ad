"""Episodes of a scripted demonstrator in the real calculator environment, rendered token by token as the agents render theirs.

A careful demonstrator calls the tool with the question's expression and answers with the tool's result. A careless one slips:
the policy that learns from it knows how, and often does not. That is what reinforcement learning is left to mend.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final, Self

from renderers import Qwen3RendererConfig, create_renderer
from transformers import PreTrainedTokenizerFast

from examples.calculator import Calculator
from examples.tiny_policy.tasks import Question
from examples.tiny_policy.tokenizer import byte_tokenizer, train_tokenizer
from services.env_agents.environment import Action, RequestedCall, Task

RENDERER: Final = Qwen3RendererConfig(thinking_retention="all")
"""As in the demo's run file: `renderer: qwen3`, `renderer_options: {thinking_retention: all}`."""

TOOL: Final = "calculate"
MAX_VOCABULARY: Final = 1024
"""Never reached: the merges end when the constant text around the digits is used up, at about 620 entries."""
NUM_CORPUS_EPISODES: Final = 64
OTHER_OPERATOR: Final = str.maketrans("+-", "-+")


@dataclass(frozen=True)
class Slips:
    """Probabilities of the demonstrator's slips, each drawn by itself."""

    guesses: float
    """Answers at once with a wrong number instead of calling the tool."""
    swaps_operator: float
    misreads_digit: float
    """Calls the tool with one digit changed."""
    miscopies_result: float
    """Answers with one digit of the tool's result changed."""


CAREFUL: Final = Slips(guesses=0, swaps_operator=0, misreads_digit=0, miscopies_result=0)
CARELESS: Final = Slips(guesses=0.45, swaps_operator=0.2, misreads_digit=0.06, miscopies_result=0.06)
"""Two of five such episodes are right, and calling the tool stays the likeliest start. Slips at a single decision prevail: those in
copying digits are spread over so many contexts that reinforcement learning would need several times as many episodes."""


@dataclass(frozen=True)
class Demonstration:
    """T tokens, and for each whether the demonstrator chose it.

    Demonstration([1, 77, …, 2], [0, 0, …, 1])
    """

    token_ids: list[int]
    """[T]"""
    loss_mask: list[int]
    """[T] 1 on the assistant's tokens."""


class Demonstrator:
    """Plays questions with one tokenizer, while it is open as a context."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._renderer = create_renderer(tokenizer, RENDERER)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._runner.close()

    def episodes(self, questions: Iterable[Question], slips: Slips, random: Random) -> Iterator[Demonstration]:
        """One for each question, each played when it is asked for."""
        for question in questions:
            yield self._runner.run(self.play(question, slips, random))

    async def play(self, question: Question, slips: Slips, random: Random) -> Demonstration:
        """One episode."""
        environment = Calculator()
        messages = await environment.reset(Task("", 0, {"question": question.question, "answer": question.answer}))
        tools = environment.tool_specs()
        episode = Demonstration([], [])
        _append(episode, self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True), chosen=0)
        if random.random() < slips.guesses:
            _append(episode, self._turn(with_other_digit(question.answer, random)), chosen=1)
            return episode
        expression = _as_read(question.expression, slips, random)
        prompt = list(episode.token_ids)
        call = self._turn(call_text(expression))
        step = await environment.step(Action("", (RequestedCall(TOOL, {"expression": expression}),)))
        bridged = self._renderer.bridge_to_next_turn(prompt, call, list(step.messages), tools=tools)
        assert bridged is not None, "a tool result can always follow a finished call"
        _append(episode, call, chosen=1)
        _append(episode, bridged.token_ids[len(episode.token_ids) :], chosen=0)
        result = step.messages[0]["content"]
        is_miscopied = random.random() < slips.miscopies_result
        _append(episode, self._turn(with_other_digit(result, random) if is_miscopied else result), chosen=1)
        return episode

    def _turn(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        return token_ids


def tokenizer_for(questions: Iterator[Question]) -> PreTrainedTokenizerFast:
    """The tokenizer whose merges are learned from careful demonstrations of the first questions."""
    single_bytes = byte_tokenizer()
    with Demonstrator(single_bytes) as demonstrator:
        episodes = demonstrator.episodes(islice(questions, NUM_CORPUS_EPISODES), CAREFUL, Random(0))
        corpus = [single_bytes.decode(episode.token_ids) for episode in episodes]
    return train_tokenizer(corpus, vocabulary_size=MAX_VOCABULARY)


def call_text(expression: str) -> str:
    """The tool call as Qwen3 writes it."""
    call = {"name": TOOL, "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def with_other_digit(text: str, random: Random) -> str:
    """`text` with one of its digits changed to another one that is not 0, so that no number begins with 0."""
    position = random.choice([index for index, character in enumerate(text) if character.isdigit()])
    digit = random.choice([digit for digit in "123456789" if digit != text[position]])
    return text[:position] + digit + text[position + 1 :]


def _as_read(expression: str, slips: Slips, random: Random) -> str:
    if random.random() < slips.swaps_operator:
        expression = expression.translate(OTHER_OPERATOR)
    if random.random() < slips.misreads_digit:
        expression = with_other_digit(expression, random)
    return expression


def _append(episode: Demonstration, token_ids: list[int], *, chosen: int) -> None:
    episode.token_ids.extend(token_ids)
    episode.loss_mask.extend([chosen] * len(token_ids))
