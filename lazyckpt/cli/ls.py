"""``lazyckpt ls``: prints the checkpoints of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from lazyckpt.cli.output import age, columns, plain, print_json, say, show
from lazyckpt.cli.parameters import AsJson, RunFolder
from lazyckpt.tools.contents import hint_at_subfolders
from lazyckpt.tools.listing import ListedCheckpoint, list_run
from lazyckpt.tools.units import size

_NUMBERS = ("step", "sequence", "parent", "age", "size")
_LEFTOVERS = {
    "in use": "being written now",
    "abandoned": "left by a run that died; the next Checkpointer that opens the folder removes it",
    "unknown": "a file of lazyckpt.save, being written or left by a process that died",
}


def ls(directory: RunFolder = Path("."), as_json: AsJson = False) -> None:
    """List the checkpoints of a run, the one saved last first.

    A checkpoint is ok if its manifest is readable and its files have the lengths that it states. Only 'lazyckpt verify'
    reads the files.
    """
    listing = list_run(directory)
    if as_json:
        found = asdict(listing)
        for row in found["checkpoints"]:
            row["ok"] = row["reason"] is None
        print_json(found)
        return
    if not listing.checkpoints:
        where = hint_at_subfolders(directory) or "; for the checkpoints of a trainer use 'lazyckpt verify'"
        say(f"no checkpoints in {plain(directory)}: a Checkpointer has not saved there{plain(where)}")
    else:
        table = columns(*_NUMBERS, "state", right=_NUMBERS, wrap=("state",))
        for c in listing.checkpoints:
            numbers = ("-" if number is None else str(number) for number in (c.step, c.sequence, c.parent))
            table.add_row(*numbers, age(c.created), size(c.bytes), _state(c), style="bold" if c.newest else None)
        show(table, spared=("sequence", "parent"))
    for leftover in listing.leftovers:
        say((f"{plain(leftover.name)} ({size(leftover.bytes)}): {_LEFTOVERS[leftover.state]}", "yellow"))


def _state(c: ListedCheckpoint) -> Text:
    pinned = ", pinned" if c.pinned else ""
    if c.reason is not None:
        word = "unreadable: " if c.unreadable else "broken: "
        return Text.assemble((word, "bold red"), plain(c.reason), pinned)
    return Text.assemble(("ok", "green"), ", newest" if c.newest else "", pinned)
