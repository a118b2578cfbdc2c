"""Prints tables, trees, progress and JSON. Escapes names from files, which may be hostile."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from lazyckpt import tools
from lazyckpt.tools.units import plain

_UNBOUNDED = 1_000_000  # cells: lines for another program are neither wrapped nor cut
_MAX_NAME_CELLS = 60  # a longer name shifts its own row instead of all
STYLES = {"module": "bold", "tensor": "", "value": "cyan"}  # of a tree's rows, by kind


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise


def _console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False, width=width)


def width() -> int:
    """The columns of the terminal; a great number for another program."""
    return _console().width


def say(*parts: str | tuple[str, str]) -> None:
    """Prints a line of texts, or of texts with styles. A terminal wraps it."""
    _console().print(Text.assemble(*parts), soft_wrap=True)


def show(table: Table | Padding) -> None:
    """Prints a table; for another program without trailing spaces."""
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())


def columns(*names: str, right: tuple[str, ...] = (), wrap: tuple[str, ...] = ()) -> Table:
    """Makes a table without rules. A narrow terminal cuts its cells, and wraps the columns in ``wrap``."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(names))
    for name in names:
        table.add_column(
            name.upper(),
            justify="right" if name in right else "left",
            no_wrap=name not in wrap,
            overflow="fold" if name in wrap else "ellipsis",
        )
    return table


class TreeLine(NamedTuple):
    """A line of a tree. ``before`` are cells in front of the name, aligned right; ``behind`` those after it; ``level``
    is 0 without branches."""

    before: tuple[str, ...]
    level: int
    name: str
    behind: tuple[str, ...]
    note: str = ""
    style: str = ""


def print_tree(lines: list[TreeLine]) -> None:
    """Prints a tree. rich's own tables and trees take seconds for ten thousand rows."""
    drawn = _branches([line.level for line in lines])
    before = [max(map(cell_len, cells)) for cells in zip(*(line.before for line in lines), strict=True)]
    behind = [max(map(cell_len, cells)) for cells in zip(*(line.behind for line in lines), strict=True)]
    lengths = [cell_len(branch + line.name) for branch, line in zip(drawn, lines, strict=True)]
    names = max((length for length in lengths if length <= _MAX_NAME_CELLS), default=0)
    text = Text()
    for line, branch, length in zip(lines, drawn, lengths, strict=True):
        text.append("".join(f"{cell:>{cells}}  " for cell, cells in zip(line.before, before, strict=True)))
        text.append(branch, "dim").append(line.name, line.style).append(" " * (max(names - length, 0) + 2))
        *middle, last = zip(line.behind, behind, strict=True)
        text.append("".join(cell + " " * (cells - cell_len(cell) + 2) for cell, cells in middle))
        text.append(last[0], "dim" if line.style == "bold" else "")
        text.append(f"  {line.note}" if line.note else "", "yellow").append("\n")
    console = _console()
    if console.is_terminal:
        console.print(text, no_wrap=True, overflow="ellipsis", end="")
    else:
        print("\n".join(line.rstrip() for line in text.plain.splitlines()))


def _branches(levels: Sequence[int]) -> list[str]:
    """Draws the branches of a tree from the levels of its rows, parents first."""
    drawn: list[str] = []
    followed: set[int] = set()  # levels with a further sibling below
    for level in reversed(levels):
        followed = {above for above in followed if above <= level}
        lines = "".join("│  " if above in followed else "   " for above in range(1, level))
        drawn.append(f"{lines}{'├─ ' if level in followed else '└─ '}" if level else "")
        followed.add(level)
    return drawn[::-1]


def _bar() -> Progress:
    """Makes a bar for bytes on stderr, which disappears when it stops. Without a terminal it shows nothing."""
    console = _console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextmanager
def progress() -> Iterator[tools.Progress]:
    """Gives a tool its ``progress``: a bar for each name, gone when its bytes are done, so that results can follow."""
    shown: str | None = None
    bar = _bar()

    def report(name: str, done: int, total: int) -> None:
        nonlocal bar, shown
        if name != shown:
            bars.close()
            shown, bar = name, bars.enter_context(_bar())
            bar.add_task(plain(name), total=total)
        bar.update(bar.task_ids[0], completed=done)
        if done >= total:
            bars.close()
            shown = None

    with ExitStack() as bars:
        yield report


def print_error(message: str) -> None:
    """Prints a message as one line on stderr."""
    _console(stderr=True).print(
        Text.assemble(("error: ", "bold red"), plain(" ".join(message.split()))), soft_wrap=True
    )


def print_json(tree: Any) -> None:
    """Prints JSON; times in ISO 8601, paths as text."""
    print(
        json.dumps(tree, indent=2, default=lambda item: item.isoformat() if isinstance(item, datetime) else str(item))
    )


def age(then: datetime) -> str:
    """How long ago, in one unit: 90 min, 3 d."""
    seconds = max(0, int((datetime.now(timezone.utc) - then).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
