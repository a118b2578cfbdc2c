"""``lazyckpt ls``: the checkpoints of a run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import age, columns, plain, print_json, show, size, stdout
from lazyckpt.errors import LoadError, ReadError, load_error
from lazyckpt.storage import folders, manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import Checkpoint, pin_of
from lazyckpt.tools.contents import inside


def ls(
    directory: Annotated[Path, path_argument("DIR", "The folder of a run.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the checkpoints of a run, newest first: step, age, size, whether it is pinned.

    Newest is the one saved last, whatever its step. A checkpoint is ok if its manifest can be read and its files
    have the lengths told there; only 'lazyckpt verify' reads the files.
    """
    catalog = catalog_of(directory)
    checkpoints = catalog.scan()
    rows = [_row(checkpoint, newest=index == 0) for index, checkpoint in enumerate(checkpoints)]
    rows += sorted((_broken_row(directory, error) for error in catalog.broken), key=lambda row: row["name"])
    found = leftovers(directory)
    if as_json:
        print_json({"directory": str(directory), "checkpoints": rows, "leftovers": found})
        return
    console = stdout()
    if not rows:
        where = inside(directory) or " (what trainers saved: lazyckpt verify)"
        console.print(Text(f"no checkpoints in {plain(directory)}: a Checkpointer has not saved there{plain(where)}"))
    else:
        table = columns("step", "sequence", "parent", "age", "size", "state", right=_NUMBERS, wrap=("state",))
        ages = {row["name"]: age(checkpoint.created) for row, checkpoint in zip(rows, checkpoints, strict=False)}
        for row in rows:
            table.add_row(
                _cell(row["step"]),
                _cell(row["sequence"]),
                _cell(row["parent"]),
                ages.get(row["name"], "-"),
                size(row["bytes"]),
                _state(row),
                style="bold" if row["newest"] else None,
            )
        show(console, table, spared=("sequence", "parent"))
    for leftover in found:
        name = f"{plain(leftover['name'])} ({size(leftover['bytes'])})"
        console.print(Text(f"{name}: {_LEFTOVER[leftover['state']]}", style="yellow"))


def catalog_of(directory: Path) -> Catalog:
    """Raises LoadError if a checkpoint is given in place of the folder it is in, and for what is no folder; ReadError
    for one that cannot be read."""
    try:
        os.scandir(directory).close()
    except OSError as error:
        raise load_error("cannot be read", error, path=directory) from error
    if os.path.isfile(directory / manifest.MANIFEST):
        raise LoadError("a checkpoint itself; give the folder it is in, or use 'lazyckpt inspect'", path=directory)
    return Catalog(directory)


_NUMBERS = ("step", "sequence", "parent", "age", "size")
_LEFTOVER = {
    "in use": "being written now",
    "abandoned": "left by a run that died; swept when a Checkpointer opens the folder",
    "unknown": "a file of lazyckpt.save: being written, or left by a process that died",
}


def _row(checkpoint: Checkpoint, *, newest: bool) -> dict[str, Any]:
    return {
        "name": checkpoint.path.name,
        "step": checkpoint.step,
        "sequence": checkpoint.sequence,
        "parent": checkpoint.parent,
        "created": checkpoint.created.isoformat(),
        "bytes": checkpoint.nbytes,
        "ok": True,
        "unreadable": False,
        "newest": newest,
        "pinned": checkpoint.pinned,
        "reason": None,
    }


def _broken_row(directory: Path, error: LoadError) -> dict[str, Any]:
    folder = error.path if error.path.parent == directory else error.path.parent
    return {
        "name": folder.name,
        "step": int(folder.name.removeprefix("step-")),
        "sequence": None,
        "parent": None,
        "created": None,
        "bytes": _bytes_on_disk(folder),
        "ok": False,
        "unreadable": isinstance(error, ReadError),  # it may be whole
        "newest": False,
        "pinned": os.path.lexists(pin_of(folder)),
        "reason": str(error).removeprefix(f"{error.path}: "),
    }


def _cell(number: int | None) -> str:
    return "-" if number is None else str(number)


def _state(row: dict[str, Any]) -> Text:
    pinned = ", pinned" if row["pinned"] else ""
    if not row["ok"]:
        word = "unreadable: " if row["unreadable"] else "broken: "
        return Text.assemble((word, "bold red"), plain(row["reason"]), pinned)
    return Text.assemble(("ok", "green"), ", newest" if row["newest"] else "", pinned)


def leftovers(directory: Path) -> list[dict[str, Any]]:
    """What is staged, or was when its process died. A staged folder is locked by its process for its lifetime."""
    found = []
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if not folders.is_unfinished(entry.name):
            continue
        path = Path(entry.path)
        if not entry.is_dir(follow_symlinks=False):
            state = "unknown"
        elif entry.name.startswith(folders.TRASH) or not _is_locked(path):
            state = "abandoned"
        else:
            state = "in use"
        found.append({"name": entry.name, "bytes": _bytes_on_disk(path), "state": state})
    return found


def _is_locked(folder: Path) -> bool:
    """Whether a live process holds the lock of a staged folder. A shared lock, let go at once: nobody is disturbed."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # published or swept by now
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def _bytes_on_disk(path: Path) -> int:
    """Lengths of the files in a folder, or of one file. What vanishes meanwhile (a commit) counts nothing."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            return sum(os.lstat(entry.path).st_size for entry in os.scandir(path))
        return os.lstat(path).st_size
    except OSError:
        return 0
