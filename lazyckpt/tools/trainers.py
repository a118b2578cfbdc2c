"""Lists the checkpoints of a trainer's folder, which have no manifests."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from lazyckpt.errors import LoadError, ReadError
from lazyckpt.storage import manifest
from lazyckpt.storage.manifest import DCP_METADATA
from lazyckpt.tools import deepspeed
from lazyckpt.tools.deepspeed_layout import belongs


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
