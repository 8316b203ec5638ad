"""What a run leaves in its directory, read back: updates, evaluations, lineage, transcripts.

After a resumption a version can appear again in a file; its later line counts, because the earlier one's weights are gone.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

HEADER = re.compile(r"^(?P<environment>\S+) · task (?P<task>.+) · reward (?P<reward>\S+) · (?P<outcome>\w+)$", re.MULTILINE)


class Update(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl, as far as the demo shows it."""

    version: int
    reward_mean: float
    success_rate: float
    lag_max: int
    wait_prev_gen_s: float
    weight_pause_s: float
    num_trajectories: int


class EvaluationResult(msgspec.Struct, frozen=True):
    episodes: int
    success_rate: float


class Evaluation(msgspec.Struct, frozen=True):
    """One line of evaluations.jsonl: held-out tasks on the weights of `version`, sampled or greedy."""

    version: int
    greedy: bool
    results: Mapping[str, EvaluationResult]

    @property
    def success_rate(self) -> float:
        """Over the episodes of all environments."""
        episodes = sum(result.episodes for result in self.results.values())
        return sum(result.success_rate * result.episodes for result in self.results.values()) / episodes


class Lineage(msgspec.Struct, frozen=True):
    """One line of lineage.jsonl: what the update that made `version` was trained on."""

    version: int
    group_ids: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    lag_max: int


class Transcript(msgspec.Struct, frozen=True):
    """One held-out episode in words."""

    task: str
    reward: float
    text: str


class _Versioned(Protocol):
    @property
    def version(self) -> int: ...


V = TypeVar("V", bound=_Versioned)


def updates(directory: Path) -> list[Update]:
    return _newest_by_version(_lines(directory / "metrics.jsonl", Update))


def lineage(directory: Path) -> list[Lineage]:
    return _newest_by_version(_lines(directory / "lineage.jsonl", Lineage))


def evaluations(directory: Path, *, greedy: bool) -> list[Evaluation]:
    """Those with results, by version."""
    lines = _lines(directory / "evaluations.jsonl", Evaluation)
    return _newest_by_version([line for line in lines if line.greedy == greedy and line.results])


def transcripts(directory: Path) -> dict[int, list[Transcript]]:
    """By version, in the order in which the tasks were evaluated."""
    paths = sorted((directory / "transcripts").glob("v*.txt"))
    return {int(path.stem.removeprefix("v")): _parse_transcripts(path.read_text()) for path in paths}


def _lines(path: Path, kind: type[V]) -> list[V]:
    """A last line that is not written to its end is left out."""
    if not path.is_file():
        return []
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().split(b"\n")[:-1]]


def _newest_by_version(lines: list[V]) -> list[V]:
    by_version = {line.version: line for line in lines}
    return [by_version[version] for version in sorted(by_version)]


def _parse_transcripts(text: str) -> list[Transcript]:
    headers = list(HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    return [
        Transcript(header["task"], float(header["reward"]), text[header.end() : end].strip())
        for header, end in zip(headers, ends, strict=True)
    ]
