"""Refuses to read temporary and trash folders of a dead process, and names a checkpoint to read instead."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from lazyckpt.errors import LoadError
from lazyckpt.storage import folders, hidden, locks

_DIGITS = re.compile(r"\d+")
_NUMBERED = re.compile(r"[A-Za-z][\w.=]*[-_=]\d+.*")  # as trainers name checkpoints


def refuse(path: str | os.PathLike[str]) -> None:
    """Raises LoadError for a path that is, or lies in, a checkpoint whose process ended before it had published or
    removed it; and for a place (hidden.py)."""
    full = Path(os.path.abspath(path))
    for part in (full, *full.parents):
        if folders.is_unfinished(part.name):
            if locks.is_held(part):  # by a live process, maybe this one, which knows what it may read
                continue
            name: str | None = folders.target_of(part.name)
            root = part.parent
        elif hidden.is_place(part / "staged") or hidden.is_place(part):
            name, root = None, part
        else:
            continue
        if hidden.is_place(root):
            root = root.parent.parent
        elif hidden.is_place(root / "staged"):
            root = root.parent
        what = "was being removed" if part.name.startswith(folders.TRASH) else "was never finished"
        whole = _newest(root, name)
        instead = f"the newest whole one is {whole}" if whole is not None else "there is no whole one beside it"
        raise LoadError(f"a temporary name: this checkpoint {what}, since its process ended; {instead}", path=path)


def _newest(root: Path, name: str | None) -> Path | None:
    """The checkpoint in ``root``, or in ``root/checkpoints`` (Accelerate), with the highest number; if ``name``
    is given, among those with names like it."""
    found: list[tuple[list[int], Path]] = []
    for folder in (root, root / "checkpoints"):
        with contextlib.suppress(OSError):
            for other in os.listdir(folder):
                like = _NUMBERED.fullmatch(other) if name is None else _shape(other) == _shape(name)
                if like and not folders.is_unfinished(other):
                    found.append(([int(digits) for digits in _DIGITS.findall(other)], folder / other))
    return max(found, default=(None, None))[1]


def _shape(name: str) -> str:
    return _DIGITS.sub("#", name)
