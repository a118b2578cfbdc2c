"""``lazyckpt prune``: removes what retention would, and what dead runs left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.ls import catalog_of, leftovers
from lazyckpt.cli.output import age, columns, count, plain, print_json, show, size, stdout
from lazyckpt.config import Config
from lazyckpt.errors import LoadError
from lazyckpt.storage import folders, removal
from lazyckpt.storage.manifest import Checkpoint, pin_of, read_checkpoint
from lazyckpt.storage.retention import Fate, retention


def prune(
    directory: Annotated[Path, path_argument("DIR", "The folder of a run.")],
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

    The rules are the Checkpointer's: --keep-last counts back from the newest along the checkpoints that led to it. If
    these are fewer, the newest of other branches stay, too, until there are that many. Kept in any case: the newest,
    what is pinned ('lazyckpt pin'), what is broken, what a process is writing now. Without --keep-last only leftovers
    go.
    """
    Config(keep_last=keep_last, keep_every=keep_every)  # complains about what makes no sense
    catalog = catalog_of(directory)
    known = catalog.scan()
    verdicts = retention(known, keep_last, keep_every)
    doomed = [checkpoint for checkpoint, verdict in verdicts.items() if not verdict.stays]
    trash = [leftover for leftover in leftovers(directory) if leftover["state"] == "abandoned"]
    if yes:
        changed = [checkpoint for checkpoint in doomed if not _remove(checkpoint)]
        verdicts |= dict.fromkeys(changed, Fate(True, "saved again, removed or pinned meanwhile"))
        doomed = [checkpoint for checkpoint in doomed if not verdicts[checkpoint].stays]
        swept = {path.name for path in removal.sweep(directory)}
        trash = [leftover for leftover in trash if leftover["name"] in swept]
        folders.sync_path(directory)
    gone = {checkpoint.sequence for checkpoint in doomed}
    kept = [checkpoint for checkpoint in known if checkpoint.sequence not in gone]
    nbytes = sum(checkpoint.nbytes for checkpoint in doomed) + sum(leftover["bytes"] for leftover in trash)
    if as_json:
        print_json(
            {
                "directory": str(directory),
                "removed": yes,
                "bytes": nbytes,
                "checkpoints": [_row(checkpoint, verdicts[checkpoint]) for checkpoint in doomed],
                "leftovers": [leftover["name"] for leftover in trash],
                "kept": [_row(checkpoint, verdicts[checkpoint]) for checkpoint in kept],
            }
        )
        return
    _show({checkpoint: verdicts[checkpoint].why for checkpoint in doomed}, trash)
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


def _show(doomed: dict[Checkpoint, str], trash: list[dict[str, Any]]) -> None:
    if not doomed and not trash:
        return
    table = columns("step", "sequence", "age", "size", "name", "why", right=("step", "sequence", "age", "size"))
    for checkpoint, why in doomed.items():
        step, sequence = str(checkpoint.step), str(checkpoint.sequence)
        table.add_row(step, sequence, age(checkpoint.created), size(checkpoint.nbytes), checkpoint.path.name, why)
    for leftover in trash:
        table.add_row("-", "-", "-", size(leftover["bytes"]), plain(leftover["name"]), "left by a process that died")
    show(stdout(), table)


def _row(checkpoint: Checkpoint, verdict: Fate) -> dict[str, Any]:
    row = {"name": checkpoint.path.name, "step": checkpoint.step, "sequence": checkpoint.sequence}
    return row | {"bytes": checkpoint.nbytes, "pinned": checkpoint.pinned, "why": verdict.why}


def _remove(checkpoint: Checkpoint) -> bool:
    """False if it is not to be removed after all: a run that goes on saved that step again, or removed it; or somebody
    has just pinned it."""

    def is_the_same(folder: Path) -> bool:
        try:
            found = read_checkpoint(folder).sequence
        except LoadError:
            return False
        return found == checkpoint.sequence and not os.path.lexists(pin_of(checkpoint.path))

    return removal.remove(checkpoint.path, is_the_same)
