"""What a run ever wrote to its stream, read from the append-only file of its Redis: a witness that no process of ours can edit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shared import trajectory as trajectories
from shared.keys import Keys
from shared.trajectory import Trajectory


@dataclass
class StreamHistory:
    """Every trajectory that entered the stream, those that left it again, and what the ledger says of groups at each step."""

    entered: dict[str, Trajectory] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    discarded_groups: set[str] = field(default_factory=set)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    """After each admission: groups started and not discarded, and the version in force."""
    owners: dict[str, list[str]] = field(default_factory=dict)
    """By group: the agent process that it was admitted to, then those that adopted it."""

    @property
    def num_discarded_groups(self) -> int:
        return len(self.discarded_groups)

    @property
    def remaining(self) -> set[str]:
        return self.entered.keys() - self.left


def read_stream_history(redis_directory: Path, keys: Keys) -> StreamHistory:
    history = StreamHistory()
    id_by_entry: dict[bytes, str] = {}
    stream, ledger, owners, groups = (name.encode() for name in (keys.trajectories, keys.ledger, keys.owners, keys.groups))
    num_started, version, forgotten = 0, 0, ""
    for name, *arguments in _commands(redis_directory):
        command = (name.upper(), arguments[0]) if arguments else (name.upper(), b"")
        if command == (b"XADD", stream):
            entry, fields = arguments[1], dict(zip(arguments[2::2], arguments[3::2], strict=True))
            trajectory = trajectories.decode(fields[b"trajectory"])
            assert trajectory.trajectory_id not in history.entered, "a trajectory entered the stream twice"
            history.entered[trajectory.trajectory_id] = trajectory
            id_by_entry[entry] = trajectory.trajectory_id
        elif command == (b"XDEL", stream):
            history.left.update(id_by_entry[entry] for entry in arguments[1:])
        elif command == (b"HDEL", groups):
            forgotten = arguments[1].decode()
        elif command == (b"HINCRBY", ledger) and arguments[1] == b"discarded":
            assert forgotten not in history.discarded_groups, "a group was discarded twice"
            history.discarded_groups.add(forgotten)  # What the script forgot last.
        elif command == (b"HINCRBY", ledger) and arguments[1] == b"started":
            num_started += int(arguments[2])
            history.admitted.append((num_started - history.num_discarded_groups, version))
        elif command == (b"HSET", ledger) and arguments[1] == b"version":
            version = int(arguments[2])
        elif command == (b"HSET", owners):
            history.owners.setdefault(arguments[1].decode(), []).append(arguments[2].decode())
    return history


def _commands(directory: Path) -> Iterator[list[bytes]]:
    """The commands of *.aof files: `*<count>` then `$<length>` and as many bytes, for each word. One half written is none yet."""
    for path in sorted(directory.rglob("*.aof")):
        with path.open("rb") as file:
            while (line := file.readline()).startswith(b"*"):
                words = [_word(file.readline(), file.read) for _ in range(int(line[1:]))] if line.endswith(b"\n") else [None]
                if None in words:
                    return
                yield words


def _word(length_line: bytes, read: Callable[[int], bytes]) -> bytes | None:
    """None if the file ends within it."""
    if not length_line.endswith(b"\r\n"):
        return None
    length = int(length_line[1:])
    word = read(length + 2)
    if len(word) < length + 2:
        return None
    assert word.endswith(b"\r\n")
    return word[:-2]
