"""``lazyckpt doctor``: prints the features of this machine, and how lazyckpt will use them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.padding import Padding
from rich.text import Text

from lazyckpt.cli.output import columns, print_json, say, show
from lazyckpt.cli.parameters import AsJson, path_argument
from lazyckpt.tools.units import plain


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
    facts, conclusions = columns("", "", wrap=("",)), columns("", "", wrap=("",))
    for topic, fact in found.facts.items():
        facts.add_row(topic, plain(fact), style="yellow" if fact.startswith("no:") else None)
    for conclusion in found.conclusions:
        conclusions.add_row(Text("!", "bold yellow") if conclusion.serious else "·", plain(conclusion.text))
    say(("What there is", "bold"))
    show(Padding(facts, (0, 0, 1, 2), expand=False))
    say(("What lazyckpt will therefore do", "bold"))
    show(Padding(conclusions, (0, 0, 0, 2), expand=False))
