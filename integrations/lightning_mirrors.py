"""What of Lightning's checkpoints comes from mirrors: the file of a URL, and the newest where the folder has none."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

import lazyckpt
from lazyckpt.storage import folders
from lazyckpt.stores.store import AnyPath


class Mirrored:
    """The mirrors of a ``LazyCheckpointIO``."""

    mirrors: list[Any]  # as they were given
    _resumed: tuple[Path, int | None] | None  # the file that was loaded last, and its step

    def _own_saver(self) -> lazyckpt.Saver | None:
        raise NotImplementedError

    def keep_best(self, paths: Iterable[str]) -> None:
        """For the callback: the mirrors keep these, whatever their retention."""
        if (saver := self._own_saver()) is not None:
            saver.keep_mirrored(os.path.basename(path) for path in paths)

    def _note_resumed(self, target: Path, loaded: Any) -> None:
        """Notes that training may go on from a file: a mirror that lacks it gets it."""
        step = loaded.get("global_step") if isinstance(loaded, dict) else None
        self._resumed = target, step if isinstance(step, int) else None
        if (saver := self._own_saver()) is not None:
            saver.resumed(*self._resumed)


def check_mirrors(mirrors: Iterable[Any]) -> None:
    """Raises ConfigError for mirrors of weights."""
    if not mirrors:
        return
    from lazyckpt.tiers.mirror import mirrors_of

    for mirror in mirrors_of(mirrors):
        if mirror.what != "all":
            raise lazyckpt.ConfigError(
                f"Mirror({mirror}): what={mirror.what!r}: a checkpoint of Lightning holds no safetensors; `lazyckpt "
                "convert` makes them of it"
            )


def in_mirror(path: Any, mirrors: Iterable[Any]) -> AnyPath | None:
    """The place of a URL below one of the mirrors; None for others."""
    if not mirrors:
        return None
    from lazyckpt.tiers.mirror import mirrors_of
    from lazyckpt.tiers.mirrors import below

    return below(mirrors_of(mirrors), path)


def pull_newest(mirrors: Iterable[Any], folder: Path) -> Path | None:
    """Copies the newest checkpoint of the mirrors into ``folder``; returns where it is there. Every rank may call this:
    those of one node wait for each other. Raises LoadError."""
    from lazyckpt.tiers.mirror import mirrors_of
    from lazyckpt.tools import remote

    folders.make_folder(folder)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = remote.pull_newest(mirrors_of(mirrors), folder)
    finally:
        os.close(lock)
    if found is not None:
        rank_zero_info(f"{found.name} was copied from a mirror into {folder}")
    return found
