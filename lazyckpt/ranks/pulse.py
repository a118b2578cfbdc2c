"""Signs of life: every rank counts up a key of its own, and a rank that waits for it checks that the count still grows.

Clocks of different machines are never compared. The waiting rank adds up how long it has seen no change. It does not
count time in which it did not look, because then it slept itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable

from lazyckpt import waits
from lazyckpt.ranks.rounds import Point, RankLost, StoreLost
from lazyckpt.ranks.store import Client


class Pulse:
    """This rank's sign of life, and how to see that of others. ``keys`` is the prefix of the job."""

    def __init__(
        self, client: Client, keys: str, rank: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._keys = f"{keys}/pulse"
        self._rank = rank
        self.timeout_s = timeout_s
        self.period_s = timeout_s / waits.PULSES_PER_TIMEOUT
        self.clock = clock
        self.reached = {"save": 0, "exchange": 0}  # the number of the last one that this rank has reached
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
        self._client.set(f"{self._keys}/{self._rank}", json.dumps({"beats": self._beats, **self.reached}).encode())

    def look(self, rank: int) -> dict[str, int] | None:
        """The number of beats of a rank, and the points it has reached; None before it joins and once it has closed."""
        told = self._client.look(f"{self._keys}/{rank}")
        return None if told is None else json.loads(told)

    def stop(self) -> None:
        """Ends the thread, and tells the others that this rank does not take part any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(waits.PULSE_STOP_S)
        with contextlib.suppress(StoreLost):
            self._client.delete(f"{self._keys}/{self._rank}")

    def _run(self) -> None:
        with contextlib.suppress(StoreLost):  # the next wait finds out
            while not self._stop.wait(self.period_s):
                self.beat()


class Watch:
    """Watches one rank while this one waits for its part in a save or an exchange."""

    def __init__(self, pulse: Pulse, rank: int, at: Point) -> None:
        self._pulse, self._rank, self._at = pulse, rank, at
        self._seen = 0
        self._looked = pulse.clock()
        self._silent_s = self._absent_s = 0.0

    def check(self) -> None:
        """Raises RankLost if the rank has closed, gives no sign of life, or lives and does not reach the point."""
        found = self._pulse.look(self._rank)
        now = self._pulse.clock()
        passed_s = min(now - self._looked, 2 * self._pulse.period_s)
        self._looked = now
        if found is None and self._pulse.complete:
            raise RankLost(self._rank, "has closed its Checkpointer or Saver")
        found = found or dict.fromkeys(("beats", *self._pulse.reached), 0)
        self._silent_s = self._silent_s + passed_s if found["beats"] == self._seen > 0 else 0.0
        self._seen = found["beats"]
        if self._silent_s > self._pulse.timeout_s:
            raise RankLost(self._rank, f"has given no sign of life for {self._pulse.timeout_s:g} s (rank_timeout_s)")
        self._absent_s += passed_s if found[self._at.kind] < self._at.number else 0.0
        if self._absent_s > waits.ABSENT_TIMEOUTS * self._pulse.timeout_s:
            if self._seen == 0:
                what = "has ended, or has opened no Checkpointer or Saver for"
            elif self._at.kind == "exchange":
                what = "lives, but takes no part for"
            else:
                what = f"lives, but has not reached {self._at.kind} number {self._at.number} for"
            times = waits.ABSENT_TIMEOUTS
            limit = f"{times * self._pulse.timeout_s:g} s ({times} times rank_timeout_s)"
            raise RankLost(self._rank, f"{what} {limit}. All ranks must make the same calls")
