"""Calls ``on_done`` for Lightning's plugin, as soon as a resumed run would find the checkpoint.

A ModelCheckpoint with ``save_last`` first saves, then makes ``last`` a link to that file or saves a second one. After a
power cut between the two, ``ckpt_path="last"`` goes on from the checkpoint before. So a checkpoint of such a
ModelCheckpoint is reported when ``last`` is durable, too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import lazyckpt
from lazyckpt.warn import warn_in_background

OnDone = Callable[[Any, "lazyckpt.SaveError | None"], None]


@dataclass
class _Group:
    """Saves that are reported together, once the newest is durable, and the link to it."""

    saves: list[lazyckpt.SaveHandle] = field(default_factory=list)
    ready: bool = False


class Reports:
    """Calls ``on_done`` of the user, in the order of the saves. The training thread calls, and done-callbacks do."""

    def __init__(self) -> None:
        self.on_done: OnDone | None = None
        self._held: _Group | None = None
        self._groups: list[_Group] = []  # not reported yet
        self._lock = threading.Lock()

    def settled(self, metrics: Any, error: lazyckpt.SaveError | None) -> None:
        """The Saver calls it on a background thread. A failure does not wait for ``last``."""
        if error is not None:
            self._call(metrics, error)

    def add(self, handle: lazyckpt.SaveHandle) -> None:
        if self._held is not None:
            self._held.saves.append(handle)
        else:
            self._follow(_Group([handle]))

    def hold(self) -> None:
        """From now on saves are not reported before ``release``."""
        self._held = self._held or _Group()

    def release(self) -> None:
        """Reports the saves since ``hold``, as soon as all earlier requests are durable."""
        group, self._held = self._held, None
        if group is not None and group.saves:
            self._follow(group)

    def _follow(self, group: _Group) -> None:
        self._groups.append(group)
        group.saves[-1].add_done_callback(functools.partial(self._is_durable, group))

    def _is_durable(self, group: _Group, _: object) -> None:
        group.ready = True
        with self._lock:  # the done-callbacks of two saves may run at once
            while self._groups and self._groups[0].ready:
                for handle in self._groups.pop(0).saves:
                    if Future.exception(handle) is None:
                        self._call(handle.metrics, None)

    def _call(self, metrics: Any, error: lazyckpt.SaveError | None) -> None:
        if self.on_done is None:
            return
        try:
            self.on_done(metrics, error)
        except Exception as cause:
            warn_in_background(f"on_done raised {type(cause).__name__}: {cause}")
