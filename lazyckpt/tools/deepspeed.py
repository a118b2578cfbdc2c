"""Finds the checkpoints of DeepSpeed in a folder. Neither imports DeepSpeed nor runs code from a file.

DeepSpeed saves into a folder for each tag, and then writes the tag into the file ``latest`` beside the folders. It
loads the tag that ``latest`` names. ``deepspeed_layout`` knows the files of a tag.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from lazyckpt.errors import LoadError, ReadError, load_error
from lazyckpt.formats import sniff
from lazyckpt.formats.reader import FileReader
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.storage.paths import is_alias
from lazyckpt.tools.deepspeed_layout import MOST_MISSING, UNIVERSAL, Layout, belongs

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"  # the tag of the checkpoint that ds_to_universal made last
STALE = "of an earlier save by other ranks"
_SCRIPT = "zero_to_fp32.py"  # DeepSpeed copies it beside the tags
_STEP = re.compile(r"(?:step|checkpoint)[-_=]?([0-9]{1,18})")
_MAX_LATEST_BYTES = 4096


@dataclass(frozen=True)
class Tag:
    """A checkpoint of DeepSpeed: the folder of a tag.

    Attributes:
        step: ``global_steps`` in a model file; if none can be read, the number in the tag, or None.
        world_size: How many ranks saved it, as a model file says; None if none can be read.
        files: The files that belong to it, relative to its folder.
        missing: The files that should be there but are not; at most ten, and "…" for more.
        stale: Files of an earlier save under this tag, by other ranks.
        unread: Why a model file could not be read; empty if it was.
        created: When its last file was written.
        nbytes: The bytes of all files in its folder.
        is_universal: Whether ds_to_universal made it.
    """

    path: Path
    step: int | None
    world_size: int | None
    files: tuple[str, ...]
    missing: tuple[str, ...]
    stale: tuple[str, ...]
    unread: str
    created: datetime
    nbytes: int
    is_universal: bool

    @property
    def wrong_names(self) -> tuple[str, ...]:
        """The faults that the names of its files show."""
        missing = [f"{name} is missing" if name != "…" else "more files are missing" for name in self.missing]
        return (*missing, *(f"{name} is {STALE}" for name in self.stale))

    @cached_property
    def faults(self) -> tuple[str, ...]:
        """Why it is incomplete: files that are missing, stale, or cut short. Compares no checksum."""
        return (*self.wrong_names, *filter(None, (_fault(self.path / name, name) for name in self.files)))


def _fault(file: Path, name: str) -> str:
    try:
        if sniff(file) == "torch_zip":
            read_directory(file)
        return ""  # an older format has no directory to look at
    except LoadError as error:
        return f"{name}: {error.what}"


def is_tag(folder: Path) -> bool:
    """Whether a folder holds a file of a checkpoint of DeepSpeed."""
    try:
        return any(map(belongs, os.listdir(folder)))
    except OSError:
        return False  # no folder, or another user's


def open_tag(folder: Path) -> Tag:
    """Describes the folder of a tag. Raises LoadError if it cannot be read, or holds no file of DeepSpeed."""
    try:
        stats = {path: status for path in folder.rglob("*") if (status := _stat_of(path)) is not None}
        modified = max((status.st_mtime for status in stats.values()), default=folder.stat().st_mtime)
    except OSError as error:
        raise load_error("cannot be read", error, path=folder) from error
    if not is_tag(folder):
        raise LoadError("no checkpoint of DeepSpeed: it holds none of its files", path=folder)
    names = [str(path.relative_to(folder)) for path in stats]
    is_universal = os.path.isdir(folder / UNIVERSAL)
    present = {name for name in names if belongs(name) or (is_universal and _is_universal_file(name))}
    layout = Layout(folder, present, universal=is_universal)
    stale = {name for name in present if layout.is_stale(name)}
    missing = layout.missing()
    step = _STEP.search(folder.name)
    return Tag(
        path=folder,
        step=int(step[1]) if layout.step is None and step is not None else layout.step,
        world_size=layout.world_size,
        files=tuple(sorted(present - stale)),
        missing=(*missing[:MOST_MISSING], *["…"] * (len(missing) > MOST_MISSING)),
        stale=tuple(sorted(stale)),
        unread=layout.unread,
        created=datetime.fromtimestamp(modified, timezone.utc),
        nbytes=sum(status.st_size for status in stats.values()),
        is_universal=is_universal,
    )


def _stat_of(path: Path) -> os.stat_result | None:
    """None if it is no file, or was removed meanwhile, or is a link that leads nowhere."""
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return status if stat.S_ISREG(status.st_mode) else None


def _is_universal_file(name: str) -> bool:
    return name.startswith(f"{UNIVERSAL}/") and name.endswith(".pt")


def tags(save_dir: Path) -> list[Tag]:
    """Returns the checkpoints of DeepSpeed in a folder, the highest step first; of equal ones, the one written last.

    Incomplete ones are among them; universal ones and links to others are not. Raises LoadError if the folder cannot
    be read."""
    try:
        folders = [save_dir / name for name in os.listdir(save_dir) if not name.startswith(".")]
    except OSError as error:
        raise load_error("cannot be read", error, path=save_dir) from error
    found = []
    for folder in folders:
        if is_tag(folder) and not is_alias(folder):
            try:
                found.append(open_tag(folder))
            except LoadError as error:
                if isinstance(error, ReadError) or os.path.lexists(folder):
                    raise  # otherwise a running job has removed it
    plain = [tag for tag in found if not tag.is_universal]
    return sorted(plain, key=lambda tag: (-1 if tag.step is None else tag.step, tag.created), reverse=True)


def is_save_dir(folder: Path) -> bool:
    """Whether DeepSpeed saves into this folder, even if all tags are gone. Raises LoadError if it cannot be read."""
    if tags(folder):
        return True
    try:
        told = latest(folder)
    except LoadError:
        return os.path.isfile(folder / _SCRIPT)
    return told is not None and (
        told.startswith("global_step") or is_tag(folder / told) or os.path.isfile(folder / _SCRIPT)
    )


def latest(save_dir: Path, name: str = LATEST) -> str | None:
    """Returns the tag in the file ``latest``; None if there is no such file.

    Raises LoadError if the file cannot be read, or names nothing inside of ``save_dir``."""
    file = save_dir / name
    if not os.path.lexists(file) or os.path.isdir(file):  # others link to their newest checkpoint
        return None
    with FileReader(file) as reader:
        text = reader.read(0, min(reader.size, _MAX_LATEST_BYTES))
        tag = text.decode(errors="replace").strip()
        if reader.size > _MAX_LATEST_BYTES or any(part in ("", ".", "..") for part in tag.split("/")) or "\0" in tag:
            shown = f"{tag[:60]!r}" + "…" * (len(tag) > 60)
            raise reader.corrupt(f"names {shown}, which is no folder in {save_dir}")
    return tag


def named(save_dir: Path, name: str = LATEST) -> Path | None:
    """Returns the folder of the tag that ``latest`` names; None if there is no such file. Raises LoadError if the file
    cannot be read, or no tag of that name is there."""
    tag = latest(save_dir, name)
    if tag is None:
        return None
    if not is_tag(save_dir / tag):
        raise LoadError(f"names {tag[:100]!r}, which is missing", path=save_dir / name)
    return save_dir / tag


def tag_in(path: Path) -> Tag | None:
    """Returns the tag that ``path`` is; or the one that DeepSpeed would load from it, the newest without ``latest``.

    None if there is none. Raises LoadError if ``latest`` names a tag that is missing."""
    if not os.path.isdir(path):
        return None
    if is_tag(path):
        return open_tag(path)
    if not is_save_dir(path):
        return None
    folder = named(path)
    return open_tag(folder) if folder is not None else next(iter(tags(path)), None)
