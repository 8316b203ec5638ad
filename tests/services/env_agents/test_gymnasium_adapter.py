import gymnasium
import numpy as np
import pytest

from services.env_agents.environment import Action, Task
from services.env_agents.gymnasium_adapter import GymnasiumEnvironment


class Counter(gymnasium.Env):
    """Ends at 3; the action is added."""

    def __init__(self, action_space, start=0):
        self.action_space = action_space
        self.observation_space = gymnasium.spaces.Box(-9, 9, (2,), dtype=np.int64)
        self.start = start
        self.is_closed = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total = self.start
        return np.array([self.total, seed]), {}

    def step(self, action):
        self.total += int(np.sum(action)) if not isinstance(action, str) else len(action)
        return np.array([self.total, 0]), 0.5, self.total >= 3, False, {}

    def close(self):
        self.is_closed = True


def make(space, **arguments):
    return GymnasiumEnvironment(lambda: Counter(space, **arguments))


async def test_observations_are_user_messages_and_seed_is_the_tasks():
    environment = make(gymnasium.spaces.Discrete(4))
    assert await environment.reset(Task("7", 7, {})) == [{"role": "user", "content": "[0,7]"}]
    step = await environment.step(Action("I choose 2"))
    assert (step.messages, step.reward, step.done) == ([{"role": "user", "content": "[2,0]"}], 0.5, False)
    assert (await environment.step(Action("1"))).done
    await environment.close()
    assert environment.env.is_closed


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (gymnasium.spaces.Discrete(4), "up"),
        (gymnasium.spaces.Discrete(4), "4"),
        (gymnasium.spaces.Discrete(4), "-1"),
        (gymnasium.spaces.MultiDiscrete([2, 2]), "[2, 0]"),
        (gymnasium.spaces.MultiDiscrete([2, 2]), "both"),
        (gymnasium.spaces.MultiDiscrete([2, 2]), '{"a": 1}'),
        (gymnasium.spaces.Text(3), "longer than three"),
    ],
)
async def test_text_that_is_no_action_is_told_to_the_policy_and_changes_nothing(space, text):
    environment = make(space)
    await environment.reset(Task("0", 0, {}))
    step = await environment.step(Action(text))
    assert step.messages[0]["content"].startswith("error: an action must be in ")
    assert not step.done
    assert environment.env.total == 0


@pytest.mark.parametrize(
    ("space", "text", "total"),
    [(gymnasium.spaces.MultiDiscrete([2, 2]), "[1, 1]", 2), (gymnasium.spaces.Text(3), "ab", 2)],
)
async def test_arrays_and_text_are_actions_too(space, text, total):
    environment = make(space)
    await environment.reset(Task("0", 0, {}))
    await environment.step(Action(text))
    assert environment.env.total == total


async def test_closing_before_reset_is_harmless():
    await make(gymnasium.spaces.Discrete(2)).close()
