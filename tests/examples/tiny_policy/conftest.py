"""The tiny policy's tokenizer and demonstrator, made once for the session."""

from collections.abc import Iterator
from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from examples.tiny_policy.demonstrations import CAREFUL, Demonstration, Demonstrator, tokenizer_for
from examples.tiny_policy.tasks import Question, Side, questions


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_for(questions(Side.TRAIN, seed=0))


@pytest.fixture(scope="session")
def demonstrator(tokenizer: PreTrainedTokenizerFast) -> Iterator[Demonstrator]:
    with Demonstrator(tokenizer) as demonstrator:
        yield demonstrator


@pytest.fixture
def question() -> Question:
    return Question("12 + 34 =", "46", "12 + 34", "chain_sum", 0)


@pytest.fixture
def careful(demonstrator: Demonstrator) -> Iterator[Demonstration]:
    """Careful demonstrations without end."""
    return demonstrator.episodes(questions(Side.TRAIN, seed=0), CAREFUL, Random(0))
