"""One table, shown twice: on the terminal with rich, in the Markdown report, there with a picture of it.

A report is a folder: a JSON file for each part that was measured, `report.md` with all of them, and its pictures.
So parts can be measured in different hours, and again without the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.pictures import Picture, draw


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how it was measured; which figures are missing, and why
    picture: Picture | None = None

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


def _markdown(table: Table, picture: str = "") -> str:
    lines = [f"## {table.title}", ""]
    if picture:
        lines += [f"![{table.title}]({picture})", ""]
    lines.append("| " + " | ".join(table.columns) + " |")
    lines.append("|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.columns))) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
    lines += [""] + [f"- {note}" for note in table.notes]
    return "\n".join(lines).rstrip() + "\n"


def write_markdown(path: Path, machine: dict[str, str], command: str, tables: Sequence[Table]) -> None:
    head = [f"# Benchmark of {_now()}", "", f"`{command}`", ""]
    head += [f"- {key}: {value}" for key, value in machine.items()]
    head += [
        "",
        "Figures are medians of interleaved pairs, with the smallest and the largest in brackets.",
        "",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(head) + "\n" + "\n".join(_markdown(table) for table in tables))


@dataclass
class Section:
    """One part of a report, as it was measured."""

    part: str
    about: dict[str, str]  # the machine
    command: str
    tables: list[Table]
    seconds: float
    when: str = field(default_factory=lambda: _now())

    def store(self, folder: Path) -> None:
        _section_file(folder, self.part).write_text(json.dumps(asdict(self), indent=1))


def load_section(folder: Path, part: str) -> Section | None:
    """None if that part was not measured yet."""
    try:
        fields = json.loads(_section_file(folder, part).read_text())
    except FileNotFoundError:
        return None
    for table in fields["tables"]:
        if picture := table["picture"]:
            lines = {name: [(x, y) for x, y in points] for name, points in picture["lines"].items()}
            table["picture"] = Picture(**{**picture, "lines": lines})
    return Section(**{**fields, "tables": [Table(**table) for table in fields["tables"]]})


def write_report(folder: Path, sections: Sequence[Section]) -> Path:
    """`report.md` of all sections, whenever they were measured; with pictures if matplotlib is installed."""
    newest = max(sections, key=lambda section: section.when)
    lines = ["# Benchmarks", ""]
    lines += [f"- {key}: {value}" for key, value in newest.about.items()]
    lines += ["", "Figures are medians of interleaved rounds, with the smallest and the largest in brackets.", ""]
    for section in sections:
        lines += [f"# {section.part}", "", f"`{section.command}`", ""]
        changed = [f"{k}: {v}" for k, v in section.about.items() if newest.about.get(k) != v]
        lines += ["; ".join([f"{section.when}, {section.seconds:.0f} s", *changed]), ""]
        for number, table in enumerate(section.tables):
            picture = f"{section.part}-{number + 1}.svg"
            drawn = table.picture is not None and draw(table.picture, table.title, folder / picture)
            lines += [_markdown(table, picture if drawn else "")]
    path = folder / "report.md"
    path.write_text("\n".join(lines))
    return path


def _section_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.json"


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
