"""Lists the checkpoints of a run, and the remains of dead processes beside them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from lazyckpt.errors import LoadError, ReadError, load_error
from lazyckpt.storage import claim, folders, manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import DCP_METADATA, Checkpoint, pin_of
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.tools import deepspeed
from lazyckpt.tools.deepspeed_layout import belongs


@dataclass(frozen=True)
class BrokenCheckpoint:
    """A checkpoint whose manifest cannot be read, or whose files have other lengths."""

    path: Path
    step: int | None  # None: a trainer's
    bytes: int
    pinned: bool
    unreadable: bool  # the operating system refuses to read it; it may be whole
    reason: str


@dataclass(frozen=True)
class Leftover:
    """A temporary file or folder of ``bytes`` bytes. Whether the process of a lone file is alive cannot be known."""

    name: str
    bytes: int
    state: Literal["in use", "abandoned", "unknown", "uploading"]


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a run, the one saved last first; broken ones by name; and leftovers."""

    checkpoints: list[Checkpoint]
    broken: list[BrokenCheckpoint]
    leftovers: list[Leftover]


def list_run(directory: AnyPath) -> Listing:
    """Lists a run's folder or URL from its manifests; no other file is read. Raises LoadError if it is no run's."""
    if isinstance(directory, StorePath):
        return _list_url(directory)
    catalog = catalog_of(directory)
    checkpoints = catalog.scan()
    broken = sorted((_broken(directory, error) for error in catalog.broken), key=lambda broken: broken.path.name)
    return Listing(checkpoints, broken, leftovers(directory))


def _list_url(url: StorePath) -> Listing:
    from lazyckpt.tools.remote import scan

    found, errors, halves = scan(url)
    broken = []
    for error in errors:
        folder = error.path if error.path.parent == url else error.path.parent
        step = manifest.step_of(folder.name) if manifest.is_folder_name(folder.name) else None
        broken.append(BrokenCheckpoint(folder, step, 0, False, isinstance(error, ReadError), error.what))
    return Listing(found, broken, [Leftover(name, nbytes, "uploading") for name, nbytes in halves.items()])


@dataclass(frozen=True)
class TrainerCheckpoint:
    """A checkpoint that Lightning, Accelerate, the Hugging Face Trainer, torchtitan or DeepSpeed named.

    ``step`` is in its name, or in a file of DeepSpeed; None if it is not. ``modified`` is when its last file was
    written. ``note`` has further facts from its folder: which one is the best, and where a link leads. Only of
    DeepSpeed: ``files`` counts the files, ``ranks`` those that saved them, ``latest`` is whether DeepSpeed would load
    it, ``universal`` whether ds_to_universal made it, and ``faults`` say why it, or a tag inside of it, is incomplete.
    """

    name: str
    step: int | None
    modified: datetime
    bytes: int
    newest: bool = False
    note: str = ""
    files: int | None = None
    ranks: int | None = None
    latest: bool = False
    universal: bool = False
    faults: tuple[str, ...] = ()


_TRAINERS = re.compile(r"checkpoint[-_](\d+)|.*\.ckpt")  # checkpoint-500, checkpoint_3, epoch=1-step=200.ckpt
# Accelerate and dcp.save take any name; the examples of Accelerate use step_20 and epoch_1, torchtitan step-20.
_OF_ANY_NAME = re.compile(rf"random_states_\d+\.pkl|{re.escape(DCP_METADATA)}")
_STEP = re.compile(r"(?:step|checkpoint)[-_=]?(\d+)")


def list_trainer(directory: Path) -> list[TrainerCheckpoint]:
    """Lists the checkpoints of a trainer, the highest step first; nothing if there are none, or if a Checkpointer saved
    there."""
    try:
        entries = [entry for entry in os.scandir(directory) if _is_trainers(entry)]
        if any(manifest.is_folder_name(name) for name in os.listdir(directory)):
            return []
    except OSError:
        return []  # list_run() raises the reason
    named = None
    with contextlib.suppress(LoadError):  # latest_fault() tells it
        named = deepspeed.named(directory)
    found = []
    for entry in entries:
        try:
            found.append(_trainers(Path(entry.path), named))
        except LoadError as error:
            if isinstance(error, ReadError) or os.path.lexists(entry.path):
                raise
    found.sort(key=lambda c: (-1 if c.step is None else c.step, c.modified), reverse=True)
    best = _best_of(directory / found[0].name) if found else None
    newest = next((c.name for c in found if not c.faults and not c.universal), None)
    for at, c in enumerate(found):
        words = {"newest": c.name == newest, "latest": c.latest, "best": c.name == best, "universal": c.universal}
        notes = [*(word for word, holds in words.items() if holds), c.note]
        notes += [f"incomplete: {', '.join(c.faults)}"] * bool(c.faults)
        found[at] = replace(c, newest=c.name == newest, note=", ".join(filter(None, notes)))
    return found


def latest_fault(directory: Path) -> str:
    """Why DeepSpeed could not load from its folder: ``latest`` names a tag that is missing. Empty if it could, and for
    other folders. Raises LoadError."""
    if not deepspeed.is_save_dir(directory):
        return ""
    try:
        deepspeed.named(directory)
    except LoadError as error:
        return f"{deepspeed.LATEST} {error.what}"
    return ""


def _is_trainers(entry: os.DirEntry[str]) -> bool:
    if _TRAINERS.fullmatch(entry.name):
        return True
    try:
        names = os.listdir(entry.path)
        return not entry.name.startswith(".") and any(_OF_ANY_NAME.fullmatch(name) or belongs(name) for name in names)
    except OSError:
        return False  # a file, or another user's folder


def _trainers(path: Path, named: Path | None) -> TrainerCheckpoint:
    """Describes a checkpoint; ``named`` is the tag that DeepSpeed would load."""
    note = f"link to {os.readlink(path)}" if path.is_symlink() else ""
    if deepspeed.is_tag(path):
        tag = deepspeed.open_tag(path)
        return TrainerCheckpoint(
            path.name,
            tag.step,
            tag.created,
            tag.nbytes,
            note=note,
            files=len(tag.files),
            ranks=tag.world_size,
            latest=path == named,
            universal=tag.is_universal,
            faults=tag.faults,
        )
    told = _STEP.search(path.name)
    step = None if told is None else int(told[1])
    files = [path] if not path.is_dir() else [file for file in path.rglob("*") if not file.is_dir()]
    stats = [file.lstat() if file.is_symlink() else file.stat() for file in files]
    modified = max((stat.st_mtime for stat in stats), default=path.lstat().st_mtime)
    inner = deepspeed.tags(path) if path.is_dir() else []
    return TrainerCheckpoint(
        path.name,
        step,
        datetime.fromtimestamp(modified, timezone.utc),
        sum(s.st_size for s in stats),
        note=note,
        faults=tuple(f"{tag.path.name}: {fault}" for tag in inner for fault in tag.faults),
    )


def _best_of(newest: Path) -> str | None:
    """The name of the best checkpoint, as the newest one of the Hugging Face Trainer tells it."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        told = json.loads((newest / "trainer_state.json").read_text())["best_model_checkpoint"]
        return str(os.path.basename(told))
    return None


def catalog_of(directory: Path) -> Catalog:
    """Opens a run's folder. Raises LoadError if it is a checkpoint or no folder, ReadError if it cannot be read."""
    try:
        os.scandir(directory).close()
    except OSError as error:
        raise load_error("cannot be read", error, path=directory) from error
    if os.path.isfile(directory / manifest.MANIFEST) or deepspeed.is_tag(directory):
        raise LoadError("a checkpoint itself; give the folder it is in, or use 'lazyckpt inspect'", path=directory)
    return Catalog(directory)


def _broken(directory: Path, error: LoadError) -> BrokenCheckpoint:
    folder = error.path if error.path.parent == directory else error.path.parent
    return BrokenCheckpoint(
        path=folder,
        step=manifest.step_of(folder.name),
        bytes=_bytes_on_disk(folder),
        pinned=os.path.lexists(pin_of(folder)),
        unreadable=isinstance(error, ReadError),
        reason=error.what,
    )


def leftovers(directory: Path) -> list[Leftover]:
    """Returns the unfinished files in a run's folder: those being written, and the remains of dead processes."""
    found = []
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if not folders.is_unfinished(entry.name):
            continue
        path = Path(entry.path)
        state: Literal["in use", "abandoned", "unknown"] = "in use"
        if not entry.is_dir(follow_symlinks=False) or entry.name.startswith(folders.REPLACED):
            state = "unknown"
        elif entry.name.startswith(folders.TRASH) or not _is_locked(path):
            state = "abandoned"
        found.append(Leftover(entry.name, _bytes_on_disk(path), state))
    return found


def _is_locked(folder: Path) -> bool:
    """Whether a live process holds the lock of a staged folder. Asks with a shared lock, released at once."""
    if claim.is_shared(folder):
        return not claim.is_abandoned(folder)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # published or swept meanwhile
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def _bytes_on_disk(path: Path) -> int:
    """The length of a file, or of the files in a folder; 0 if a commit has renamed it meanwhile."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            return sum(os.lstat(entry.path).st_size for entry in os.scandir(path))
        return os.lstat(path).st_size
    except OSError:
        return 0
