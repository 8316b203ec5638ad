"""What a process prints: every line to its log file, the last ones kept for the day it dies."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

TAIL_LINES: Final = 20
MAX_LINE_BYTES: Final = 64 * 1024
"""A longer line is cut into several."""

LineSink = Callable[[str, str], None]
"""Gets the process's name and one line without its end."""


class LineSplitter:
    """Bytes as they come, lines as they end. A progress bar's carriage return ends a line too."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        *complete, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            complete.append(self._rest)
            self._rest = b""
        return [_text(line) for line in complete if line.strip()]

    def flush(self) -> list[str]:
        """The line that never ended, if there is one."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest.strip() else []


class ProcessLog:
    """One process's output, appended to `<name>.log` over all its lives."""

    def __init__(self, name: str, directory: Path, sink: LineSink) -> None:
        self.path = directory / f"{name}.log"
        self._name = name
        self._sink = sink
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._splitter = LineSplitter()
        self._file = self.path.open("a", encoding="utf-8")

    @property
    def last_lines(self) -> list[str]:
        return list(self._tail)

    def write(self, chunk: bytes) -> None:
        self._keep(self._splitter.feed(chunk))

    def close(self) -> None:
        self._keep(self._splitter.flush())
        self._file.close()

    def _keep(self, lines: list[str]) -> None:
        for line in lines:
            self._tail.append(line)
            self._file.write(line + "\n")
            self._sink(self._name, line)
        self._file.flush()


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip()
