"""What one save is for: the place of its files, and how they become a committed checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazyckpt.pipeline.lineage import Lineage
from lazyckpt.storage.commit import FileStaging, Staging


class Request:
    """One save: of a lone file, or of the folder ``staging``. Holds no tensor: the plans (plan.py) hold the state, and
    only until it is copied.

    Except ``abandon``, the methods run on a background thread, those of different saves in the order of the saves.
    """

    def __init__(self, path: Path, step: int | None, staging: Staging | None = None) -> None:
        self.path = path
        self.step = step
        self._staging = staging

    def stage(self) -> Staging:
        """Returns the temporary folder. Saves may be staged in any order. Raises OSError."""
        return self._staging or FileStaging(self.path)

    def manifest(self, files: list[tuple[str, int, int]]) -> dict[str, Any] | None:
        """What the manifest says of the files (name, bytes, CRC-32), or None for no manifest."""
        return None

    def published(self) -> None:
        """Notes that the files have their final names."""

    def superfluous(self) -> Iterable[Path]:
        """The checkpoints that retention drops now."""
        return ()

    def abandon(self) -> None:
        """Called instead of ``stage`` if the save failed before the background had it."""
        if self._staging is not None:
            self._staging.discard()


class CheckpointRequest(Request):
    """A numbered checkpoint of a Checkpointer."""

    def __init__(self, path: Path, step: int, lineage: Lineage) -> None:
        super().__init__(path, step)
        self._lineage = lineage

    def stage(self) -> Staging:
        return Staging(self.path)

    def manifest(self, files: list[tuple[str, int, int]]) -> dict[str, Any]:
        assert self.step is not None
        return self._lineage.manifest(self.step, files)

    def published(self) -> None:
        self._lineage.published()

    def superfluous(self) -> Iterable[Path]:
        return self._lineage.superfluous()
