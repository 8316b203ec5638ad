"""What is killed and stopped, and when: a pure function of the seed.

All single faults of the chosen kinds come before any comes again, in an order that the seed decides. Every third fault is a pair,
where there are two processes to hit.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

PARTS: Mapping[str, tuple[str, ...]] = {
    "engine": ("engine-0", "engine-1"),
    "hub": ("hub",),
    "agent": ("agents", "agents-1"),
    "redis": ("redis",),
    "trainer": ("trainer",),
}
"""Kind → the processes of that kind, as `headrace up` names them."""
PAUSE_S = (6.0, 12.0)
"""Quiet between the run's recovery from one fault and the next one."""
STOP_S = (2.0, 8.0)
APART_S = (0.0, 1.0)
"""Between the two blows of a pair."""
PAIR_EVERY = 3


class Action(StrEnum):
    KILL = "kill"
    """SIGKILL to the part and all that it started."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT later."""


@dataclass(frozen=True)
class Blow:
    """One process hit, `after_s` after the fault's first one."""

    kind: str
    part: str
    action: Action
    after_s: float = 0.0
    stop_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.action} {self.part}" + (f" for {self.stop_s:.1f} s" if self.stop_s else "")


@dataclass(frozen=True)
class Fault:
    """One blow or two, `pause_s` after the run has recovered from the fault before."""

    number: int
    pause_s: float
    blows: tuple[Blow, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.blows))


def schedule(seed: int, kinds: Sequence[str], num_faults: int) -> list[Fault]:
    """The first `num_faults` faults."""
    rng = random.Random(f"{seed} {' '.join(kinds)}")
    possible_pairs = _pairs(kinds)
    singles, pairs = _dealt(rng, _singles(kinds)), _dealt(rng, possible_pairs)
    faults = []
    for number in range(1, num_faults + 1):
        is_pair = number % PAIR_EVERY == 0 and bool(possible_pairs)
        hit = next(pairs) if is_pair else (next(singles),)
        blows = [_blow(rng, kind, action, is_first=not index) for index, (kind, action) in enumerate(hit)]
        if len(blows) == 2 and blows[0].part == blows[1].part:
            blows[1] = _at_the_other(blows[1])
        faults.append(Fault(number, rng.uniform(*PAUSE_S), tuple(blows)))
    return faults


Target = tuple[str, Action]
Card = TypeVar("Card")


def _singles(kinds: Sequence[str]) -> list[Target]:
    return list(itertools.product(kinds, Action))


def _pairs(kinds: Sequence[str]) -> list[tuple[Target, Target]]:
    """Any two different processes, both actions; both of a kind only where it has two processes."""
    return [
        ((first, first_action), (second, second_action))
        for first, second in itertools.combinations_with_replacement(kinds, 2)
        if first != second or len(PARTS[first]) > 1
        for first_action, second_action in itertools.product(Action, Action)
    ]


def _dealt(rng: random.Random, cards: Sequence[Card]) -> Iterator[Card]:
    """Every card once, then every card again in another order."""
    while True:
        yield from rng.sample(cards, len(cards))


def _blow(rng: random.Random, kind: str, action: Action, *, is_first: bool) -> Blow:
    return Blow(
        kind=kind,
        part=rng.choice(PARTS[kind]),
        action=action,
        after_s=0.0 if is_first else rng.uniform(*APART_S),
        stop_s=rng.uniform(*STOP_S) if action is Action.STOP else 0.0,
    )


def _at_the_other(blow: Blow) -> Blow:
    [other] = [part for part in PARTS[blow.kind] if part != blow.part]
    return Blow(blow.kind, other, blow.action, blow.after_s, blow.stop_s)
