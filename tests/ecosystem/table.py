"""All rows, and the table "Works with" of docs/works-with.md."""

from __future__ import annotations

import re
from pathlib import Path

from ecosystem import accelerate_and_lightning, averages, data, hugging_face, low_bit, optimizers, with_deepspeed
from ecosystem.rows import Outcome, Row, read

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs" / "works-with.md"
RESULTS = ROOT / "build" / "ecosystem"
BEGIN, END = "<!-- rows: begin -->\n", "<!-- rows: end -->"


def rows() -> list[Row]:
    """In the order of the table."""
    return [
        *optimizers.ROWS,
        *low_bit.ROWS,
        *averages.ROWS,
        *hugging_face.ROWS,
        *accelerate_and_lightning.ROWS,
        *with_deepspeed.ROWS,
        *data.ROWS,
    ]


def result_of(name: str) -> Path:
    """Where the last run of a row left what became of it."""
    return RESULTS / (re.sub(r"\W+", "-", name) + ".json")


def results() -> list[Outcome]:
    """Of the rows that were run."""
    return [read(path) for row in rows() if (path := result_of(row.name)).exists()]


def text(found: list[Outcome]) -> str:
    """The table."""
    head = ["| trained with | version | copied lazily | resumes exactly | what to know |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(line, found)])


def line(found: Outcome) -> str:
    """A row of it."""
    versions = ", ".join(version.partition("+")[0] for version in found.versions.values())
    lazy = "-" if found.lazy_share is None else f"{found.lazy_share:.0%}"
    exact = "-" if found.exact is None else "yes" if found.exact else "as without"
    note = " ".join(filter(None, ["**Fails.**" if found.failures else "", found.note]))
    return f"| {found.name} | {versions} | {lazy} | {exact} | {note} |"


def names_in_docs() -> list[str]:
    """Of the rows of the table in the docs."""
    _, table, _ = _parts()
    return re.findall(r"^\| (?!trained with)(.+?) \|", table, re.MULTILINE)


def write_docs(found: list[Outcome]) -> None:
    """Puts the table into the docs. Raises ValueError if a row was not run or failed."""
    missing = {row.name for row in rows()} - {outcome.name for outcome in found if not outcome.failures}
    if missing:
        raise ValueError(f"not written to {DOCS}, since these rows failed or were not run: {sorted(missing)}")
    before, _, after = _parts()
    DOCS.write_text(before + BEGIN + text(found) + "\n" + END + after)


def _parts() -> tuple[str, str, str]:
    before, rest = DOCS.read_text().split(BEGIN)
    table, after = rest.split(END)
    return before, table, after
