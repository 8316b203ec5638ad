"""SIGKILL at every moment of an update, on the real trainer as a process, and what a second process makes of what is left."""

import signal
import uuid
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shared.keys import Keys
from shared.ledger import TrainingLedger
from tests.trainer.killed_trainer import MOMENTS
from tests.trainer.run_support import (
    BATCH_GROUPS,
    finished,
    lines,
    living_lineage,
    serving_hub,
    trainers,
    working_agents,
    write_run_file,
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]

LAST = 5
SETTINGS = (f"trainer.num_updates={LAST}", "trainer.checkpoint.every_updates=2")
PUSHES_AT_START = 1
COUNT_AT_UPDATE_4 = {"in the middle of a push": 4 + PUSHES_AT_START, "after push": 4 + PUSHES_AT_START}
CHECKPOINT_MOMENTS = {
    "while copying a checkpoint",
    "in the middle of writing a checkpoint",
    "before the rename of a checkpoint",
    "after the rename of a checkpoint",
    "before acknowledge",
    "after acknowledge",
}
FILES_OF_A_CHECKPOINT = 2
"""Which DeepSpeed writes with one rank."""
POSSIBLY_DURABLE = {
    **{moment: {2} for moment in CHECKPOINT_MOMENTS},
    **{moment: {4} for moment in ("after the rename of a checkpoint", "before acknowledge", "after acknowledge")},
}
"""Versions of the newest checkpoint at the time of death. That of version 2 is written while the updates after it go on."""


def count_of(moment: str) -> int:
    """Dies in the 4th update, whose checkpoint is the second one."""
    if moment == "in the middle of writing a checkpoint":
        return FILES_OF_A_CHECKPOINT + 1
    return 2 if moment in CHECKPOINT_MOMENTS else COUNT_AT_UPDATE_4.get(moment, 4)


def exported(run_directory):
    return load_file(run_directory / "checkpoints" / f"v{LAST:05d}" / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(redis_url, model_path, tmp_path_factory):
    """The weights at the end of a run that nobody disturbs."""
    keys = Keys(f"uninterrupted-{uuid.uuid4().hex[:8]}")
    directory = tmp_path_factory.mktemp("uninterrupted")
    with serving_hub() as hub, working_agents(redis_url, keys), trainers() as start:
        status, _, errors = finished(
            start(write_run_file(directory, keys=keys, model_path=model_path, redis_url=redis_url, hub=hub), *SETTINGS)
        )
        assert status == 0, errors
    return exported(directory)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_nothing_is_lost_or_trained_twice_and_the_weights_are_the_same(
    moment, start, run_file, agents, hub, redis_client, keys, uninterrupted, timeline
):
    script = Path(__file__).with_name("killed_trainer.py")
    killed = start(run_file, *SETTINGS, program=(str(script), moment, str(count_of(moment))))
    status, _, errors = finished(killed)
    assert status == -signal.SIGKILL, errors
    timeline.fault("trainer", f"SIGKILL {moment}")
    ledger = TrainingLedger(redis_client, keys)
    at_death = ledger.books()
    assert at_death.is_balanced
    assert at_death.version in (3, 4, LAST), "training goes on while a checkpoint is written"
    durable = max([0, *(int(path.name[1:]) for path in (run_file.parent / "checkpoints").glob("v*"))])
    assert durable in POSSIBLY_DURABLE.get(moment, {0, 2})
    timeline.note("books", f"version {at_death.version}, newest durable checkpoint {durable}")
    hub.versions.clear()

    status, output, errors = finished(start(run_file, *SETTINGS))
    assert status == 0, errors
    timeline.recovered("trainer", f"a second process made the updates up to {LAST}")
    assert f"resuming from the checkpoint of version {durable}" in output
    assert hub.versions == list(range(durable, LAST + 1)), "the engines get the resumed weights first"

    trained = living_lineage(run_file.parent)
    assert sorted(trained) == list(range(1, LAST + 1))
    assert Counter(group for groups in trained.values() for group in groups) == {
        f"g{number}": 1 for number in range(LAST * BATCH_GROUPS)
    }, "each of the oldest groups, once"
    books = ledger.books()
    assert books.is_balanced
    assert (books.version, books.trained, books.discarded, books.unsaved) == (LAST, LAST * BATCH_GROUPS, {}, 0)
    metrics = {line["version"]: line for line in lines(run_file.parent / "metrics.jsonl")}
    for version, groups in trained.items():
        lag = max(0, version - 1 - min(agents.version_by_group[group] for group in groups))
        assert metrics[version]["lag_max"] == lag <= 1
    weights = exported(run_file.parent)
    assert weights.keys() == uninterrupted.keys()
    assert all(weights[name].equal(weight) for name, weight in uninterrupted.items())
