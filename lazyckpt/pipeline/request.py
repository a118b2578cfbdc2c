"""What one save is for: the place of its files, and how they become a committed checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazyckpt.pipeline.lineage import About, Lineage
from lazyckpt.storage import commit


class Request(ABC):
    """One save. Holds no tensor: the plans (plan.py) hold the state, and only until it is copied.

    Except ``abandon``, the methods run on a background thread, those of different saves in the order of the saves.
    """

    def __init__(self, path: Path, step: int | None) -> None:
        self.path = path
        self.step = step

    @abstractmethod
    def stage(self) -> commit.Staging:
        """Makes the temporary folder. Saves may be staged in any order. Raises OSError."""

    def manifest(self, files: list[tuple[str, int, int]]) -> dict[str, Any] | None:
        """What the manifest says of the files (name, bytes, CRC-32), or None for no manifest."""
        return None

    def published(self) -> None:  # noqa: B027  # nothing to note by default
        """Notes that the files have their final names."""

    def superfluous(self) -> Iterable[Path]:
        """The checkpoints that retention drops now."""
        return ()

    def abandon(self) -> None:  # noqa: B027
        """Called instead of ``stage`` if the save failed before the background had it."""


class FileRequest(Request):
    """A lone file."""

    def stage(self) -> commit.Staging:
        return commit.FileStaging(self.path)


class FolderRequest(Request):
    """A folder that was staged before the save."""

    def __init__(self, staging: commit.Staging, step: int | None) -> None:
        super().__init__(staging.target, step)
        self._staging = staging

    def stage(self) -> commit.Staging:
        return self._staging

    def abandon(self) -> None:
        self._staging.discard()


class CheckpointRequest(Request):
    """A numbered checkpoint of a Checkpointer."""

    def __init__(self, path: Path, step: int, lineage: Lineage, about: About) -> None:
        super().__init__(path, step)
        self._about = about
        self._step = step
        self._lineage = lineage

    def stage(self) -> commit.Staging:
        return commit.Staging(self.path)

    def manifest(self, files: list[tuple[str, int, int]]) -> dict[str, Any]:
        return self._lineage.manifest(self._step, files, self._about)

    def published(self) -> None:
        self._lineage.published()

    def superfluous(self) -> Iterable[Path]:
        return self._lineage.superfluous()
