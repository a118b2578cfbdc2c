"""``lazyckpt prune``: removes what retention would, and what dead runs left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lazyckpt import commit
from lazyckpt.catalog import Checkpoint, pin_of, read_checkpoint, superfluous
from lazyckpt.cli.ls import catalog_of, leftovers
from lazyckpt.cli.output import age, columns, count, plain, print_json, show, size, stdout
from lazyckpt.config import Config
from lazyckpt.errors import LoadError


def prune(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", help="Checkpoints to keep, counted back from the newest.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="K", help="Besides, keep those whose step is a multiple of this.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove; without it, only show what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what retention would remove, and what dead runs left; with --yes, remove it.

    The rules are the Checkpointer's: --keep-last counts back from the newest along the checkpoints that led to it, so
    those of a branch that was rolled back go first. Kept in any case: the newest, what is pinned ('lazyckpt pin'), what
    is broken, what a process is writing now. Without --keep-last only leftovers go.
    """
    Config(keep_last=keep_last, keep_every=keep_every)  # complains about what makes no sense
    catalog = catalog_of(directory)
    known = catalog.scan()
    doomed = superfluous(known, keep_last, keep_every)
    trash = [leftover for leftover in leftovers(directory) if leftover["state"] == "abandoned"]
    if yes:
        doomed = [checkpoint for checkpoint in doomed if _remove(checkpoint)]
        swept = {path.name for path in commit.sweep(directory)}
        trash = [leftover for leftover in trash if leftover["name"] in swept]
        commit.sync_path(directory)
    gone = {checkpoint.sequence for checkpoint in doomed}
    kept = [checkpoint for checkpoint in known if checkpoint.sequence not in gone]
    nbytes = sum(checkpoint.nbytes for checkpoint in doomed) + sum(leftover["bytes"] for leftover in trash)
    if as_json:
        print_json(
            {
                "directory": str(directory),
                "removed": yes,
                "bytes": nbytes,
                "checkpoints": [_row(checkpoint) for checkpoint in doomed],
                "leftovers": [leftover["name"] for leftover in trash],
                "kept": [_row(checkpoint) for checkpoint in kept],
            }
        )
        return
    _show(doomed, trash)
    console = stdout()
    what = f"{count(len(doomed), 'checkpoint')} and {count(len(trash), 'leftover')}, {size(nbytes)}"
    stay = f"{count(len(kept), 'checkpoint')} of {size(sum(c.nbytes for c in kept))}"
    if yes:
        console.print(f"removed {what}; kept {stay}")
    elif not doomed and not trash:
        why = "" if keep_last is not None else " (--keep-last N says how many are to be kept)"
        console.print(f"nothing to remove; keep {stay}{why}")
    else:
        console.print(f"would remove {what}; keep {stay}")
        console.print(Text("nothing is removed yet: --yes does it", style="yellow"))


def _show(doomed: list[Checkpoint], trash: list[dict[str, Any]]) -> None:
    if not doomed and not trash:
        return
    table = columns("step", "sequence", "age", "size", "name", right=("step", "sequence", "age", "size"))
    for checkpoint in doomed:
        step, sequence = str(checkpoint.step), str(checkpoint.sequence)
        table.add_row(step, sequence, age(checkpoint.created), size(checkpoint.nbytes), checkpoint.path.name)
    for leftover in trash:
        table.add_row("-", "-", "-", size(leftover["bytes"]), plain(leftover["name"]))
    show(stdout(), table)


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    row = {"name": checkpoint.path.name, "step": checkpoint.step, "sequence": checkpoint.sequence}
    return row | {"bytes": checkpoint.nbytes, "pinned": checkpoint.pinned}


def _remove(checkpoint: Checkpoint) -> bool:
    """False if it is not to be removed after all: a run that goes on saved that step again, or removed it; or somebody
    has just pinned it."""
    trash = commit.hide(checkpoint.path)
    if trash is None:
        return False
    try:
        found = read_checkpoint(trash).sequence
    except LoadError:
        found = None
    if found != checkpoint.sequence or os.path.lexists(pin_of(checkpoint.path)):
        os.rename(trash, checkpoint.path)
        return False
    commit.unlink(trash)
    return True
