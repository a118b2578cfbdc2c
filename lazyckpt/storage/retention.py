"""Decides which checkpoints of a folder stay.

A checkpoint's parent is the one that training had saved or restored last. The newest checkpoint, its parent, and so on,
form the chain along which retention counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from lazyckpt.storage import folders
from lazyckpt.storage.manifest import Checkpoint, pin_of


def pin(checkpoint: Path) -> None:
    """Makes retention keep this checkpoint; durable when this returns. Raises OSError."""
    os.close(os.open(pin_of(checkpoint), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    folders.sync_path(checkpoint.parent)


def unpin(checkpoint: Path) -> None:
    """Undoes ``pin``, if the checkpoint is pinned. Raises OSError."""
    pin_of(checkpoint).unlink(missing_ok=True)
    folders.sync_path(checkpoint.parent)


def chain(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Returns the newest checkpoint, its parent, its parent's parent, and so on, as far as they still exist.

    ``checkpoints``: as ``Catalog.scan`` orders them, the newest first."""
    by_sequence = {c.sequence: c for c in checkpoints}
    result: list[Checkpoint] = []
    current = checkpoints[0] if checkpoints else None
    while current is not None and current not in result:
        result.append(current)
        older = [s for s in by_sequence if current.parent is not None and s <= current.parent]
        # The parent was pruned or replaced: continue with the nearest older checkpoint.
        current = by_sequence[max(older)] if older else None
    return result


@dataclass(frozen=True)
class Best:
    """Which checkpoints are the best: those with the lowest ("min") or highest ("max") ``metric``."""

    metric: str
    mode: Literal["min", "max"] = "min"
    keep: int = 0  # how many of them stay in any case

    def of(self, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
        """Returns those that have the metric as a finite number, the best first; of equals, the one saved last."""
        sign = 1 if self.mode == "min" else -1
        found = [c for c in checkpoints if math.isfinite(c.metrics.get(self.metric, math.nan))]
        return sorted(found, key=lambda c: (sign * c.metrics[self.metric], -c.sequence))

    def __str__(self) -> str:
        return f"{self.metric} ({self.mode})"


class Fate(NamedTuple):
    """Whether retention keeps a checkpoint, and why, as a phrase for people."""

    stays: bool
    why: str


def retention(
    checkpoints: list[Checkpoint],
    keep_last: int | None,
    keep_every: int | None,
    damaged: Container[tuple[int, int]] = (),
    best: Best | None = None,
) -> dict[Checkpoint, Fate]:
    """Returns the fate of each checkpoint; ``checkpoints`` as ``Catalog.scan`` orders them.

    Keeps the newest ``keep_last`` of the chain; if the chain is shorter, also the newest others until ``keep_last`` are
    kept. ``damaged`` ones, by step and sequence, stay but do not count. Also keeps pinned checkpoints, and those of the
    chain whose step is a multiple of ``keep_every``, and the ``best``. Without ``keep_last``, keeps everything.
    """
    lineage = chain(checkpoints)
    on_chain = set(lineage)
    others = sorted(set(checkpoints) - on_chain, key=lambda c: c.sequence, reverse=True)
    line = f"the line to step {lineage[0].step}" if lineage else ""
    fates = {}
    whole = 0
    sound = [c for c in checkpoints if (c.step, c.sequence) not in damaged]
    bests = best.of(sound)[: best.keep] if best is not None else []
    for c in (*lineage, *others):
        if keep_last is None:
            fates[c] = Fate(True, "no keep_last")
        elif (c.step, c.sequence) in damaged:
            fates[c] = Fate(True, "damaged: restore() passed it over")
        elif whole < keep_last:
            whole += 1
            short = f"fills up keep_last={keep_last}, since {line} is shorter"
            fates[c] = Fate(True, f"within keep_last={keep_last}" if c in on_chain else short)
        elif c.pinned:
            fates[c] = Fate(True, "pinned")
        elif c in bests:
            fates[c] = Fate(True, f"among the keep_best={len(bests)} by {best}")
        elif c in on_chain and keep_every is not None and c.step % keep_every == 0:
            fates[c] = Fate(True, f"a multiple of keep_every={keep_every}")
        elif c in on_chain:
            fates[c] = Fate(False, f"beyond keep_last={keep_last}")
        else:
            fates[c] = Fate(False, f"off {line}")
    return {c: fates[c] for c in checkpoints}
