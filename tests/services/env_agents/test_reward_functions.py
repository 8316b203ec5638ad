import pytest

from services.env_agents.reward_functions import boxed_match, exact_match, same_number
from services.env_agents.rewards import FinishedEpisode
from services.env_agents.tasks import Task


def episode(answer, truth) -> FinishedEpisode:
    return FinishedEpisode(Task("0", 0, {}, (), truth), [], answer)


@pytest.mark.parametrize(
    ("function", "answer", "truth", "reward"),
    [
        (exact_match, " Paris\n", "Paris", 1.0),
        (exact_match, "paris", "Paris", 0.0),
        (exact_match, "3", 3, 1.0),
        (same_number, "6 * 7 = 42.", "#### 42", 1.0),
        (same_number, "$1,234.50 in all", 1234.5, 1.0),
        (same_number, "-3", "3", 0.0),
        (same_number, "no idea", "3", 0.0),
        (boxed_match, r"so \boxed{\frac{1}{2}}.", r"\frac{1}{ 2}", 1.0),
        (boxed_match, r"\boxed{1}, no, \boxed{2}", "2", 1.0),
        (boxed_match, r"\boxed{2", "2", 0.0),
        (boxed_match, "2", "2", 0.0),
    ],
)
def test_answers_are_compared_with_the_ground_truth(function, answer, truth, reward):
    assert function(episode(answer, truth)) == reward


def test_case_may_be_ignored():
    assert exact_match(episode("PARIS", "Paris"), ignore_case=True) == 1.0


def test_ground_truth_without_a_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match=r"the ground truth must have a number, got 'none'; correct tasks\.columns\.answer"):
        same_number(episode("3", "none"))
