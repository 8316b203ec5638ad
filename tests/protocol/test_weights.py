"""Weights on their way to engines: every state of the small model, whose routing is the hub's own decision."""

import random
import sys

import pytest

from services.inference_hub.update_state import UpdateProgress, UpdateState
from shared.errors import WeightUpdateError
from tests.protocol import weights_model as model
from tests.protocol.search import Exploration, explore
from tests.protocol.weights_model import Bug, Limits, State

NUM_WALKS, WALK_STEPS = 200, 60
MISHAPS = {"gives the update up", "dies and starts again", "dies and resumes", "starts again", "starts again, unnoticed"}


def search(limits: Limits, bugs: Bug = Bug.NONE) -> Exploration[State]:
    """Counterexamples are looked for without renaming, so that they can be read."""
    canonical = {} if bugs else {"canonical": model.canonical}
    return explore(model.initial(limits), lambda state: model.steps(state, bugs), model.broken_rule, model.is_end, **canonical)


@pytest.mark.parametrize(
    ("limits", "num_states"),
    [(Limits(engine_crashes=0), 38_493), (Limits(versions=1), 52_525), (Limits(hub_crashes=0), 47_721)],
    ids=["trainer and hub die", "all die in the first update", "trainer and an engine die"],
)
def test_every_rule_holds_in_every_state_and_each_has_a_way_to_the_end(limits: Limits, num_states: int) -> None:
    found = search(limits)
    assert found.problem is None, str(found)
    assert found.num_states == num_states, "fewer would mean that something cannot happen any more"


@pytest.mark.parametrize(
    ("bug", "rule", "last_steps"),
    [
        (
            Bug.MARKED_TOO_LATE,
            "no engine generates with an incomplete set",
            ["engine 0 loads bucket 1 after the hub died", "hub verifies engine 0"],
        ),
        (
            Bug.EPOCH_KEPT,
            "a version is one set of weights",
            [
                "trainer dies and resumes version 0",
                "trainer begins version 0 refused",
                "trainer trains version 1",
                "trainer begins version 1 already in force",
            ],
        ),
        (
            Bug.RESUMED_WITH_PART,
            "no engine generates with an incomplete set",
            [
                "engine 0 loads bucket 1",
                "hub gives the update up",
                "trainer begins version 1 on engines 0",
                "hub gives the update up",
            ],
        ),
        (
            Bug.COMMITTED_WITHOUT_ALL,
            "no engine generates with an incomplete set",
            ["hub asks for bucket 2", "hub commits version 1"],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Bug) else "",
)
def test_a_planted_mistake_is_found_with_a_way_to_it(bug: Bug, rule: str, last_steps: list[str]) -> None:
    found = search(Limits(), bug)
    sys.stdout.write(f"{bug.name}\n{found}\n")  # Shown by pytest -rP.
    assert found.problem is not None
    assert found.problem.startswith(rule)
    assert [" ".join(step) for step in found.trace][-len(last_steps) :] == last_steps


def test_an_update_may_be_committed_when_the_hub_s_own_states_say_so() -> None:
    """Along random walks the real state machine of an update takes the model's steps, and agrees on when one may commit."""
    num_commits = num_refusals = 0
    for seed in range(NUM_WALKS):
        chance, state = random.Random(seed), model.initial(Limits())
        progress = None
        for _ in range(WALK_STEPS):
            choices = list(model.steps(state))
            if state.update is not None and progress is not None:
                may_commit = any(step[:2] == ("hub", "commits") for step, _ in choices)
                assert may_commit == _may_commit(progress)
                num_commits, num_refusals = num_commits + may_commit, num_refusals + (not may_commit)
            if not choices:
                break
            weights = [1 if MISHAPS & {*step} or "dies" in step[-1] else 8 for step, _ in choices]
            _, following = chance.choices(choices, weights)[0]
            progress = _follow(progress, state, following)
            state = following
    assert min(num_commits, num_refusals) > NUM_WALKS, "walks must meet both"


def _follow(progress: UpdateProgress | None, before: State, after: State) -> UpdateProgress | None:
    update = after.update
    if update is None:
        return None
    is_new = before.update is None or (update.num_announced == 0 and before.update != update)
    if progress is None or is_new:
        progress = UpdateProgress("update", timeout_s=1.0, now=0.0)
        progress.advance(UpdateState.PAUSED, now=0.0)
    if before.update is not None and update.num_announced > before.update.num_announced:
        progress.advance(UpdateState.LOADING, now=0.0)
    # As WeightUpdates.load_bucket does when every engine has answered.
    progress.is_set_complete = update.num_announced == model.NUM_BUCKETS and set(update.loaded) == set(update.members)
    return progress


def _may_commit(progress: UpdateProgress) -> bool:
    try:
        progress.check(UpdateState.COMMITTED)
    except WeightUpdateError:
        return False
    return True
