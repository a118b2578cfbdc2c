"""The checkpoints of one folder in the order of their commits: sequence numbers, parents, retention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazyckpt.storage import manifest, retention, rollback
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.storage.retention import Best
from lazyckpt.storage.retry import patiently
from lazyckpt.warn import warn_in_background


@dataclass(frozen=True)
class About:
    """What a manifest tells of a checkpoint besides its files."""

    metrics: Mapping[str, float] = field(default_factory=dict)  # as the user gave them
    kinds: Mapping[str, str] = field(default_factory=dict)  # classes of tracked state, by name


class Lineage:
    """The line of checkpoints that one Checkpointer continues. Background threads call it in the order of the saves;
    ``restored`` is called while nothing is in flight."""

    def __init__(
        self, catalog: Catalog, *, keep_last: int | None, keep_every: int | None, best: Best | None = None
    ) -> None:
        """Reads the folder. Raises LoadError."""
        self._catalog = catalog
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._best = best
        known = catalog.scan()
        self.newest: Checkpoint | None = known[0] if known else None  # when this was made
        self._sequence = max(
            (c.sequence for c in known), default=0
        )  # of the last checkpoint; a failed save may leave a gap
        self._parent = known[0].sequence if known else None  # of the next checkpoint: last committed, or restored
        self._ours = {(c.step, c.sequence) for c in known}  # found or saved here; retention removes no others
        self._warned = False  # that another process saves here

    def restored(self, checkpoint: Checkpoint, *, own: bool) -> None:
        """Continues from a restored checkpoint; ``own``: it lies in this folder."""
        self._parent = checkpoint.sequence if own else None
        if own:  # even if another process committed it after this one had read the folder
            self._ours.add((checkpoint.step, checkpoint.sequence))
            self._sequence = max(self._sequence, checkpoint.sequence)

    def manifest(self, step: int, files: list[tuple[str, int, int]], about: About) -> dict[str, Any]:
        """Numbers the checkpoint after all that are committed, whoever saved them. Raises LoadError."""
        newest = patiently(self._catalog.last_sequence, warn_in_background)
        if newest > self._sequence and not self._warned:
            self._warned = True
            warn_in_background(
                f"another process also saves into {self._catalog.root}; a run belongs to one process. restore() "
                "takes what either has committed last, and retention removes only what this one has saved or found"
            )
        self._sequence = max(self._sequence, newest) + 1
        self._ours.add((step, self._sequence))
        return manifest.describe(
            step=step,
            sequence=self._sequence,
            parent=self._parent,
            files=files,
            metrics=about.metrics,
            kinds=about.kinds,
        )

    def published(self) -> None:
        self._parent = self._sequence
        rollback.forget(self._catalog.root)

    def superfluous(self) -> list[Path]:
        """The checkpoints that ``keep_last`` and ``keep_every`` drop now. Raises LoadError."""
        if self._keep_last is None:
            return []
        known = [c for c in self._catalog.scan() if (c.step, c.sequence) in self._ours]
        gone = retention.superfluous(known, self._keep_last, self._keep_every, self._catalog.damaged, self._best)
        self._ours.difference_update((c.step, c.sequence) for c in gone)
        return [c.path for c in gone]
