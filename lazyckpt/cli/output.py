"""How things are shown: sizes, times, names that come from files, and the two streams they are printed to."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table
from rich.text import Text

# Wide enough for any line: what is piped into another program is neither wrapped nor cut.
_UNBOUNDED = 1_000_000
_MAX_NAME_CELLS = 60  # the column of a tree's names at most; what is longer shifts its own row, not all
_BEHIND = 0.4  # of a terminal, that the names leave to what stands behind them, if it takes so much


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # the command line's group ends the program


def stdout() -> Console:
    return _Console(
        highlight=False, markup=False, emoji=False, soft_wrap=False, width=None if sys.stdout.isatty() else _UNBOUNDED
    )


def stderr() -> Console:
    return _Console(
        stderr=True,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if sys.stderr.isatty() else _UNBOUNDED,
    )


def show(console: Console, table: Table | Padding, *, spared: tuple[str, ...] = (), narrow: int = 60) -> None:
    """Prints a table; into a pipe without the spaces that fill its last column. On a terminal of less than ``narrow``
    cells the columns in ``spared`` are left out rather than all of them cut."""
    if console.is_terminal:
        if isinstance(table, Table) and console.width < narrow:
            table.columns = [column for column in table.columns if str(column.header).lower() not in spared]
            for index, column in enumerate(table.columns):
                column._index = index  # by which rich measures it
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())


@dataclass
class TreeLine:
    """A line of a tree: cells, those before the name to the right; ``drawn`` are the lines that draw the tree."""

    before: tuple[str, ...]
    drawn: str
    name: str
    behind: tuple[str, ...]
    note: str = ""
    style: str = ""


def print_tree(console: Console, lines: list[TreeLine]) -> None:
    """By hand, not with rich's tables: those take seconds for ten thousand rows."""
    before = [max(map(cell_len, cells)) for cells in zip(*(line.before for line in lines), strict=True)]
    behind = [max(map(cell_len, cells)) for cells in zip(*(line.behind for line in lines), strict=True)]
    room = console.width - sum(before) - 2 * len(before) - min(sum(behind) + 4, int(_BEHIND * console.width))
    most = min(room, _MAX_NAME_CELLS)
    names = max(n if (n := cell_len(line.drawn + line.name)) <= most else 0 for line in lines)
    text = Text()
    for line in lines:
        text.append("".join(f"{cell:>{cells}}  " for cell, cells in zip(line.before, before, strict=True)))
        text.append(line.drawn, "dim").append(line.name, line.style)
        text.append(" " * (max(names - cell_len(line.drawn + line.name), 0) + 2))
        *middle, last = zip(line.behind, behind, strict=True)
        text.append("".join(cell + " " * (cells - cell_len(cell) + 2) for cell, cells in middle))
        text.append(last[0], "dim" if line.style == "bold" else "")
        text.append(f"  {line.note}" if line.note else "", "yellow").append("\n")
    if console.is_terminal:
        console.print(text, no_wrap=True, overflow="ellipsis", end="")
    else:
        print("\n".join(line.rstrip() for line in text.plain.splitlines()))


class _Description(ProgressColumn):
    """Cut where there is no room for it and a bar: of rich's own all columns would be cut."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


def progress() -> Progress:
    """By bytes; on a terminal only, and gone when it is done."""
    console = stderr()
    return Progress(
        _Description(table_column=Column()),
        BarColumn(),
        DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def print_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    stderr().print(Text.assemble(("error: ", "bold red"), plain(" ".join(message.split()))), soft_wrap=True)


def print_json(tree: Any) -> None:
    print(json.dumps(tree, indent=2))


def columns(*names: str, right: tuple[str, ...] = (), wrap: tuple[str, ...] = ()) -> Table:
    """A table without lines. A terminal too narrow cuts its cells, but for the columns in ``wrap``."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(names))
    for name in names:
        table.add_column(
            name.upper(),
            justify="right" if name in right else "left",
            no_wrap=name not in wrap,
            overflow="fold" if name in wrap else "ellipsis",
        )
    return table


def prose(docstring: str | None) -> str:
    """For help, which is wrapped to the terminal: the ends of the docstring's lines would stay in it."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (docstring or "").split("\n\n"))


def plain(text: object) -> str:
    """``text`` with everything escaped that a terminal would obey: names in files are anybody's."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def size(nbytes: int) -> str:
    """Three digits and a binary unit: 512 B, 38.6 MiB, 1.21 GiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 999.5 or unit == "PiB":
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def age(then: datetime) -> str:
    """How long ago, in one unit."""
    if then.tzinfo is None:
        then = then.replace(tzinfo=timezone.utc)
    seconds = max(0, int((datetime.now(timezone.utc) - then).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def duration(seconds: float) -> str:
    """Three digits and a unit: 0.42 ms, 35.7 ms, 1.5 s, 20 min."""
    for unit, length, limit in (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0)):
        if seconds < limit:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def count(number: int, noun: str, plural: str = "") -> str:
    """1 record, 2 records."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
