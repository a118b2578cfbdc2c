"""Numbers the saves of one rank, and corrects the number if rank 0 saves another step under it.

The ranks count their saves, so a call that one rank repeats or leaves out would put it out of step for good. A rank
asks inside ``save()`` for the number under which rank 0 saves this step if it has learned that rank 0 saves another
step under its number, or if it saves a step again. It then takes rank 0's number.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from lazyckpt import waits
from lazyckpt.ranks.group import RankGroup
from lazyckpt.ranks.rounds import StoreLost


class SaveNumbers:
    """Counts the saves of one rank, in step with rank 0."""

    def __init__(self, group: RankGroup | None) -> None:
        """``group``: None if this process is the only rank."""
        self._group = group
        self._taken = 0  # the last number that this rank has used
        self._strayed: tuple[int, int] | None = None  # the last number known to be wrong, and the step of rank 0 there
        self._step: int | None = None  # of the last call
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._taken += 1
            return self._taken

    def strayed(self, number: int, step_of_rank_0: int) -> None:
        """Notes, on a background thread, that rank 0 saves another step under a number of this rank."""
        with self._lock:
            self._strayed = number, step_of_rank_0

    def meet(self) -> None:
        """Agrees on the next number with all ranks, of which no save is in flight. Raises RankError."""
        if self._group is not None:
            numbers = map(int, self._group.exchange("the number of saves", b"%d" % self._taken))
            with self._lock:
                self._taken, self._strayed = max(numbers), None

    def find(self, step: int, path: Path) -> str | None:
        """Call it before ``next``. Returns None if, as far as known, that is the number under which rank 0 saves
        ``step``; otherwise why this rank cannot save it. Waits for rank 0 if this rank has strayed or repeats a
        step."""
        with self._lock:
            strayed, taken = self._strayed, self._taken
        repeats, self._step = step == self._step, step
        if self._group is None or self._group.rank == 0 or (strayed is None and not repeats):
            return None
        if strayed is not None and (taken > strayed[0] or step <= strayed[1]):
            return f"this rank has made other calls of save() than rank 0, which saved step {strayed[1]} meanwhile"
        patience_s = min(waits.STRAYED_PATIENCE_S, self._group.timeout_s)
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            try:
                begun, theirs = self._group.peek(taken + 1, path).begun()
            except StoreLost as error:
                return f"lost the store: {error}"
            if not begun:
                waits.pause(waits.STRAYED_LOOK_S)
            elif theirs == step:
                with self._lock:
                    self._strayed = None
                return None
            elif theirs is not None and theirs > step:
                return f"this rank has made other calls of save() than rank 0, which is at step {theirs}"
            else:  # rank 0 has saved a step that this rank left out
                taken = self.next()
                self._group.ballot(taken, theirs, "", path).refuse(f"left it out, and went on to step {step}")
                with self._lock:
                    self._strayed = taken, -1 if theirs is None else theirs
        again = "again " * repeats
        return f"rank 0 has not saved it {again}within {patience_s:g} s: all ranks make the same calls of save()"
