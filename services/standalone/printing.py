"""How every command prints: tables and colour on a terminal; elsewhere lines that `grep` and `cut` read, never wrapped."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import IO, Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


class _Console(Console):
    """Leaves a closed pipe to its caller: rich's own would exit with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(file: IO[str] | None = None) -> Console:
    """A console for text that others wrote: nothing in it is markup. Off a terminal no line is cut or wrapped."""
    console = _Console(file=file, highlight=False, markup=False, emoji=False)
    console.soft_wrap = not console.is_terminal
    return console


def table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
) -> RenderableType:
    """A frame on a terminal; elsewhere a line each, in columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        lines = _aligned([columns, *cells])
        return Text("\n".join([title, *lines] if title else lines))
    framed = Table(*columns, title=title or None, title_justify="left")
    for row in cells:
        framed.add_row(*(Text(printable(cell)) for cell in row))
    return framed


def block(console: Console, title: str, text: str) -> RenderableType:
    """Several lines under a title: a frame on a terminal, the lines alone elsewhere."""
    body = Text(printable(text))
    return Panel(body, title=Text(title), title_align="left") if console.is_terminal else Group(Text(title), body, Text())


def as_json(value: Any) -> None:
    """One object for programs, on one line."""
    print(msgspec.json.encode(value).decode(), flush=True)  # noqa: T201


def yes_or_no(answer: bool) -> str:
    return "yes" if answer else "no"


def number(value: float | None) -> str:
    """Two decimals; a dash where there is nothing to say yet."""
    return "–" if value is None else f"{value:.2f}"


def percent(share: float | None) -> str:
    """A share in whole per cent; a dash where nothing was measured."""
    return "–" if share is None else f"{share:.0%}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """`text` with its control characters spelt out, so that what a policy wrote cannot steer a terminal."""
    return "".join(repr(character)[1:-1] if _is_control(character) else character for character in text)


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _is_control(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) == "Cc"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
