"""Rewards for answers that can be checked against a ground truth; `reward.import_path` may name them in every run."""

import re
from fractions import Fraction

from services.env_agents.rewards import FinishedEpisode
from services.env_agents.tools import as_text

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MAX_NUMBER_CHARACTERS = 100


def exact_match(episode: FinishedEpisode, *, ignore_case: bool = False) -> float:
    """1 if the answer is the ground truth, but for space around it."""
    answer, truth = episode.answer.strip(), as_text(episode.task.answer).strip()
    return float(answer.casefold() == truth.casefold() if ignore_case else answer == truth)


def same_number(episode: FinishedEpisode) -> float:
    """1 if the last number in the answer equals the last number in the ground truth, as in GSM8K's `#### 1,234`."""
    answer, truth = _last_number(episode.answer), _last_number(as_text(episode.task.answer))
    if truth is None:
        raise ValueError(f"the ground truth must have a number, got {episode.task.answer!r:.100}; correct tasks.columns.answer")
    return float(answer == truth)


def boxed_match(episode: FinishedEpisode) -> float:
    r"""1 if what the answer has in its last `\boxed{…}` is the ground truth, but for space."""
    return float(_without_space(_last_boxed(episode.answer)) == _without_space(as_text(episode.task.answer)))


def _last_number(text: str) -> Fraction | None:
    found = _NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")[:_MAX_NUMBER_CHARACTERS]) if found else None


def _last_boxed(text: str) -> str:
    """The content of the last `\\boxed{…}`, with the braces in it balanced; "" if there is none that ends."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for position, character in enumerate(rest if found else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:position]
    return ""


def _without_space(text: str) -> str:
    return "".join(text.split())
