"""Looks whether a rank is lost while this one waits for the others in a collective of torch.

Such a collective may hang when one of its ranks has ended, or raises on some of the others only. So every rank waits
for it in short turns, and looks at the signs of life between them. The first that knows of a loss fails the next
exchange of all ranks, in advance; the others see that and leave their collectives, too.
"""

from __future__ import annotations

import contextlib
import time

from lazyckpt import waits
from lazyckpt.errors import described
from lazyckpt.ranks.pulse import Pulse, Watch
from lazyckpt.ranks.rounds import Aborted, Point, RankLost, Round, Seat, StoreLost

_WATCHED = 8  # ranks that one rank watches, so that each rank is watched by as many


class Lookout:
    """Of one rank, from an exchange to the next one."""

    def __init__(self, seat: Seat, pulse: Pulse) -> None:
        last = pulse.reached["exchange"]
        self._seat, self._pulse = seat, pulse
        self._next_exchange = Round(seat, Point("exchange", last + 1))
        others = min(_WATCHED, seat.world_size - 1)
        at = Point("exchange", last)  # which all have reached: a rank that lives may take as long as it needs
        self._watches = [Watch(pulse, (seat.rank + 1 + n) % seat.world_size, at) for n in range(others)]
        self._every_s = min(waits.LOOKOUT_S, pulse.period_s)
        self._patience_s = pulse.timeout_s + 3 * pulse.period_s
        self._next = time.monotonic() + self._every_s

    def look(self) -> None:
        """Raises RankLost if a rank is lost, or another rank knows of one; StoreLost. Looks once in a while."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            if self._seat.store.look(self._next_exchange.outcome) is not None:
                raise RankLost(self._seat.rank, "has heard of a failure")
            for watch in self._watches:
                watch.check()

    def search(self) -> None:
        """Raises as ``look``, once a rank turns out to be lost. Returns if all have given signs of life meanwhile."""
        end = time.monotonic() + self._patience_s
        while time.monotonic() < end:
            self.look()
            waits.pause(self._every_s)

    def give_up(self, error: BaseException) -> None:
        """Makes the next exchange fail on all ranks, which then have a RankError that names the rank. ``error``: why
        this rank does not go on. If that is no lost rank, waits whether one turns out to be lost and is the cause."""
        if isinstance(error, StoreLost):
            return  # the exchange fails, too
        with contextlib.suppress(StoreLost):
            rank, why = (error.rank, error.why) if isinstance(error, RankLost) else self._cause(error)
            self._seat.store.claim(self._next_exchange.outcome, Aborted(rank, why).encode())

    def leave(self, error: BaseException) -> None:
        """As ``give_up``, if this rank takes no part in that exchange either: then it counts as one that has."""
        self.give_up(error)
        self._pulse.reached["exchange"] += 1
        self._next_exchange.finish()

    def _cause(self, error: BaseException) -> tuple[int, str]:
        try:
            if isinstance(error, RuntimeError):
                self.search()
        except RankLost as lost:
            return lost.rank, lost.why  # not the error, whose frames would keep the collective, and so its connections
        return self._seat.rank, f"failed: {described(error) or type(error).__name__}"
