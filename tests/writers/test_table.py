"""The documentation names every writer that only the page witness sees, and the call that covers it."""

from __future__ import annotations

from pathlib import Path

from writers.registry import REGISTRY, VERSIONS, table

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- writers: begin -->", "<!-- writers: end -->"


def test_the_table_is_that_of_the_registry() -> None:
    """Between the two comments stands what ``PYTHONPATH=tests python -m writers`` prints."""
    texts = {page.name: page.read_text() for page in sorted(DOCS.rglob("*.md"))}
    pages = [name for name, text in texts.items() if BEGIN in text]
    assert len(pages) == 1, f"one page of docs/ has the table, between {BEGIN} and {END}: {pages}"
    text = texts[pages[0]].split(BEGIN)[1].split(END)[0]
    assert [line for line in text.splitlines() if line.strip()] == table()


def test_the_registry_has_both_kinds() -> None:
    unseen = {name for name, cls in REGISTRY.items() if VERSIONS not in cls.seen_by}
    assert {".data", "numpy", "all_reduce", "normal_, thread"} <= unseen
    assert {"normal_", "fused step", "EMA by swap", "steps on another thread"} <= REGISTRY.keys() - unseen
