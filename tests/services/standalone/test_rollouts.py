import io
import itertools
import json
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import redis
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from services.standalone import printing, rollouts
from services.standalone.command_line import main
from services.standalone.rollout import rollout, transcript
from services.standalone.stream_reader import Entry, StreamReader
from services.standalone.token_text import IdDecoder, decoder_for
from shared import trajectory as trajectories
from shared.errors import RecordError
from shared.trajectory import Outcome, Timings, ToolCall, Trajectory, Turn
from shared.versions import VersionSpan

WORDS = ["<user>", " what", " is", " 6*7", "<policy>", " call", "<end>", "\n42", "<tool>", " \x1b[31m"]
PROMPT, FIRST, OBSERVATION, SECOND = [0, 1, 2, 3, 4], [5, 6], [8, 7, 4], [7, 6]


def episode(
    name: str = "a", environment: str = "calculator", *, detail: str = "", last: tuple[int, ...] = tuple(SECOND)
) -> Trajectory:
    """Two turns: a tool call sampled by version 6, an answer that version 7 finished."""
    ids = [*PROMPT, *FIRST, *OBSERVATION, *last]
    mask = [0] * 5 + [1] * 2 + [0] * 3 + [1] * len(last)
    return Trajectory(
        run_id="run",
        trajectory_id=name,
        group_id="group",
        group_size=2,
        sample_index=0,
        attempt=0,
        environment=environment,
        task_id="15",
        token_bytes=np.asarray(ids, dtype="<i4").tobytes(),
        loss_mask_bytes=bytes(mask),
        logprob_bytes=np.zeros(len(ids), dtype="<f4").tobytes(),
        version_spans=(VersionSpan(5, 7, 6), VersionSpan(10, 11, 6), VersionSpan(11, 10 + len(last), 7)),
        temperature=1.0,
        turns=(
            Turn(5, 7, 0.0, (ToolCall("calculate", '{"expression":"6*7"}', 0.25, False),), ""),
            Turn(10, 10 + len(last), 1.0, (), ""),
        ),
        reward=1.0,
        reward_parts={"exact": 1.0},
        outcome=Outcome.COMPLETED,
        detail=detail,
        timings=Timings(0, 1, 2, 3),
        finished_at=0.0,
    )


@pytest.fixture
def model(tmp_path):
    """A directory with a tokenizer that has one token a word."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<user>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def run_file(model, redis_url, keys):
    path = model / "mine.yaml"
    path.write_text(
        f"run: {{id: {keys.run_id}, directory: {model}/out, model_path: {model}}}\nredis: {{url: '{redis_url}'}}\n"
        "trainer: {num_updates: 1}\n"
    )
    return path


@pytest.fixture
def write(redis_client, keys):
    def write(trajectory: Trajectory | bytes) -> bytes:
        record = trajectory if isinstance(trajectory, bytes) else trajectories.encode(trajectory)
        return redis_client.xadd(keys.trajectories, {"group_id": "group", "trajectory": record})

    return write


def names(entries) -> list[str]:
    return [entry.trajectory.trajectory_id for entry in entries]


def anything(_: Entry) -> bool:
    return True


def shown(value: Entry, model) -> str:
    file = io.StringIO()
    console = printing.console(file)
    console.print(transcript(rollout(value, decoder_for(model)), console))
    return file.getvalue()


def test_transcript_says_before_every_line_who_speaks(model):
    assert shown(Entry("1-0", episode("id")), model).splitlines() == [
        "calculator · task 15 · reward 1 (exact 1) · completed · versions 6, 7 · 2 turns · 12 tokens, 4 sampled · id",
        "  context │ <user> what is 6*7<policy>",
        "  turn    │ 1: 2 tokens, version 6",
        "  policy  │  call<end>",
        '  tool    │ calculate {"expression":"6*7"} took 0.250 s',
        "  context │ <tool>",
        "  context │ 42<policy>",
        "  turn    │ 2: 2 tokens, versions 6, 7, reward 1",
        "  policy  │ 42<end>",
        "",
    ]


def test_on_a_terminal_a_long_line_goes_on_behind_the_bar(model):
    console = Console(file=io.StringIO(), width=32, force_terminal=True, color_system=None)
    console.print(transcript(rollout(Entry("1-0", episode()), decoder_for(model)), console))
    lines = console.file.getvalue().splitlines()
    start = lines.index("  context │ <user> what is")
    assert lines[start + 1] == "          │ 6*7<policy>"
    assert all(len(line) <= 32 for line in lines)


def test_context_that_siblings_have_in_common_is_shown_once(model, capsys):
    entries = [Entry("1-0", episode("a")), Entry("2-0", RecordError("x")), Entry("3-0", episode("b"))]
    entries.append(Entry("4-0", msgspec.structs.replace(episode("c"), group_id="another")))
    rollouts.show(entries, decoder_for(model), as_json=False)
    told = [line for line in capsys.readouterr().out.splitlines() if "what is" in line or "as above" in line]
    prompt = "  context │ <user> what is 6*7<policy>"
    assert told == [prompt, "  context │ (as above)", prompt]


def test_prompts_of_old_groups_are_forgotten(model, monkeypatch):
    monkeypatch.setattr(rollouts, "NUM_REMEMBERED", 1)
    prompts, one = rollouts.ShownPrompts(), rollout(Entry("1-0", episode()), decoder_for(model))
    other = msgspec.structs.replace(one, group_id="another")
    assert [prompts.has_shown(shown) for shown in (one, one, other, one)] == [False, True, False, False]


def test_on_a_terminal_colours_tell_sampled_from_read(model):
    text = transcript(rollout(Entry("1-0", episode()), decoder_for(model)), Console())
    style_by_line = {text.plain[span.start : span.end].strip(): span.style for span in text.spans}
    assert style_by_line["call<end>"] == "bold green"
    assert style_by_line["<tool>"] == "dim"


def test_what_a_policy_wrote_cannot_steer_the_terminal(model):
    text = shown(Entry("1-0", episode(last=(9, 6), detail="\x07 and [bold]")), model)
    assert "\x1b" not in text
    assert r" \x1b[31m<end>" in text
    assert r"ended   │ \x07 and [bold]" in text


def test_episode_that_failed_before_its_first_token_has_its_reason(model):
    nothing = {"token_bytes": b"", "loss_mask_bytes": b"", "logprob_bytes": b"", "version_spans": (), "turns": ()}
    ending = {"reward": 0.0, "reward_parts": {}, "outcome": Outcome.TIMEOUT, "detail": "reset took longer than 60 s"}
    failed = msgspec.structs.replace(episode(), **nothing, **ending)
    lines = shown(Entry("1-0", failed), model).splitlines()
    assert lines[0].startswith("calculator · task 15 · reward 0 · timeout · no version · 0 turns · 0 tokens, 0 sampled")
    assert lines[1] == "  ended   │ reset took longer than 60 s"


def test_record_that_cannot_be_read_is_a_line(model):
    assert shown(Entry("7-0", RecordError("not a record")), model).startswith("entry 7-0 cannot be read: not a record")


def test_without_a_tokenizer_there_are_ids_and_a_note(tmp_path):
    decoder = decoder_for(tmp_path)
    assert "has no tokenizer.json on this machine" in decoder.note
    assert decoder.decode([3, 1, 2]) == "3 1 2"


def test_tokenizer_that_cannot_be_read_is_a_note(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer that can be read" in decoder_for(tmp_path).note


def test_newest_are_the_last_ones_wanted_in_the_order_they_came(redis_client, keys, write):
    for index in range(150):
        write(episode(str(index), "calculator" if index % 50 else "rare"))
    reader = StreamReader(redis_client, keys.trajectories)
    assert names(reader.newest(3, anything)) == ["147", "148", "149"]
    assert names(reader.newest(2, rollouts._of("rare"))) == ["50", "100"]
    assert names(reader.newest(9, rollouts._of("rare"))) == ["0", "50", "100"]


def test_reading_disturbs_neither_the_consumer_group_nor_the_stream(redis_client, keys, write):
    redis_client.xgroup_create(keys.trajectories, "trainer", id="0", mkstream=True)
    write(episode())
    before = redis_client.xinfo_groups(keys.trajectories)
    reader = StreamReader(redis_client, keys.trajectories)
    assert names(reader.newest(1, anything)) == ["a"]
    assert reader.read(block_ms=1) == []
    assert redis_client.xinfo_groups(keys.trajectories) == before
    assert redis_client.xlen(keys.trajectories) == 1


@pytest.mark.parametrize("stream_exists", [False, True])
def test_nothing_is_missed_between_two_reads(redis_client, keys, write, stream_exists):
    if stream_exists:
        redis_client.xdel(keys.trajectories, write(episode("gone")))
    reader = StreamReader(redis_client, keys.trajectories)
    assert reader.newest(0, anything) == []
    write(episode("first"))
    assert names(reader.read(block_ms=1)) == ["first"]
    write(episode("second"))
    write(episode("third"))
    assert names(reader.read(block_ms=1)) == ["second", "third"]


def test_looking_back_and_going_on_meet_without_a_gap(redis_client, keys, write):
    write(episode("old"))
    reader = StreamReader(redis_client, keys.trajectories)
    shown = rollouts.follow(reader, 5, anything, url="", complain=pytest.fail)
    assert names([next(shown)]) == ["old"]
    write(episode("new"))
    assert names([next(shown)]) == ["new"]


class Outage(StreamReader):
    """A reader whose first calls meet these errors."""

    def __init__(self, client: redis.Redis, key: str, errors: list[redis.RedisError]) -> None:
        super().__init__(client, key)
        self._errors = errors

    def read(self, *, block_ms: int) -> list[Entry]:
        if self._errors:
            raise self._errors.pop(0)
        return super().read(block_ms=block_ms)


def test_following_outlives_redis_and_says_so_once(redis_client, keys, write):
    errors: list[redis.RedisError] = [
        redis.ConnectionError("refused"),
        redis.TimeoutError("slow"),
        redis.ConnectionError("refused"),
    ]
    said: list[str] = []
    waits: list[float] = []
    reader = Outage(redis_client, keys.trajectories, errors)
    entries = rollouts.follow(reader, 0, anything, url="redis://:secret@db:6379/0", complain=said.append, wait=waits.append)
    reader.newest(0, anything)
    write(episode("during the outage"))
    assert names(itertools.islice(entries, 1)) == ["during the outage"]
    assert len(waits) == 3
    assert [sentence.partition(",")[0] for sentence in said] == [
        "Redis must answer at redis://:***@db:6379/0",
        "Redis answers again",
    ]


def test_wrong_password_is_not_tried_again(redis_client, keys):
    reader = Outage(redis_client, keys.trajectories, [redis.AuthenticationError("invalid username-password pair")])
    with pytest.raises(redis.AuthenticationError):
        next(rollouts.follow(reader, 0, anything, url="", complain=pytest.fail, wait=pytest.fail))


def test_command_prints_one_json_object_a_line(run_file, write, capsys):
    write(episode("a"))
    write(b"not a record")
    write(episode("b", "other"))
    assert main(["rollouts", "--config", str(run_file), "--json"]) == 0
    first, unreadable, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["trajectory_id"], second["environment"]) == ("a", "other")
    assert first["prompt"] == "<user> what is 6*7<policy>"
    assert first["turns"][0] == {
        "sampled": " call<end>",
        "observation": "<tool>\n42<policy>",
        "num_sampled_tokens": 2,
        "versions": [6],
        "reward": 0.0,
        "tool_calls": [{"name": "calculate", "arguments": '{"expression":"6*7"}', "seconds": 0.25, "is_error": False}],
    }
    assert first["turns"][1]["versions"] == [6, 7]
    assert first["note"] == ""
    assert "not a trajectory record" in unreadable["problem"]


def test_command_shows_the_last_of_one_environment(run_file, write, capsys):
    for name in ("a", "b", "c"):
        write(episode(name, "other" if name == "c" else "calculator"))
    assert main(["rollouts", "--config", str(run_file), "--last", "1", "--environment", "calculator"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("calculator")]
    assert [heading.rpartition(" ")[2] for heading in headings] == ["b"]


def test_empty_stream_is_a_sentence_and_no_failure(run_file, capsys):
    assert main(["rollouts", "--config", str(run_file)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "no such trajectory is in the stream" in err


def test_an_environment_that_the_run_never_had_is_refused(run_file, keys, redis_client, capsys):
    redis_client.hset(keys.cursors, "calculator", 3)
    assert main(["rollouts", "--config", str(run_file), "--environment", "calculater"]) == 2
    assert "got 'calculater'; did you mean 'calculator'?" in capsys.readouterr().err


def test_redis_that_is_away_is_one_sentence_and_status_1(run_file, capsys):
    assert main(["rollouts", "--config", str(run_file), "--set", "redis.url=redis://127.0.0.1:1/0"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headrace: Redis must answer at redis://127.0.0.1:1/0, and does not")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("given", "sentence"), [(None, "must be given its password, and got none"), ("wr0ng", "must accept the")])
def test_missing_and_wrong_password_say_where_to_give_it(run_file, serve_redis, monkeypatch, capsys, given, sentence):
    url = serve_redis("--requirepass", "s3cret", password="s3cret")
    if given is None:
        monkeypatch.delenv("HEADRACE_REDIS_PASSWORD", raising=False)
    else:
        monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", given)
    assert main(["rollouts", "--config", str(run_file), "--set", f"redis.url={url}"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "in HEADRACE_REDIS_PASSWORD, or in a file" in error


def test_ids_stand_for_text_where_there_is_no_tokenizer(model):
    shown = rollout(Entry("1-0", episode()), IdDecoder("no tokenizer"))
    assert shown.turns[0].sampled == "5 6"
    assert shown.note == "no tokenizer"


def test_ctrl_c_ends_following_without_a_traceback(run_file, write):
    write(episode("a"))
    arguments = ["rollouts", "--config", str(run_file), "--follow", "--last", "1", "--json"]
    command = [sys.executable, "-m", "services.standalone.command_line", *arguments]
    # A shell that runs the tests in the background makes them, and what they start, ignore Ctrl-C.
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    }
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert json.loads(process.stdout.readline())["trajectory_id"] == "a"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (130, "", "")
