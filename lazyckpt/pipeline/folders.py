"""The folders that a Saver saves into: makes, sweeps and stages them."""

from __future__ import annotations

import os
from pathlib import Path

from lazyckpt.errors import save_error
from lazyckpt.storage import commit, folders, mounts, removal
from lazyckpt.storage.in_place import InPlaceStaging


class Folders:
    """The folders that one Saver has prepared. One thread at a time may call."""

    def __init__(self) -> None:
        self.swept: set[Path] = set()

    def prepare(self, folder: Path, target: Path, step: int | None) -> None:
        """Makes ``folder`` for ``target`` and removes what dead processes left in it, once. Raises SaveError."""
        if folder in self.swept:
            return
        try:
            folders.make_folder(folder)
            removal.sweep(folder)
        except OSError as error:
            raise save_error(error, path=target, step=step) from error
        self.swept.add(folder)

    def stage(self, target: Path, inside: Path | None, step: int | None) -> commit.Staging:
        """Makes the temporary folder of ``target``, in ``inside`` if that is on the same mount. Raises SaveError.

        Follows a symbolic link. Stages inside a target that cannot be renamed."""
        try:
            if target.is_symlink() or target.name == "..":
                target = Path(os.path.realpath(target, strict=True))
            if mounts.is_fixed(target):
                return self._stage_in_place(target, step)
            self.prepare(target.parent, target, step)
            if inside is not None:
                self.prepare(inside, target, step)
                if not mounts.on_one_mount(inside, target.parent):
                    inside = None
            staging = commit.Staging(target, inside, keep_others=True)
            try:
                replaceable = not target.is_dir() or staging.may_replace()
            except OSError:
                staging.discard()
                raise
            if replaceable:
                return staging
            staging.discard()
            return self._stage_in_place(target, step)
        except OSError as error:
            raise save_error(error, path=target, step=step) from error

    def _stage_in_place(self, target: Path, step: int | None) -> commit.Staging:
        self.prepare(target, target, step)
        return InPlaceStaging(target)
