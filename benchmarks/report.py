"""One table, shown twice: on the terminal with rich, in the Markdown report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how it was measured, what is missing and why

    def add(self, *cells: str) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(list(cells))

    def missing(self, name: str, reason: str) -> None:
        """An arm that could not be measured: shown as such, never left out or estimated."""
        self.rows.append([name, *["missing"] * (len(self.columns) - 1)])
        self.notes.append(f"{name} is missing: {reason}")


def show(console: Console, table: Table) -> None:
    rich_table = RichTable(title=table.title, title_justify="left", caption_justify="left")
    for i, column in enumerate(table.columns):
        rich_table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in table.rows:
        rich_table.add_row(*row)
    console.print(rich_table)
    for note in table.notes:
        console.print(f"  {note}", style="dim", markup=False, highlight=False)


def _markdown(table: Table) -> str:
    lines = [f"## {table.title}", ""]
    lines.append("| " + " | ".join(table.columns) + " |")
    lines.append("|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.columns))) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
    lines += [""] + [f"- {note}" for note in table.notes]
    return "\n".join(lines).rstrip() + "\n"


def write_markdown(path: Path, machine: dict[str, str], command: str, tables: Sequence[Table]) -> None:
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    head = [f"# Benchmark of {now}", "", f"`{command}`", ""]
    head += [f"- {key}: {value}" for key, value in machine.items()]
    head += [
        "",
        "Figures are medians of interleaved pairs, with the smallest and the largest in brackets.",
        "",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(head) + "\n" + "\n".join(_markdown(table) for table in tables))
