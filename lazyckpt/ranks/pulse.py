"""Signs of life: every rank counts up a key of its own, and whoever waits for a rank looks whether it still does.

Clocks of different machines are never compared. The one who waits adds up how long it has seen no change. It does not
count time in which it did not look, because then it slept itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from lazyckpt.ranks.rounds import RankLost, StoreLost
from lazyckpt.ranks.store import Client

BEATS = 8  # in the timeout
_STOP_S = 5.0  # at most, until a beat under way has its answer
ABSENT = 5  # timeouts until a rank that lives must have reached the save that others wait for


class Pulse:
    """This rank's sign of life, and how to see that of others. ``keys`` is the prefix of the job."""

    def __init__(
        self, client: Client, keys: str, rank: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._keys = f"{keys}/pulse"
        self._rank = rank
        self.timeout_s = timeout_s
        self.period_s = timeout_s / BEATS
        self.clock = clock
        self.save = 0  # the number of the last save that this rank has reached
        self.complete = False  # all ranks have begun to beat
        self._beats = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Beats once, then on a thread of its own. Raises StoreLost."""
        self.beat()
        self._thread = threading.Thread(target=self._run, name="lazyckpt-pulse", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        self._beats += 1
        self._client.set(f"{self._keys}/{self._rank}", b"%d %d" % (self._beats, self.save))

    def look(self, rank: int) -> tuple[int, int] | None:
        """The number of beats of a rank, and its last save; None before it joins and once it has closed."""
        told = self._client.look(f"{self._keys}/{rank}")
        if told is None:
            return None
        beats, save = told.split()
        return int(beats), int(save)

    def stop(self) -> None:
        """Ends the thread, and tells the others that this rank does not take part any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
        with contextlib.suppress(StoreLost):
            self._client.delete(f"{self._keys}/{self._rank}")

    def _run(self) -> None:
        with contextlib.suppress(StoreLost):  # whoever waits for something finds out
            while not self._stop.wait(self.period_s):
                self.beat()


class Watch:
    """Watches one rank, as long as somebody waits for what it has to do for a save, by number."""

    def __init__(self, pulse: Pulse, rank: int, save: float) -> None:
        self._pulse, self._rank, self._save = pulse, rank, save
        self._seen = 0
        self._looked = pulse.clock()
        self._silent_s = self._absent_s = 0.0

    def check(self) -> None:
        """Raises RankLost if the rank has closed, gives no sign of life, or lives and does not reach the save."""
        found = self._pulse.look(self._rank)
        now = self._pulse.clock()
        passed_s = min(now - self._looked, 2 * self._pulse.period_s)
        self._looked = now
        if found is None and self._pulse.complete:
            raise RankLost(self._rank, "has closed its Checkpointer")
        beats, save = found or (0, 0)
        self._silent_s = self._silent_s + passed_s if beats == self._seen > 0 else 0.0
        self._seen = beats
        if self._silent_s > self._pulse.timeout_s:
            raise RankLost(self._rank, f"has given no sign of life for {self._pulse.timeout_s:g} s (rank_timeout_s)")
        self._absent_s += passed_s if save < self._save else 0.0
        if self._absent_s > ABSENT * self._pulse.timeout_s:
            what = f"lives, but does not reach this point for {ABSENT * self._pulse.timeout_s:g} s"
            raise RankLost(self._rank, f"{what} ({ABSENT} times rank_timeout_s). Does every rank call save()?")
