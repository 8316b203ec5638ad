"""Records and disks as they should not be, and the real trainer as a process among them: clear words, nothing lost."""

import math
from collections import Counter

import msgspec
import numpy as np
import pytest

from shared import trajectory as trajectories
from shared.ledger import TrainingLedger
from shared.trajectory import Outcome
from tests.trainer.records import VOCABULARY, trajectory
from tests.trainer.run_support import (
    BATCH_GROUPS,
    GROUP_SIZE,
    finished,
    living_lineage,
    serving_hub,
    working_agents,
    write_run_file,
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]


def with_tokens(record, token_id):
    return msgspec.structs.replace(record, token_bytes=np.full(record.num_tokens, token_id, dtype="<i4").tobytes())


def too_long(record):
    mask = [0, *[1] * 600]
    return trajectory(mask, group_id=record.group_id, group_size=GROUP_SIZE, sample_index=record.sample_index)


def without_numbers(record):
    return msgspec.structs.replace(record, logprob_bytes=np.full(record.num_tokens, math.nan, dtype="<f4").tobytes())


SPOILED = {
    (1, 0): lambda record: trajectories.encode(record)[:40],
    (2, 1): lambda record: b"\x00garbage",
    (3, 0): lambda record: trajectories.encode(with_tokens(record, VOCABULARY)),
    (4, 1): lambda record: trajectories.encode(too_long(record)),
    (5, 0): lambda record: trajectories.encode(without_numbers(record)),
    (6, 0): lambda record: trajectories.encode(msgspec.structs.replace(record, outcome=Outcome.ENVIRONMENT_ERROR)),
}
"""By number of the group and sample index."""
REASONS = {
    "g1": "not a trajectory record (40 bytes)",
    "g2": "not a trajectory record (8 bytes)",
    "g3": f"a token id must be in [0, {VOCABULARY}), the rows of the model's embedding, got {VOCABULARY}",
    "g4": "at most the 512 tokens of the model's max_position_embeddings, got 601",
    "g5": "log-probabilities must be finite",
}


def spoil(number, index, record):
    change = SPOILED.get((number, index), trajectories.encode)
    return change(record)


def dead_letters(redis_client, keys):
    return {fields[b"group_id"].decode(): fields[b"reason"].decode() for _, fields in redis_client.xrange(keys.dead_letters)}


def test_bad_records_become_dead_letters_with_their_reason_and_the_run_goes_on(start, run_file, redis_url, redis_client, keys):
    with working_agents(redis_url, keys, alter=spoil):
        status, _, errors = finished(start(run_file, "trainer.num_updates=3"))
    assert status == 0, errors
    letters = dead_letters(redis_client, keys)
    assert letters.keys() == REASONS.keys()
    for group, reason in REASONS.items():
        assert reason in letters[group]
    books = TrainingLedger(redis_client, keys).books()
    assert books.is_balanced
    assert (books.discarded, books.dead_letters) == ({"unreadable": 5, "failed": 1}, 5), "g6 is left with one episode"
    trained = [group for groups in living_lineage(run_file.parent).values() for group in groups]
    sound = [f"g{number}" for number in range(99) if number == 0 or number > 6]
    assert Counter(trained) == Counter(sound[: 3 * BATCH_GROUPS])


def test_agents_with_another_models_tokenizer_stop_training_in_words(start, run_file, redis_url, redis_client, keys):
    with working_agents(redis_url, keys, alter=lambda number, index, record: trajectories.encode(with_tokens(record, 5000))):
        status, _, errors = finished(start(run_file))
    assert status == 1
    assert f"the last {BATCH_GROUPS * GROUP_SIZE} in a row are not; they are kept as dead letters" in errors
    assert "got 5000; the agents' tokenizer is another model's" in errors
    books = TrainingLedger(redis_client, keys).books()
    assert books.is_balanced
    assert (books.version, books.trained) == (0, 0)
    assert len(dead_letters(redis_client, keys)) >= BATCH_GROUPS


@pytest.mark.parametrize(("max_failed_saves", "version_at_end"), [(0, None), (100, 4)])
def test_on_a_full_disk_training_stops_or_goes_on_as_configured_and_the_older_checkpoint_survives(
    start, small_disk, model_path, redis_url, redis_client, keys, max_failed_saves, version_at_end
):
    disk = small_disk("3m")
    settings = ("trainer.checkpoint.every_updates=1", "trainer.checkpoint.keep=1", "trainer.num_updates=4")
    with serving_hub() as hub, working_agents(redis_url, keys):
        run_file = write_run_file(disk.path, keys=keys, model_path=model_path, redis_url=redis_url, hub=hub)
        status, _, errors = finished(start(run_file, "trainer.num_updates=1"))
        assert status == 0, errors
        full = start(run_file, *settings, f"trainer.checkpoint.max_failed_saves={max_failed_saves}")
        status, output, errors = finished(full)
        assert status == 1
        (sentence,) = [line for line in errors.splitlines() if line.startswith("trainer: ")]
        assert str(disk.path / "checkpoints" / "v0000") in sentence
        assert "No space left on device; that of version 1 stays the newest" in sentence
        assert [path.name for path in (disk.path / "checkpoints").iterdir()] == ["v00001"]
        books = TrainingLedger(redis_client, keys).books()
        assert books.is_balanced
        assert books.version == (version_at_end or books.version) >= 2
        assert books.unsaved == (books.version - 1) * BATCH_GROUPS
        assert ("training goes on" in output) == (max_failed_saves > 0)

        disk.grow("20m")
        status, output, errors = finished(start(run_file, *settings))
        assert status == 0, errors
        assert "resuming from the checkpoint of version 1" in output
        trained = living_lineage(disk.path)
        assert sorted(trained) == [1, 2, 3, 4]
        assert Counter(group for groups in trained.values() for group in groups) == {f"g{n}": 1 for n in range(4 * BATCH_GROUPS)}
