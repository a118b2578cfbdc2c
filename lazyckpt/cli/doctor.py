"""``lazyckpt doctor``: prints what this machine offers, and what lazyckpt will therefore do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.padding import Padding
from rich.text import Text

from lazyckpt.cli.output import columns, plain, print_json, say, show
from lazyckpt.cli.parameters import AsJson, path_argument


def doctor(
    directory: Annotated[Path, path_argument("[DIR]", "Where checkpoints will go.")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """Show what this machine offers, and what lazyckpt will therefore do."""
    from lazyckpt.tools.doctor import diagnose  # imports torch, which takes seconds

    found = diagnose(directory)
    if as_json:
        print_json(asdict(found))
        return
    say(("What there is", "bold"))
    table = columns("", "", wrap=("",))
    for topic, fact in found.facts.items():
        table.add_row(topic, Text(plain(fact), style="yellow" if fact.startswith("no:") else ""))
    show(Padding(table, (0, 0, 1, 2), expand=False))
    say(("What lazyckpt will therefore do", "bold"))
    table = columns("", "", wrap=("",))
    for conclusion in found.conclusions:
        mark = Text("!", style="bold yellow") if conclusion.serious else Text("·")
        table.add_row(mark, Text(plain(conclusion.text)))
    show(Padding(table, (0, 0, 0, 2), expand=False))
