"""Every state that a model can reach, breadth first, so that what breaks a rule is shown by a shortest way to it."""

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

State = TypeVar("State", bound=Hashable)
Step = tuple[str, ...]
"""What happens, as words: who does what to what."""


@dataclass(frozen=True)
class Exploration(Generic[State]):
    """What a search saw. Without a counterexample it saw everything there is."""

    num_states: int
    num_steps: int
    problem: str | None = None
    """The rule that a state breaks, or that a state has no way to the end."""
    trace: tuple[Step, ...] = ()
    """Steps from the beginning to that state."""

    def __str__(self) -> str:
        if self.problem is None:
            return f"{self.num_states} states, {self.num_steps} steps: every rule holds in all of them"
        lines = [f"{number:3d}  {' '.join(step)}" for number, step in enumerate(self.trace, start=1)]
        return "\n".join([*lines, f"     → {self.problem}"])


def explore(
    initial: State,
    steps: Callable[[State], Iterable[tuple[Step, State]]],
    broken_rule: Callable[[State], str | None],
    is_end: Callable[[State], bool],
    *,
    canonical: Callable[[State], State] = lambda state: state,
) -> Exploration[State]:
    """Stops at the first state that breaks a rule; then looks for one from which no state that is the end can be reached.

    Args: broken_rule: what a state breaks, in words, or None. canonical: one of the states that differ in nothing but who is called
    what. It makes a search smaller and its traces hard to read, because names change on the way.
    """
    with _without_collector():
        return _explore(initial, steps, broken_rule, is_end, canonical)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of tuples, none of them in a cycle: looking for some would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _explore(
    initial: State,
    steps: Callable[[State], Iterable[tuple[Step, State]]],
    broken_rule: Callable[[State], str | None],
    is_end: Callable[[State], bool],
    canonical: Callable[[State], State],
) -> Exploration[State]:
    number_by_state: dict[State, int] = {initial: 0}
    came_from: list[tuple[int, Step]] = [(0, ())]
    before: list[list[int]] = [[]]
    ends: list[int] = []
    num_steps = 0
    waiting = deque([initial])
    while waiting:
        state = waiting.popleft()
        number = number_by_state[state]
        if problem := broken_rule(state):
            return Exploration(len(number_by_state), num_steps, problem, tuple(_trace(number, came_from)))
        if is_end(state):
            ends.append(number)
        for step, following in steps(state):
            num_steps += 1
            following = canonical(following)
            found = number_by_state.get(following)
            if found is None:
                found = number_by_state[following] = len(came_from)
                came_from.append((number, step))
                before.append([])
                waiting.append(following)
            before[found].append(number)
    if (stuck := _first_without_way(before, ends)) is not None:
        problem = "nothing that can happen from here leads to the end"
        return Exploration(len(number_by_state), num_steps, problem, tuple(_trace(stuck, came_from)))
    return Exploration(len(number_by_state), num_steps)


def _first_without_way(before: list[list[int]], ends: list[int]) -> int | None:
    has_way = bytearray(len(before))
    waiting = list(ends)
    for number in ends:
        has_way[number] = 1
    while waiting:
        for number in before[waiting.pop()]:
            if not has_way[number]:
                has_way[number] = 1
                waiting.append(number)
    found = has_way.find(0)
    return None if found < 0 else found


def _trace(number: int, came_from: list[tuple[int, Step]]) -> Iterator[Step]:
    backwards = []
    while number:
        number, step = came_from[number]
        backwards.append(step)
    return reversed(backwards)
