"""The calls of a Checkpointer about the checkpoints of its run: list, find the best, pin, delete.

storage/catalog.py finds the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from lazyckpt.errors import ConfigError, LazyCkptError, LoadError, ReadError
from lazyckpt.storage import manifest, removal, retention
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.storage.retention import Best

_MAX_STEPS = 10  # in a message


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        step: The training step.
        path: Its folder.
        nbytes: Length of its files.
        created: When it was committed; None if that cannot be read.
        metrics: Those given to ``save``. One that was no finite number is NaN.
        pinned: Whether retention keeps it in any case.
        problem: Why it cannot be restored, "" if its manifest and the lengths of its files are right. Only
            ``lazyckpt.verify`` reads the files.
    """

    step: int
    path: Path
    nbytes: int
    created: datetime | None
    metrics: Mapping[str, float]
    pinned: bool
    problem: str = ""

    @property
    def age(self) -> timedelta | None:
        """The time since it was committed."""
        return None if self.created is None else datetime.now(timezone.utc) - self.created

    @property
    def is_whole(self) -> bool:
        return not self.problem


class History:
    """The calls of a Checkpointer about its checkpoints. Every call reads the folder; saves in flight do not count.
    Those that describe, pin or delete checkpoints do not ask mirrors."""

    directory: Path
    _catalog: Catalog
    _tiers: Catalog  # of the folder and the mirrors
    _best: Best | None
    _read_only: bool

    def steps(self, *, local: bool = False) -> list[int]:
        """The steps of the checkpoints that are whole, in ascending order.

        Asks the mirrors, too, unless it is to be ``local``: then only the folder. Raises LoadError if the folder cannot
        be read, and ReadError if there is no checkpoint and a mirror cannot be read."""
        return sorted({c.step for c in self._scan(local)})

    def latest_step(self, *, local: bool = False) -> int | None:
        """The step that ``restore()`` would take: of the checkpoint saved last, or chosen by ``rollback``. Otherwise as
        ``steps``."""
        known = self._scan(local)
        return known[0].step if known else None

    def best_step(self, *, local: bool = False) -> int | None:
        """The step that ``restore(best=True)`` would take. Raises ConfigError without ``best``. Otherwise as
        ``steps``."""
        found = self._checked_best().of(self._scan(local))
        return found[0].step if found else None

    def _scan(self, local: bool) -> list[Checkpoint]:
        return (self._catalog if local else self._tiers).scan()

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, the newest first, then those that are not whole."""
        whole = [_info(c) for c in self._catalog.scan()]
        return whole + [_broken(error) for error in self._catalog.broken]

    def checkpoint(self, step: int) -> CheckpointInfo:
        """Describes one checkpoint. Raises LoadError, which lists the steps, if there is none."""
        folder = self._folder_of(step)
        try:
            return _info(manifest.read_checkpoint(folder))
        except LoadError as error:
            return _broken(error, folder)

    def delete(self, step: int) -> None:
        """Removes a checkpoint, pinned or not; durable when this returns. Raises LoadError if there is none."""
        self._change("delete()", step, _remove)

    def pin(self, step: int) -> None:
        """Keeps a checkpoint in spite of ``keep_last``; durable when this returns. Raises LoadError if there is
        none."""
        self._change("pin()", step, retention.pin)

    def unpin(self, step: int) -> None:
        """Undoes ``pin``."""
        self._change("unpin()", step, retention.unpin)

    def _change(self, call: str, step: int, change: Callable[[Path], None]) -> None:
        self._refuse_read_only(call)
        folder = self._folder_of(step)
        try:
            change(folder)
        except OSError as error:
            raise LazyCkptError(f"{call}: {folder}: {error.strerror} ({error.errno})") from error

    def _folder_of(self, step: int) -> Path:
        """Raises LoadError, which lists the steps there are, if the folder of this step is missing."""
        folder = self.directory / manifest.folder_name(checked_step(step))
        if not manifest.is_missing(folder):
            return folder
        raise self._no_checkpoint(step, self.steps(local=True))

    def _no_checkpoint(self, step: int, steps: list[int]) -> LoadError:
        shown = ", ".join(map(str, steps[-_MAX_STEPS:])) or "none"
        what = f"there is no checkpoint of step {step}; there is: {'… ' * (len(steps) > _MAX_STEPS)}{shown}"
        return LoadError(what, path=self.directory)

    def _refuse_read_only(self, call: str) -> None:
        if self._read_only:
            raise ConfigError(f"{call}: the Checkpointer of {self.directory} is read_only")

    def _checked_best(self) -> Best:
        if self._best is None:
            raise ConfigError('the best checkpoint: give the Checkpointer best, the name of a metric such as "loss"')
        return self._best


def _remove(checkpoint: Path) -> None:
    retention.unpin(checkpoint)
    removal.remove(checkpoint)


def checked_step(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= manifest.MAX_NUMBER:
        raise ConfigError(f"step={step!r}: expected a whole number, at least 0 and of at most 63 bits")
    return int(step)


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Returns the metrics as floats. Raises ConfigError unless ``metrics`` maps names to numbers."""
    if metrics is None:
        return {}
    try:
        result = {name: float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"save: metrics={metrics!r}: expected numbers by name ({error})") from None
    if not all(isinstance(name, str) for name in result):
        raise ConfigError(f"save: metrics={metrics!r}: expected names as keys")
    return result


def _info(c: Checkpoint) -> CheckpointInfo:
    return CheckpointInfo(c.step, c.folder, c.nbytes, c.created, c.metrics, c.pinned)


def _broken(error: LoadError, folder: Path | None = None) -> CheckpointInfo:
    if folder is None:
        folder = error.path if manifest.is_folder_name(error.path.name) else error.path.parent
    pinned = not manifest.is_missing(manifest.pin_of(folder))
    why = f"cannot be read now: {error.what}" if isinstance(error, ReadError) else error.what
    return CheckpointInfo(manifest.step_of(folder.name), folder, 0, None, {}, pinned, why)
