"""A place that holds checkpoints beside the folder of the run: what ``uploads`` and ``restore`` ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from lazyckpt.errors import LoadError
from lazyckpt.storage.manifest import Checkpoint, FileEntry

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from lazyckpt.tiers.others import Others

Parts = Callable[[FileEntry], Iterator["Buffer"]]  # the bytes of a file of the checkpoint that is uploaded, verified


class Tier(ABC):
    """One place. One thread at a time calls. All methods raise OSError, those that read LoadError, too."""

    copies_at_once = False
    """Whether ``upload`` is done with a part when it asks for the next one."""

    @property
    def heard(self) -> float:
        """When it last answered, as time.monotonic(). Any thread may ask."""
        return 0.0

    broken: list[LoadError]
    """The checkpoints that the last ``checkpoints()`` could not read."""

    @abstractmethod
    def run(self) -> str | None:
        """The id of the run that it belongs to; None if it is new."""

    @abstractmethod
    def belong(self, run: str) -> str:
        """Makes it belong to ``run``, unless it belongs to one already; returns the one that it belongs to."""

    @abstractmethod
    def claim(self) -> None:
        """Makes it a place to which this process uploads: ``upload`` of another that has claimed it raises
        MirrorError from now on."""

    @abstractmethod
    def release(self) -> None:
        """Undoes ``claim``, unless another process has claimed it since."""

    @abstractmethod
    def checkpoints(self) -> list[Checkpoint]:
        """The committed checkpoints, in any order."""

    def has(self, step: int, sequence: int) -> bool:
        """Whether the weights of this checkpoint were published there."""
        return any((c.layout, c.step, c.sequence) == ("folder", step, sequence) for c in self.checkpoints())

    @abstractmethod
    def upload(self, checkpoint: Checkpoint, text: bytes, parts: Parts, others: Others | None = None) -> None:
        """Commits a copy of ``checkpoint``, unless it is there; ``text``: of its manifest. It appears whole or not at
        all. ``others``: the ranks that upload some of its files with ``share``."""

    @abstractmethod
    def share(self, checkpoint: Checkpoint, files: Sequence[FileEntry], parts: Parts, place: str) -> None:
        """Uploads these files of a checkpoint that another process commits, those that are not there. ``place``: what
        ``upload`` has told there."""

    @abstractmethod
    def mend(self, checkpoint: Checkpoint, files: Sequence[FileEntry], parts: Parts) -> None:
        """Undoes what ``share`` may have done to a committed checkpoint of the same step: it was late, and its files
        took the place of newer ones."""

    @abstractmethod
    def remove(self, checkpoint: Checkpoint) -> None:
        """Removes a checkpoint, of which no half is ever seen."""

    @abstractmethod
    def tidy(self) -> None:
        """Removes what uploads have left that were cut off a day ago. Call it after ``checkpoints``."""
