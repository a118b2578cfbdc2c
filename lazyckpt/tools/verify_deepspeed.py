"""Verifies the checkpoints of DeepSpeed: their files, that none is missing, and that ``latest`` names a whole one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from lazyckpt.errors import CorruptFileError, LoadError, ReadError, UnsupportedFormatError
from lazyckpt.formats import sniff
from lazyckpt.stores.store import AnyPath
from lazyckpt.tools import Progress, deepspeed
from lazyckpt.tools.checksums import Finding, verify_file
from lazyckpt.tools.deepspeed import LATEST, LATEST_UNIVERSAL, Tag

_LEGACY = (
    "has no checksums, so damage cannot be found: it is of torch's format before 1.6, which DeepSpeed writes with "
    "checkpoint_serialization: false"
)


def whole(folder: Path) -> Tag:
    """Verifies the checkpoint in the folder of a tag, and returns it if all its files are there and every checksum is
    right.

    Raises CorruptFileError, which names the faults; UnsupportedFormatError if files have no checksums; ReadError if the
    operating system does not let a file be read; LoadError if there is no checkpoint.
    """
    damage = [f"{os.path.relpath(part.path, folder)}: {line}" for part in verify_tag(folder) for line in part.damage]
    if damage:
        raise CorruptFileError("; ".join(damage), path=folder)
    return deepspeed.open_tag(folder)


def verify_tag(folder: Path, progress: Progress = lambda name, done, total: None) -> list[Finding]:
    """Verifies each file of a tag. A missing one is damage, so that the others are verified.

    Raises UnsupportedFormatError for a file without checksums, and ReadError for one that cannot be read, unless others
    are damaged. Raises LoadError if there is no checkpoint."""
    tag = deepspeed.open_tag(folder)
    parts = [Finding(folder / name, "damaged", damage=("missing",)) for name in tag.missing if name != "…"]
    parts += [Finding(folder / name, "damaged", damage=(deepspeed.STALE,)) for name in tag.stale]
    unread: list[LoadError] = []
    for name in tag.files:
        file = folder / name
        try:
            if sniff(file) == "torch_legacy":
                unread.append(UnsupportedFormatError(_LEGACY, path=file))
            else:
                parts.append(verify_file(file, progress))
        except ReadError as error:
            unread.append(error)
        except LoadError as error:
            parts.append(Finding(file, "damaged", damage=(error.what,)))
    if not os.path.isdir(folder):
        raise LoadError("removed while it was verified", path=folder)
    damaged = any(part.damage for part in parts)
    if unread and not damaged:
        raise unread[0]
    parts += [Finding(Path(error.path), "damaged", damage=(error.what,)) for error in unread]
    if tag.unread and not damaged:  # right checksums, but not the contents that DeepSpeed writes
        parts.append(Finding(folder, "damaged", damage=(tag.unread,)))
    return parts


def verify_latest(save_dir: Path, states: Mapping[AnyPath, str]) -> Iterator[Finding]:
    """Yields a finding if a file of ``save_dir`` names a tag that is missing or damaged. ``states``: those of the tags,
    by path."""
    states = {Path(os.path.realpath(path)): state for path, state in states.items()}  # latest may name a link
    for name in (LATEST, LATEST_UNIVERSAL):
        try:
            folder = deepspeed.named(save_dir, name)
        except ReadError as error:
            yield Finding(save_dir / name, "unreadable", damage=(str(error),))
        except LoadError as error:
            yield Finding(save_dir / name, "damaged", damage=(f"{error.what}{_instead(save_dir, states)}",))
        else:
            if folder is not None and states.get(Path(os.path.realpath(folder))) == "damaged":
                what = f"names {folder.relative_to(save_dir)}, which is damaged{_instead(save_dir, states)}"
                yield Finding(save_dir / name, "damaged", damage=(what,))


def _instead(save_dir: Path, states: Mapping[AnyPath, str]) -> str:
    whole = [tag.path.name for tag in deepspeed.tags(save_dir) if states.get(Path(os.path.realpath(tag.path))) == "ok"]
    return f"; the newest whole tag is {whole[0]}" if whole else ""
