"""Bytes and text that nobody would write: each is read, or refused with the one error and a sentence."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import configuration, strict_yaml
from shared import trajectory as trajectories
from shared.configuration import Configuration
from shared.errors import ConfigurationError, RecordError
from shared.keys import Keys
from shared.ledger import TrainingLedger
from shared.stream import TrajectoryConsumer
from shared.trajectory import Trajectory
from tests.shared.episodes import admitted_group, finished_episode

NUM_RECORDS, NUM_FILES = 600, 300
RECORD = trajectories.encode(finished_episode(admitted_group("e"), 0))
FIELDS: dict[str, Any] = msgspec.msgpack.decode(RECORD)
RUN: dict[str, Any] = {"run": {"id": "r", "directory": "d", "model_path": "m"}, "trainer": {"num_updates": 1}}
DEEP = b"\x91" * 100_000

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
as_yaml = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def read_or_refused(record: bytes) -> Trajectory | None:
    try:
        return trajectories.decode(record)
    except RecordError:
        return None


@settings(max_examples=NUM_RECORDS, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_record_with_bytes_changed_is_read_or_refused(data: st.DataObject) -> None:
    spoiled = bytearray(RECORD)
    for _ in range(data.draw(st.integers(1, 4))):
        spoiled[data.draw(st.integers(0, len(RECORD) - 1))] = data.draw(st.integers(0, 255))
    if (read := read_or_refused(bytes(spoiled))) is not None:
        assert trajectories.decode(trajectories.encode(read)) == read or read.reward != read.reward
        assert len(read.token_ids) == len(read.loss_mask) == len(read.logprobs) == len(read.token_versions)


@settings(max_examples=NUM_RECORDS, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(FIELDS)), anything)
def test_a_record_with_another_type_in_a_field_is_read_or_refused(field: str, value: Any) -> None:
    read = read_or_refused(msgspec.msgpack.encode({**FIELDS, field: value}))
    assert read is None or len(read.token_versions) == read.num_tokens


@pytest.mark.parametrize(
    "record",
    [
        DEEP,
        msgspec.msgpack.encode({**FIELDS, "of_the_future": msgspec.Raw(DEEP + b"\x00")}),
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xaeschema_version\x01",
        msgspec.msgpack.encode({**FIELDS, "turns": []})[:-1] + b"\xdd\xff\xff\xff\xff",
        b"",
    ],
    ids=["nested", "an unknown field nested", "4 billion items", "one field", "an end that promises more", "nothing"],
)
def test_bytes_that_promise_more_than_there_is_are_refused(record: bytes) -> None:
    with pytest.raises(RecordError, match="not a trajectory record"):
        trajectories.decode(record)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(st.none() | st.binary(max_size=60) | st.just(DEEP) | st.just(RECORD), min_size=1, max_size=8))
def test_whatever_is_in_the_stream_the_consumer_reads_on(
    redis_client: redis.Redis, keys: Keys, entries: list[bytes | None]
) -> None:
    """None is an entry without a record. What cannot be read lies in the dead letters, and nothing else does."""
    trainer = TrainingLedger(redis_client, keys)
    redis_client.delete(keys.trajectories, keys.dead_letters, keys.ledger)
    trainer.create_consumer_group()
    for entry in entries:
        redis_client.xadd(keys.trajectories, {"group_id": "g"} if entry is None else {"group_id": "g", "trajectory": entry})
    consumer = TrajectoryConsumer(redis_client, keys, trainer)
    delivered = consumer.read(block_ms=1)
    assert len(delivered) == entries.count(RECORD)
    assert redis_client.xlen(keys.dead_letters) == len(entries) - len(delivered) == trainer.books().dead_letters


def read_run_file(folder: Path, text: str, overrides: list[str]) -> Configuration | None:
    path = folder / "run.yaml"
    path.write_text(text, errors="surrogatepass")
    with suppress(ConfigurationError):
        return configuration.read(path, overrides=overrides, environment_variables={})
    return None


@settings(max_examples=NUM_FILES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.text(max_size=80))
def test_text_is_a_run_file_or_refused(tmp_path: Path, text: str) -> None:
    assert read_run_file(tmp_path, text, []) is None


@settings(max_examples=NUM_FILES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_run_file_with_another_value_somewhere_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(Configuration.__struct_fields__))
    fields = type_of(section).__struct_fields__
    key = data.draw(st.sampled_from(fields) | st.text(max_size=8))
    raw = {**RUN, section: {**RUN.get(section, {}), key: data.draw(as_yaml)}}
    read_run_file(tmp_path, yaml.safe_dump(raw, allow_unicode=True), [])


def type_of(section: str) -> type:
    [field] = [field for field in msgspec.structs.fields(Configuration) if field.name == section]
    return field.type


@settings(max_examples=NUM_FILES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=30)
    | st.builds("{}={}".format, st.sampled_from(["run.seed", "trainer", "a.b.c", "engines.urls"]), st.text(max_size=20))
)
def test_any_override_is_taken_or_refused(tmp_path: Path, override: str) -> None:
    read_run_file(tmp_path, yaml.safe_dump(RUN), [override])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run: {seed: " + "9" * 5000 + "}", "is not YAML: Exceeds the limit"),
        ("run: {id: 2001-99-99}", "is not YAML: month must be in 1..12"),
        ("run: " + "[" * 5000, "is not YAML"),
        ("env_agents: &a {renderer_options: *a}", "must hold no value that contains itself"),
        (
            f"run: {RUN['run']}\nenv_agents: {{renderer_options: &b {{again: *b}}}}\ntrainer: {{num_updates: 1}}",
            "must hold no value that contains itself",
        ),
        ("? [a]\n: b", "is not YAML: while constructing a mapping"),
        ("run: !!python/object/apply:os.system [true]", "could not determine a constructor"),
    ],
    ids=["digits", "a date", "nesting", "a name before its value", "a value inside itself", "a key that is a list", "code"],
)
def test_yaml_that_is_more_than_text_is_refused_with_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        configuration.read(path, environment_variables={})


def test_an_override_that_is_no_yaml_names_its_key() -> None:
    with pytest.raises(ConfigurationError, match=r"the value of run.seed is not YAML: .*; quote what is meant as text"):
        strict_yaml.apply_overrides({}, ["run.seed=["])


def test_a_wrong_value_of_a_megabyte_is_not_shown_whole() -> None:
    with pytest.raises(ConfigurationError) as caught:
        strict_yaml.decode({**RUN, "run": {**RUN["run"], "seed": "x" * 2**20}}, Configuration, source="run.yaml")
    assert len(str(caught.value)) < 1_000
