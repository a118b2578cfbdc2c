"""``lazyckpt ls``: prints the checkpoints of a run."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from lazyckpt.cli.output import age, columns, print_json, say, show
from lazyckpt.cli.parameters import AsJson, RunFolder, placed
from lazyckpt.storage.manifest import NO_STEP, Checkpoint
from lazyckpt.tools.contents import hint_at_subfolders
from lazyckpt.tools.listing import list_run
from lazyckpt.tools.trainers import TrainerCheckpoint, latest_fault, list_trainer
from lazyckpt.tools.units import plain, size

_NUMBERS = ("step", "sequence", "parent", "age", "size")
_BLANK = dict.fromkeys(("sequence", "parent", "created", "world_size", "metrics", "reason")) | {
    "ok": True,
    "newest": False,
    "unreadable": False,
}
_LEFTOVERS = {
    "in use": "being written now",
    "abandoned": "left by a run that died; the next Checkpointer that opens the folder removes it",
    "uploading": "uploaded now, or left by an upload that was cut off",
    "unknown": "a file of lazyckpt.save, being written or left by a process that died",
}


def ls(directory: RunFolder = Path("."), as_json: AsJson = False) -> None:
    """List the checkpoints of a run with the metrics given to save(), the one saved last first; of sharded ones also
    how many ranks saved them.

    A checkpoint is ok if its manifest is readable and its files have the lengths that it states. Only 'lazyckpt verify'
    reads the files. A folder of Lightning, Accelerate, the Hugging Face Trainer or DeepSpeed has no manifests: the
    order is that of the training steps. Of DeepSpeed, 'latest' marks the one that it would load.
    """
    place = placed(directory)
    if isinstance(place, Path) and (found := list_trainer(place)):
        _show_trainer(place, found, as_json)
        return
    listing = list_run(place)
    newest = listing.checkpoints[0] if listing.checkpoints else None
    if as_json:
        rows = [_BLANK | checkpoint_row(c) | {"newest": c is newest} for c in listing.checkpoints]
        rows += [_BLANK | asdict(broken) | {"name": broken.path.name, "ok": False} for broken in listing.broken]
        about = {"directory": place, "checkpoints": rows}
        print_json(about | {"leftovers": list(map(asdict, listing.leftovers))})
        return
    if newest is None and not listing.broken:
        why = "a Checkpointer has not saved there"
        if isinstance(place, Path):
            why = latest_fault(place) or why + hint_at_subfolders(place)
        say(f"no checkpoints in {plain(place)}: {plain(why)}")
    else:
        has_metrics = any(c.metrics for c in listing.checkpoints)
        has_ranks = any(c.world_size > 1 for c in listing.checkpoints)
        has_names = any(c.layout != "state" for c in listing.checkpoints)  # of trainers
        numbers = (*_NUMBERS, *["ranks"] * has_ranks)
        words = (*["metrics"] * has_metrics, "state")
        table = columns(*["name"] * has_names, *numbers, *words, right=numbers, wrap=("metrics", "state"))
        for c in listing.checkpoints:
            parent = "-" if c.parent is None else str(c.parent)
            state = Text.assemble(("ok", "green"), ", newest" * (c is newest), ", pinned" * c.pinned)
            cells = [plain(c.path.name)] * has_names
            cells += [_or_dash(None if c.step == NO_STEP else c.step), str(c.sequence), parent]
            cells += [age(c.created), size(c.nbytes)]
            cells += [str(c.world_size)] * has_ranks + [_metrics(c)] * has_metrics
            table.add_row(*cells, state, style="bold" if c is newest else None)
        for broken in listing.broken:
            word = ("unreadable: " if broken.unreadable else "broken: ", "bold red")
            state = Text.assemble(word, plain(broken.reason), ", pinned" * broken.pinned)
            blanks = ["-"] * (has_ranks + has_metrics)
            name = [plain(broken.path.name)] * has_names
            table.add_row(*name, _or_dash(broken.step), "-", "-", "-", size(broken.bytes), *blanks, state)
        show(table)
    for leftover in listing.leftovers:
        say((f"{plain(leftover.name)} ({size(leftover.bytes)}): {_LEFTOVERS[leftover.state]}", "yellow"))


def _show_trainer(directory: Path, found: list[TrainerCheckpoint], as_json: bool) -> None:
    has_tags = any(c.files is not None for c in found)
    fault = latest_fault(directory) if has_tags else ""
    if as_json:
        about = {"directory": directory, "checkpoints": list(map(asdict, found))}
        print_json(about | ({"latest_fault": fault or None} if has_tags else {}))
        return
    numbers = ("step", "age", "size", *["files", "ranks"] * has_tags)
    table = columns("name", *numbers, "", right=numbers, wrap=("",))
    for c in found:
        cells = [_or_dash(c.step), age(c.modified), size(c.bytes), *[_or_dash(c.files), _or_dash(c.ranks)] * has_tags]
        table.add_row(plain(c.name), *cells, plain(c.note), style="bold" if c.newest else None)
    show(table)
    if fault:
        say((plain(fault), "yellow"))


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def checkpoint_row(c: Checkpoint) -> dict[str, Any]:
    """Describes a checkpoint in JSON."""
    about: dict[str, Any] = {
        "name": c.path.name,
        "step": None if c.step == NO_STEP else c.step,
        "sequence": c.sequence,
        "parent": c.parent,
    }
    metrics = {name: value if math.isfinite(value) else None for name, value in c.metrics.items()}
    about |= {"created": c.created, "bytes": c.nbytes, "world_size": c.world_size}
    return about | {"metrics": metrics, "pinned": c.pinned}


def _metrics(c: Checkpoint) -> str:
    return ", ".join(f"{plain(name)} {value:.4g}" for name, value in c.metrics.items()) or "-"
