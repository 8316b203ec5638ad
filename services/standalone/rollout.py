"""One trajectory in words: what the policy read, what it sampled, what came of it. Pure."""

from collections.abc import Mapping
from functools import partial

import msgspec
from rich.console import Console
from rich.text import Text

from services.standalone.printing import counted, one_line, printable
from services.standalone.stream_reader import Entry
from services.standalone.token_text import Decoder
from shared.trajectory import Outcome, Timings, ToolCall, Trajectory, Turn
from shared.versions import VersionSpan

STYLE_BY_SPEAKER = {"context": "dim", "turn": "cyan", "policy": "bold green", "tool": "yellow", "ended": "red"}
LABEL_WIDTH = 7
GUTTER_WIDTH = LABEL_WIDTH + len("   │ ")
LEAST_ROOM = 20
AS_ABOVE = "(as above)"


class RolloutTurn(msgspec.Struct, frozen=True):
    """`sampled` is the policy's text; `observation` what it was given to read before its next turn, "" after the last."""

    sampled: str
    observation: str
    num_sampled_tokens: int
    versions: tuple[int, ...]
    reward: float
    tool_calls: tuple[ToolCall, ...]


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory with its tokens as text, as `--json` shows it."""

    entry_id: str
    """In the stream; "" for an episode that never was in one, such as an evaluation's."""
    trajectory_id: str
    group_id: str
    group_size: int
    sample_index: int
    attempt: int
    environment: str
    task_id: str
    versions: tuple[int, ...]
    """Policy versions that sampled, ascending."""
    reward: float
    reward_parts: Mapping[str, float]
    outcome: Outcome
    detail: str
    num_tokens: int
    num_sampled_tokens: int
    prompt: str
    turns: tuple[RolloutTurn, ...]
    note: str
    """Why texts are token ids; "" where they are texts."""
    timings: Timings
    finished_at: float
    """Unix seconds."""


class UnreadableRecord(msgspec.Struct, frozen=True):
    """An entry of the stream that this version cannot read."""

    entry_id: str
    problem: str


def rollout(entry: Entry, decoder: Decoder) -> Rollout | UnreadableRecord:
    trajectory = entry.trajectory
    if not isinstance(trajectory, Trajectory):
        return UnreadableRecord(entry.entry_id, str(trajectory))
    turns = trajectory.turns
    starts = [*(turn.start for turn in turns), trajectory.num_tokens]
    return Rollout(
        entry_id=entry.entry_id,
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        group_size=trajectory.group_size,
        sample_index=trajectory.sample_index,
        attempt=trajectory.attempt,
        environment=trajectory.environment,
        task_id=trajectory.task_id,
        versions=_versions(trajectory.version_spans, 0, trajectory.num_tokens),
        reward=trajectory.reward,
        reward_parts=trajectory.reward_parts,
        outcome=trajectory.outcome,
        detail=trajectory.detail,
        num_tokens=trajectory.num_tokens,
        num_sampled_tokens=trajectory.num_sampled_tokens,
        prompt=decoder.decode(trajectory.token_ids[: starts[0]].tolist()),
        turns=tuple(_turn(trajectory, turn, end, decoder) for turn, end in zip(turns, starts[1:], strict=True)),
        note=decoder.note,
        timings=trajectory.timings,
        finished_at=trajectory.finished_at,
    )


def transcript(shown: Rollout | UnreadableRecord, console: Console, *, has_shown_prompt: bool = False) -> Text:
    """For people. Who speaks stands before every line, so that `grep` knows too; on a terminal colours say it again, and what is
    wider than it goes on behind the same bar. `has_shown_prompt`: a sibling with the same prompt is above.
    """
    if isinstance(shown, UnreadableRecord):
        return Text(f"entry {shown.entry_id} cannot be read: {printable(shown.problem)}\n", "red")
    text = Text().append(one_line(_heading(shown)) + "\n", "bold")
    say = partial(_say, text, console)
    say("context", AS_ABOVE if has_shown_prompt else shown.prompt)
    for number, turn in enumerate(shown.turns, start=1):
        reward = f", reward {turn.reward:g}" if turn.reward else ""
        say("turn", f"{number}: {counted(turn.num_sampled_tokens, 'token')}, {_version_words(turn.versions)}{reward}")
        say("policy", turn.sampled)
        for call in turn.tool_calls:
            say("tool", f"{call.name} {call.arguments} took {call.seconds:.3f} s{', an error' if call.is_error else ''}")
        say("context", turn.observation)
    say("ended", shown.detail)
    return text


def _turn(trajectory: Trajectory, turn: Turn, end: int, decoder: Decoder) -> RolloutTurn:
    """`end` is where the next turn starts."""
    ids = trajectory.token_ids
    return RolloutTurn(
        sampled=decoder.decode(ids[turn.start : turn.end].tolist()),
        observation=decoder.decode(ids[turn.end : end].tolist()),
        num_sampled_tokens=turn.end - turn.start,
        versions=_versions(trajectory.version_spans, turn.start, turn.end),
        reward=turn.reward,
        tool_calls=turn.tool_calls,
    )


def _versions(spans: tuple[VersionSpan, ...], start: int, end: int) -> tuple[int, ...]:
    """Of the spans that overlap [start, end)."""
    return tuple(sorted({span.version for span in spans if span.start < end and start < span.end}))


def _heading(shown: Rollout) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in shown.reward_parts.items())
    facts = (
        shown.environment,
        f"task {shown.task_id}",
        f"reward {shown.reward:g}" + (f" ({parts})" if parts else ""),
        shown.outcome,
        _version_words(shown.versions),
        counted(len(shown.turns), "turn"),
        f"{counted(shown.num_tokens, 'token')}, {shown.num_sampled_tokens} sampled",
        shown.trajectory_id,
    )
    return " · ".join(facts)


def _version_words(versions: tuple[int, ...]) -> str:
    match versions:
        case ():
            return "no version"
        case (version,):
            return f"version {version}"
        case _:
            return f"versions {', '.join(map(str, versions))}"


def _say(text: Text, console: Console, speaker: str, words: str) -> None:
    if not words:
        return
    for line in printable(words).strip("\n").split("\n"):
        for number, part in enumerate(_wrapped(line, console)):
            text.append(f"  {'' if number else speaker:<{LABEL_WIDTH}} │ ", "dim").append(part + "\n", STYLE_BY_SPEAKER[speaker])


def _wrapped(line: str, console: Console) -> list[str]:
    """In the parts that a terminal has room for beside the gutter; whole elsewhere, and where there is next to no room."""
    room = console.width - GUTTER_WIDTH
    if not console.is_terminal or room < LEAST_ROOM:
        return [line]
    return [part.plain.rstrip() for part in Text(line).wrap(console, room)] or [""]
