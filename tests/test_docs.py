"""The documentation: what can be checked of it besides that it builds (`make check`)."""

from __future__ import annotations

import re
from pathlib import Path

import lazyckpt
from commands import commands

DOCS = Path(__file__).parent.parent / "docs"


def test_every_error_has_its_cure() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    headings = set(re.findall(r"^### `(\w+)`", text, re.MULTILINE))
    errors = {name for name in lazyckpt.__all__ if name.endswith("Error")} - {"LazyCkptError"}
    assert headings == errors


def test_every_knob_is_explained() -> None:
    text = (DOCS / "settings.md").read_text()
    assert [name for name in lazyckpt.Config.__dataclass_fields__ if f"`{name}`" not in text] == []


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference.md").read_text()
    listed = set(re.findall(r"^::: lazyckpt\.(\w+)$", text, re.MULTILINE))
    public = {name for name in lazyckpt.__all__ if not name.endswith("Error")}
    assert listed - {"errors"} == public


def test_every_command_is_explained() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "cli.md").read_text(), re.MULTILINE)[1:]
    assert {heading.split()[0] for heading in ", ".join(headings).split(", ")} == set(commands())


def test_every_page_is_in_the_navigation() -> None:
    config = (DOCS.parent / "mkdocs.yml").read_text()
    pages = set(re.findall(r"[\w-]+\.md", config))
    assert pages == {page.name for page in DOCS.glob("*.md")}
