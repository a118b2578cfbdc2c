"""Brings the weights of a module to a mirror: a folder that ``from_pretrained`` reads, made of each checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from lazyckpt.storage.manifest import Checkpoint, checkpoint_of
from lazyckpt.tiers.described import Saved
from lazyckpt.tiers.mirror import Mirror
from lazyckpt.tiers.pending import Pending
from lazyckpt.tiers.tier import Tier
from lazyckpt.tiers.uploads import Uploads


class Models(Protocol):
    """Makes folders of weights."""

    def is_ready(self) -> bool:
        """Whether a module is tracked."""

    def of(self, checkpoint: Checkpoint, model: str | None) -> AbstractContextManager[Path]:
        """Yields a temporary folder. Raises OSError, LoadError and ConfigError."""


class Publications(Uploads):
    """The weights on their way to one mirror."""

    def __init__(self, mirror: Mirror, tier: Tier, run: Callable[[Path], str], models: Models, *, topic: str) -> None:
        self._models = models
        super().__init__(mirror, tier, run, topic=topic)

    def _send(self, pending: Pending, checkpoint: Checkpoint, text: bytes) -> None:
        if self._tier.has(checkpoint.step, checkpoint.sequence):
            return  # published before this process was started
        with self._models.of(checkpoint, self.mirror.model) as folder:
            told = Saved(folder, checkpoint.step, {}).described(checkpoint.sequence, checkpoint.parent)
            self._send_with(None, pending, checkpoint_of(folder, told, "folder"), told)  # rank 0 has all the weights

    def _weighs(self, checkpoint: Checkpoint, last: Pending) -> bool:
        return checkpoint.layout == "folder"
