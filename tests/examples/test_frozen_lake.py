from collections import deque

from examples.frozen_lake import MOVES, FrozenLake
from services.env_agents.environment import Action, Task

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def path_to_goal(lake: list[str]) -> list[str]:
    """The shortest walk from S to G around the holes."""
    paths = deque([((0, 0), [])])
    seen = {(0, 0)}
    while paths:
        (row, column), path = paths.popleft()
        if lake[row][column] == "G":
            return path
        for name, (down, right) in STEPS.items():
            there = (row + down, column + right)
            if all(0 <= value < len(lake) for value in there) and there not in seen and lake[there[0]][there[1]] != "H":
                seen.add(there)
                paths.append((there, [*path, name]))
    raise AssertionError("every lake can be crossed")


async def test_walking_around_the_holes_is_rewarded():
    lake = FrozenLake()
    messages = await lake.reset(Task("3", 3, {}))
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"].startswith("X")
    for move in path_to_goal(lake.lake):
        step = await lake.step(Action(move))
    await lake.close()
    assert (step.done, step.reward) == (True, 1.0)


async def test_each_seed_has_a_lake_of_its_own_and_states_have_names():
    first, second = FrozenLake(), FrozenLake()
    await first.reset(Task("1", 1, {}))
    await second.reset(Task("2", 2, {}))
    assert first.lake != second.lake
    before = first.state()
    await first.step(Action("up"))
    assert first.state() == before
    await first.close()
    await second.close()


async def test_other_words_are_no_moves():
    lake = FrozenLake()
    await lake.reset(Task("0", 0, {}))
    step = await lake.step(Action("jump"))
    await lake.close()
    assert step.messages[0]["content"] == f"error: answer with {', '.join(MOVES)}"
