"""Describes one save: where its files go (``Request``), and, for a checkpoint, its place in the line of its run
(``Lineage``): number, parent, and the older checkpoints that retention drops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyckpt import _engine
from lazyckpt.storage import manifest, retention, rollback
from lazyckpt.storage.catalog import Catalog, patiently
from lazyckpt.storage.commit import FileStaging, Staging, publish_pointer
from lazyckpt.storage.manifest import Checkpoint, FileEntry
from lazyckpt.storage.retention import Best
from lazyckpt.warn import warn_in_background

if TYPE_CHECKING:
    from lazyckpt.ranks.board import SharedSave
    from lazyckpt.tiers.arrival import Arrivals
    from lazyckpt.tiers.mirrors import Mirrors


class Request:
    """One save: of a lone file, or of the folder ``staging``. Holds no tensor: the plans (plan.py) hold the state, and
    only until it is copied.

    Except ``reached`` and ``abandon``, the methods run on a background thread, those of different saves in the order
    of the saves.
    """

    def __init__(
        self, path: Path, step: int | None, staging: Staging | None = None, *, latest: Path | None = None
    ) -> None:
        """``latest``: a text file that will hold the name of ``path``, once that is published."""
        self.path = path
        self.step = step
        self.latest = latest
        self.arrivals: Arrivals | None = None  # in mirrors
        self.then: Callable[[Request], None] | None = None
        """Called when the files have their final names."""
        self.crcs: dict[str, int] = {}  # of each file that the engine wrote, once ``describe`` was called
        self.writers: Mapping[str, Sequence[int]] = {}  # the ranks that wrote each, if it is not rank 0
        self._staging = staging

    def reached(self) -> None:
        """Notes that the rest of the save may take as long as it needs. The thread that saves calls it."""

    def stage(self) -> Staging:
        """Returns the temporary folder. Saves may be staged in any order. Raises OSError."""
        return self._staging or FileStaging(self.path)

    def where(self) -> Path:
        """The temporary folder as far as this process knows it; otherwise ``path``."""
        return self.stage().path

    def open(self, job: _engine.Job, number: int, path: Path, nbytes: int) -> None:
        """Opens a file of the temporary folder, so that the engine can write its copies. Raises OSError."""
        job.open(number, path, nbytes)

    def opened(self) -> None:
        """Called when all files are open. Raises RankError if another rank has aborted."""

    def check(self) -> None:
        """Called now and then while the files are copied and written. Raises RankError if another rank has aborted."""

    def agree(self, files: list[FileEntry]) -> None:
        """Returns when every part of the checkpoint is durable; ``files`` are those of this process. Raises SaveError
        if another rank's part failed."""

    def describe(self, staging: Staging, files: list[FileEntry]) -> None:
        """Writes the other files that the folder needs, such as a manifest, and syncs them. ``files`` of this process
        are synced. Raises OSError and LoadError."""
        self.crcs = {entry.name: entry.crc32 for entry in files}
        staging.describe(None, [entry.name for entry in files])

    def publish(self, staging: Staging) -> Path | None:
        """Gives the files their final names. Returns the new name of the replaced file or folder. Raises OSError, and
        RankError if another rank's part failed."""
        replaced = staging.publish()
        if self.latest is not None:
            try:
                publish_pointer(self.latest, self.path)
            except OSError as error:
                what = f"{error.strerror}; {self.path} is durable, but this file does not name it"
                raise OSError(error.errno, what, str(self.latest)) from error
        return replaced

    def published(self) -> None:
        """Notes that the files have their final names."""
        if self.then is not None:
            self.then(self)

    @property
    def shared(self) -> SharedSave | None:
        """What several ranks know of a save that they make together."""
        return None

    def superfluous(self) -> Iterable[Path]:
        """The checkpoints that retention drops now."""
        return ()

    def failed(self, error: BaseException) -> BaseException:
        """Called if a step raised, before the staged files are discarded. Returns the error to report."""
        return error

    def abandon(self, why: str = "") -> None:
        """Called if the save failed before the background had it. ``why`` is for other ranks."""
        if self._staging is not None:
            self._staging.discard()


@dataclass(frozen=True)
class About:
    """The contents of a manifest besides the files."""

    metrics: Mapping[str, float] = field(default_factory=dict)  # as the user gave them
    kinds: Mapping[str, str] = field(default_factory=dict)  # classes of tracked state, by name
    arrivals: Arrivals | None = None  # in mirrors; not in the manifest


class Lineage:
    """The line of checkpoints that one Checkpointer continues. Background threads call it in the order of the saves;
    ``restored`` is called while nothing is in flight."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        keep_last: int | None,
        keep_every: int | None,
        best: Best | None = None,
        mirrors: Mirrors | None = None,
    ) -> None:
        """Reads the folder. Raises LoadError."""
        self._mirrors = mirrors
        self._catalog = catalog
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._best = best
        self.known = known = catalog.scan()
        self.newest: Checkpoint | None = known[0] if known else None  # when this read the folder
        # of the last checkpoint; a failed save may leave a gap
        self._sequence = max((c.sequence for c in known), default=0)
        self._parent = known[0].sequence if known else None  # of the next checkpoint: last committed, or restored
        self._ours = {(c.step, c.sequence) for c in known}  # found or saved here; retention removes no others
        self._step = 0  # of the last checkpoint
        self._arrivals: Arrivals | None = None
        self._warned = False  # that another process saves here

    def restored(self, checkpoint: Checkpoint, *, own: bool) -> None:
        """Continues from a restored checkpoint; ``own``: it lies in this folder."""
        self._parent = checkpoint.sequence if own else None
        if own:  # even if another process committed it after this one had read the folder
            self._ours.add((checkpoint.step, checkpoint.sequence))
            self._sequence = max(self._sequence, checkpoint.sequence)

    def manifest(self, step: int, files: list[FileEntry], about: About, **ranks: Any) -> dict[str, Any]:
        """Numbers the checkpoint after all committed ones, including those of other processes. Raises LoadError."""
        newest = patiently(self._catalog.last_sequence, warn_in_background)()
        if newest > self._sequence and not self._warned:
            self._warned = True
            warn_in_background(
                f"another process also saves into {self._catalog.root}; a run belongs to one process. restore() "
                "takes what either has committed last, and retention removes only what this one has saved or found"
            )
        given_up = patiently(self._catalog.given_up, warn_in_background)()
        mirrored = 0 if self._mirrors is None else self._mirrors.highest
        self._sequence = max(self._sequence, newest, given_up, mirrored) + 1
        self._ours.add((step, self._sequence))
        self._step, self._arrivals = step, about.arrivals
        return manifest.describe(
            step=step,
            sequence=self._sequence,
            parent=self._parent,
            files=files,
            metrics=about.metrics,
            kinds=about.kinds,
            **ranks,
        )

    def published(self, shared: SharedSave | None = None) -> None:
        """``shared``: if several ranks have saved it."""
        self._parent = self._sequence
        rollback.forget(self._catalog.root)
        self._mirror(self._step, self._arrivals, shared)

    def published_by_rank_0(self, step: int, about: About, shared: SharedSave | None) -> None:
        """Another rank: notes that a checkpoint is committed to which this one has contributed."""
        self._mirror(step, about.arrivals, shared)

    def _mirror(self, step: int, arrivals: Arrivals | None, shared: SharedSave | None) -> None:
        if self._mirrors is not None:
            folder = self._catalog.root / manifest.folder_name(step)
            self._mirrors.committed(folder, step, arrivals, shared)

    def superfluous(self) -> list[Path]:
        """The checkpoints that ``keep_last`` and ``keep_every`` drop now; not those on their way to a mirror. Raises
        LoadError."""
        if self._keep_last is None:
            return []
        known = [c for c in self._catalog.scan() if (c.step, c.sequence) in self._ours]
        fates = retention.retention(known, self._keep_last, self._keep_every, self._catalog.damaged, self._best)
        held = set() if self._mirrors is None else self._mirrors.holds()
        gone = [c for c in known if not fates[c].stays and c.folder not in held]
        self._ours.difference_update((c.step, c.sequence) for c in gone)
        return [c.folder for c in gone]


class CheckpointRequest(Request):
    """A numbered checkpoint of a Checkpointer."""

    def __init__(self, path: Path, step: int, lineage: Lineage, about: About, unless: Callable[[], None]) -> None:
        """``unless`` raises, before anything is published, if another rank saves into the folder, too."""
        super().__init__(path, step)
        self._about = about
        self._unless = unless
        self._step = step
        self._lineage = lineage

    def stage(self) -> Staging:
        return Staging(self.path)

    def agree(self, files: list[FileEntry]) -> None:
        self._unless()

    def describe(self, staging: Staging, files: list[FileEntry]) -> None:
        staging.describe(self._lineage.manifest(self._step, files, self._about), [entry.name for entry in files])

    def published(self) -> None:
        self._lineage.published()

    def superfluous(self) -> Iterable[Path]:
        return self._lineage.superfluous()
