import asyncio
import math

import numpy as np
import pytest

from services.env_agents.rewards import DeclaredReward, FinishedEpisode, RewardError, RewardProblem, Scored, checked_score
from services.env_agents.tasks import Task
from shared.environment_spec import FunctionReward, RewardRetries
from shared.errors import EpisodeError

EPISODE = FinishedEpisode(Task("0", 0, {}), [], "42")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("services.env_agents.retries._FIRST_WAIT_S", 0.0)


class Scripted:
    """Answers in order; an error is raised, and "hang" hangs."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.num_tries = 0

    async def score(self, episode):
        self.num_tries += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if answer == "hang":
            await asyncio.Event().wait()
        return answer


def declared(source, **fields):
    return DeclaredReward(FunctionReward(import_path="a:b", **fields), source)


def problem(kind: RewardProblem) -> RewardError:
    return RewardError(kind, "for a reason")


@pytest.mark.parametrize(
    ("answer", "reward", "parts"),
    [
        (0.5, 0.5, {}),
        (True, 1.0, {}),
        (np.float32(0.25), 0.25, {}),
        ({"reward": 1}, 1.0, {}),
        ({"reward": 1, "parts": {"format": np.float64(0.5)}, "note": "more than asked for"}, 1.0, {"format": 0.5}),
        (Scored(2.0, {"a": 1}), 2.0, {"a": 1.0}),
    ],
)
def test_numbers_and_mappings_are_rewards(answer, reward, parts):
    assert checked_score(answer) == Scored(reward, parts)
    assert type(checked_score(answer).reward) is float


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "1",
        math.nan,
        math.inf,
        {},
        {"parts": {}},
        {"reward": None},
        {"reward": 1, "parts": [1]},
        {"reward": 1, "parts": {"a": "b"}},
    ],
)
def test_anything_else_is_unusable(answer):
    with pytest.raises(RewardError, match="a reward must be a finite number") as caught:
        checked_score(answer)
    assert caught.value.problem is RewardProblem.UNUSABLE


async def test_reward_and_parts_are_weighted_and_named():
    reward = declared(Scripted({"reward": 0.5, "parts": {"format": 1.0}}), part="quality", weight=2.0)
    assert await reward.score(EPISODE) == Scored(1.0, {"quality": 1.0, "quality.format": 2.0})


@pytest.mark.parametrize("kind", RewardProblem)
async def test_each_problem_has_retries_of_its_own(kind):
    failure = problem(kind)
    enough = Scripted(failure, failure, 1.0)
    retries = RewardRetries(**{other: 2 if other == kind else 0 for other in RewardProblem})
    assert (await declared(enough, retries=retries).score(EPISODE)).reward == 1.0
    too_often = Scripted(failure)
    with pytest.raises(EpisodeError, match=rf"the reward 'reward' failed, with retries\.{kind} = 2 used up: for a reason"):
        await declared(too_often, retries=retries).score(EPISODE)
    assert too_often.num_tries == 3


async def test_another_problem_does_not_borrow_retries():
    source = Scripted(problem(RewardProblem.UNREACHABLE), problem(RewardProblem.ERROR), 1.0)
    with pytest.raises(EpisodeError, match=r"retries\.error = 0 used up"):
        await declared(source, retries=RewardRetries(unreachable=5, error=0)).score(EPISODE)


async def test_answer_that_is_no_reward_is_asked_for_again():
    assert (await declared(Scripted("nonsense", 1.0)).score(EPISODE)).reward == 1.0


async def test_each_try_has_a_deadline():
    source = Scripted("hang", 1.0)
    assert (await declared(source, timeout_s=0.01).score(EPISODE)).reward == 1.0
    with pytest.raises(EpisodeError, match=r"retries\.timeout = 0 used up: no answer within 0\.01 s"):
        await declared(Scripted("hang"), timeout_s=0.01, retries=RewardRetries(timeout=0)).score(EPISODE)
