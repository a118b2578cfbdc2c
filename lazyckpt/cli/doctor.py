"""``lazyckpt doctor``: prints the features of this machine, and how lazyckpt will use them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from lazyckpt.cli.output import columns, print_json, say, show
from lazyckpt.cli.parameters import AsJson, path_argument, placed
from lazyckpt.stores.store import StorePath
from lazyckpt.tools.units import plain


def doctor(
    directory: Annotated[Path, path_argument("[DIR|URL]", "Where checkpoints will go.")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """Show what this machine offers, and what lazyckpt will therefore do. For a URL: whether a mirror works there.

    Exit code: 0; for a URL, 1 if something that a mirror needs fails.
    """
    if not isinstance(place := placed(directory), Path):
        _try_out(place, as_json)
        return
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


def _try_out(url: StorePath, as_json: bool) -> None:
    from lazyckpt.tools.doctor_url import try_out

    trials = try_out(url)
    if as_json:
        print_json({"url": url, "trials": list(map(asdict, trials))})
    else:
        table = columns("", "", wrap=("",))
        for trial in trials:
            told = f"no: {trial.fault}" if trial.fault else f"yes  {trial.note}".rstrip()
            table.add_row(trial.what, plain(told), style="yellow" if trial.fault else None)
        say((f"What a mirror needs of {plain(url)}", "bold"))
        show(Padding(table, (0, 0, 0, 2), expand=False))
    raise typer.Exit(any(trial.fault for trial in trials))
