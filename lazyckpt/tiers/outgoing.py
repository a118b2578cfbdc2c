"""What goes to mirrors: how far it is, and what waits for it."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path

from lazyckpt import waits
from lazyckpt.tiers.helper import Helper
from lazyckpt.tiers.uploads import Uploads

_open: weakref.WeakSet[Outgoing] = weakref.WeakSet()  # of this process


class Outgoing:
    """The uploads of one Checkpointer or Saver, one for each mirror."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._leads: list[Uploads] = []
        self._helpers: list[Helper] = []  # in their place on a rank other than 0
        _open.add(self)

    @property
    def _uploads(self) -> list[Uploads | Helper]:
        return [*self._leads, *self._helpers]

    def holds(self) -> set[Path]:
        """The checkpoints that must not be removed yet."""
        return {path for uploads in self._uploads for path in uploads.holds()}

    @property
    def lag_s(self) -> float:
        """How long the oldest checkpoint that is still on its way has been durable here."""
        return max((uploads.lag_s for uploads in self._uploads), default=0.0)

    def failing(self) -> bool:
        """Whether all mirrors that lack something have failed last."""
        return all(uploads.failing for uploads in self._uploads if uploads.is_at_work())

    def waiting(self) -> list[tuple[str, float]]:
        """The mirrors that are being uploaded to, and how much of the checkpoint is there."""
        if self._is_elsewhere():
            return []
        return [(str(uploads.mirror), uploads.progress) for uploads in self._uploads if uploads.is_at_work()]

    def _is_elsewhere(self) -> bool:
        """Whether this is a forked child, which has no threads of ours, or one of these threads, where the collector
        runs: neither can wait."""
        return os.getpid() != self._process or any(uploads.is_current_thread() for uploads in self._uploads)

    def close(self) -> list[str]:
        """Waits until everything is there, or an upload has failed. Returns the mirrors that lack something."""
        if self._is_elsewhere():
            return []
        return [str(uploads.mirror) for uploads in self._uploads if not uploads.close()]


def await_uploads(timeout_s: float) -> list[str]:
    """Waits until all mirrors of this process have what they take, or fail. Returns those that lack something."""
    end = time.monotonic() + timeout_s
    while any(m.waiting() and not m.failing() for m in list(_open)) and (left := end - time.monotonic()) > 0:
        waits.pause(min(waits.HANDLE_LOOK_S, left))
    return [where for mirrors in list(_open) for where, _ in mirrors.waiting()]
