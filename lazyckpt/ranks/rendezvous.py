"""Watches a wait for other ranks to join: names the missing ranks, and ends a wait that is in vain."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from lazyckpt import waits
from lazyckpt.ranks.rounds import StoreLost
from lazyckpt.warn import warn

_NAMED = 8  # ranks, at most


class Rendezvous:
    """One wait for all ranks of a job. Call ``look`` again and again."""

    def __init__(
        self,
        path: Path,
        world_size: int,
        limit_s: float,
        waiting: Callable[[], None],
        together: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit_s``: the wait after which the job gives up. ``waiting`` raises if the wait is in vain. ``together``
        tells what all ranks have to do."""
        self.missing: Callable[[], list[int]] = lambda: [0]
        """Returns the ranks that have not joined, if this rank reports them."""
        self.path, self.together = path, together
        self._world_size, self._limit_s = world_size, limit_s
        self._waiting = waiting
        self._clock = clock
        self._begin = self._looked = clock()
        self._patience_s = waits.FIRST_REMINDER_S

    def look(self) -> None:
        """Raises what ``waiting`` raises."""
        now = self._clock()
        if now - self._looked >= waits.RENDEZVOUS_LOOK_S:
            self._looked = now
            self._waiting()
        if now - self._begin >= self._patience_s:
            self._patience_s *= waits.REMINDER_GROWTH
            with contextlib.suppress(StoreLost):
                if missing := self.missing():
                    self._warn(missing, now - self._begin)

    def _warn(self, missing: list[int], waited_s: float) -> None:
        named = ", ".join(map(str, missing[:_NAMED])) + f" and {len(missing) - _NAMED} more" * (len(missing) > _NAMED)
        warn(
            f"{self.path}: rank{'s' * (len(missing) > 1)} {named} of {self._world_size} not there after "
            f"{waited_s:.0f} s. {self.together}. This rank waits for up to {self._limit_s:.0f} s (5 times "
            "rank_timeout_s)"
        )
