"""``lazyckpt pin`` and ``unpin``: which checkpoints stay, whatever retention says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lazyckpt.cli.completion import Found, completed_from
from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.ls import catalog_of
from lazyckpt.cli.output import age, plain, print_json, size, stdout
from lazyckpt.errors import LoadError
from lazyckpt.storage import manifest, retention


def _steps(directory: Path, *, pinned: bool) -> Found:
    for checkpoint in catalog_of(directory).scan():
        if checkpoint.pinned == pinned:
            yield str(checkpoint.step), f"{age(checkpoint.created)} ago, {size(checkpoint.nbytes)}"


def _step(*, pinned: bool) -> Any:
    """Completed by those that it makes sense for."""
    steps = completed_from("directory", partial(_steps, pinned=pinned))
    return typer.Argument(metavar="STEP", min=0, help="Of the checkpoint.", autocompletion=steps)


_Directory = Annotated[Path, path_argument("DIR", "The folder of a run.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pin(directory: _Directory, step: Annotated[int, _step(pinned=False)], as_json: _Json = False) -> None:
    """Keep a checkpoint, whatever keep_last, keep_every and 'lazyckpt prune' say.

    A Checkpointer that is running heeds it, too. A pin belongs to the step: if that is saved again, it stays pinned.
    """
    checkpoint = catalog_of(directory).root / manifest.folder_name(step)
    if manifest.is_missing(checkpoint):
        raise LoadError("no such checkpoint", path=checkpoint)
    manifest.read_checkpoint(checkpoint)
    retention.pin(checkpoint)
    _tell(checkpoint, True, as_json)


def unpin(directory: _Directory, step: Annotated[int, _step(pinned=True)], as_json: _Json = False) -> None:
    """Undo 'lazyckpt pin': retention decides again."""
    checkpoint = catalog_of(directory).root / manifest.folder_name(step)
    if manifest.is_missing(checkpoint) and manifest.is_missing(manifest.pin_of(checkpoint)):
        raise LoadError("no such checkpoint", path=checkpoint)
    retention.unpin(checkpoint)
    _tell(checkpoint, False, as_json)


def _tell(checkpoint: Path, pinned: bool, as_json: bool) -> None:
    found: dict[str, Any] = {"path": str(checkpoint), "pinned": pinned}
    if as_json:
        print_json(found)
    else:
        stdout().print(f"{plain(checkpoint)} is {'pinned' if pinned else 'not pinned'}", soft_wrap=True)
