"""``lazyckpt prune``, ``pin`` and ``unpin``: prints what retention removes and keeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lazyckpt.cli.ls import checkpoint_row
from lazyckpt.cli.output import age, columns, print_json, say, show
from lazyckpt.cli.parameters import AsJson, Found, RunFolder, completed_from, flag, placed
from lazyckpt.storage.manifest import NO_STEP, Checkpoint
from lazyckpt.stores.store import AnyPath
from lazyckpt.tools import prune as tool
from lazyckpt.tools.deepspeed import Tag
from lazyckpt.tools.listing import list_run
from lazyckpt.tools.units import count, plain, size

_COLUMNS = ("step", "sequence", "age", "size", "name", "why")


def prune(
    directory: RunFolder,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", help="Keep so many checkpoints, counted back from the newest.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="K", help="Also keep those whose step is a multiple of this.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option(metavar="N", help="Also keep so many with the best metric; needs --best.")
    ] = None,
    best: Annotated[str | None, typer.Option(metavar="METRIC", help="The metric that decides, such as loss.")] = None,
    mode: Annotated[
        str, typer.Option(metavar="min|max", help="Whether the lowest or the highest is the best.")
    ] = "min",
    yes: Annotated[bool, flag("--yes", "-y", help="Remove; without it, only show what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what retention would remove and what dead runs left; with --yes, remove it.

    The rules are those of the Checkpointer: --keep-last counts along the line of checkpoints that led to the newest,
    and then includes the newest others if that line is shorter. Without --keep-last only leftovers go.

    The newest checkpoint, pinned ones ('lazyckpt pin'), broken ones and those being written always stay. Of DeepSpeed,
    the newest complete tag, incomplete ones and the one that 'latest' names.
    """
    found = tool.prune(
        placed(directory),
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        best=best,
        mode=mode,  # type: ignore[arg-type]  # Config checks it
        remove=yes,
    )
    doomed, kept = found.doomed, found.kept
    if as_json:
        about: dict[str, Any] = {"directory": directory, "removed": yes, "bytes": found.bytes}
        for key, part in (("checkpoints", doomed), ("kept", kept)):
            about[key] = [_row(c) | {"why": why} for c, why in part.items()]
        print_json(about | {"leftovers": [leftover.name for leftover in found.leftovers]})
        return
    if doomed or found.leftovers:
        table = columns(*_COLUMNS, right=_COLUMNS[:4])
        for c, why in doomed.items():
            sequence = "-" if isinstance(c, Tag) else str(c.sequence)
            step = "-" if c.step in (None, NO_STEP) else str(c.step)
            table.add_row(step, sequence, age(c.created), size(c.nbytes), plain(c.path.name), plain(why))
        for leftover in found.leftovers:
            table.add_row("-", "-", "-", size(leftover.bytes), plain(leftover.name), "left by a process that died")
        show(table)
    what = f"{count(len(doomed), 'checkpoint')} and {count(len(found.leftovers), 'leftover')}"
    stay = f"{count(len(kept), 'checkpoint')} of {size(sum(c.nbytes for c in kept))}"
    if yes:
        say(f"removed {what}, {size(found.bytes)}; kept {stay}")
    elif not doomed and not found.leftovers:
        say(f"nothing to remove; keep {stay}", "" if keep_last is not None else " (--keep-last N keeps only N)")
    else:
        say(f"would remove {what}, {size(found.bytes)}; keep {stay}")
        say(("nothing is removed yet: --yes does it", "yellow"))


def _row(c: Checkpoint | Tag) -> dict[str, Any]:
    if isinstance(c, Checkpoint):
        return checkpoint_row(c)
    about = {"name": c.path.name, "step": c.step, "created": c.created, "bytes": c.nbytes}
    return about | {"world_size": c.world_size, "faults": c.faults}


def _steps(directory: Path, *, pinned: bool) -> Found:
    for c in list_run(placed(directory)).checkpoints:
        if c.pinned == pinned:
            yield str(c.step), f"{age(c.created)} ago, {size(c.nbytes)}"


def _step(*, pinned: bool) -> Any:
    steps = completed_from("directory", partial(_steps, pinned=pinned))
    return typer.Argument(metavar="STEP", min=0, help="The step of the checkpoint.", autocompletion=steps)


def pin(directory: RunFolder, step: Annotated[int, _step(pinned=False)], as_json: AsJson = False) -> None:
    """Keep a checkpoint, whatever keep_last, keep_every and 'lazyckpt prune' say.

    Running Checkpointers respect it too. A pin belongs to the step, and stays when that is saved again.
    """
    _tell(tool.pin(placed(directory), step), True, as_json)


def unpin(directory: RunFolder, step: Annotated[int, _step(pinned=True)], as_json: AsJson = False) -> None:
    """Undo 'lazyckpt pin': retention decides again."""
    _tell(tool.unpin(placed(directory), step), False, as_json)


def _tell(checkpoint: AnyPath, pinned: bool, as_json: bool) -> None:
    if as_json:
        print_json({"path": checkpoint, "pinned": pinned})
    else:
        say(f"{plain(checkpoint)} is {'pinned' if pinned else 'not pinned'}")
