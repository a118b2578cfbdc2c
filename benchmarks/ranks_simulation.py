"""Simulates the commit of one checkpoint by up to 16,384 ranks, and prints what it costs as a table.

    python -m benchmarks.ranks_simulation

Every rank runs the code of lazyckpt/ranks/votes.py, on a simulated clock. The store serves one message at a time.
``SERVICE_US`` and ``ROUND_TRIP_US`` are assumptions, close to what we measure on one machine with torch's TCPStore; the
numbers of messages do not depend on them. All ranks have written their files when the simulation begins.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from greenlet import getcurrent, greenlet

from lazyckpt.ranks.rounds import Point, Seat, children_of
from lazyckpt.ranks.votes import Ballot

SIZES = (2, 4, 8, 64, 512, 1024, 4096, 16_384)
ROUND_TRIP_US = 100.0
SERVICE_US = 5.0  # of the store, for each message
NS_PER_BYTE = 1.0
FOLDER_US = 300.0  # a rename and an fsync
RECEIPT = b"r" * 200


class Simulation:
    """A clock, and a store that serves one message after the other."""

    def __init__(self) -> None:
        self.now = 0.0  # microseconds
        self._free = 0.0  # when the store can serve the next message
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._hub = getcurrent()
        self.keys: dict[str, bytes] = {}
        self.waiting: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self.messages = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def sleep(self, microseconds: float) -> None:
        self.at(self.now + microseconds, getcurrent().switch)
        self._hub.switch()

    def serve(self, nbytes: int, answer: Callable[[], None]) -> None:
        """The store takes a message that has arrived; ``answer`` runs when it has served it."""
        self.messages += 1
        self._free = max(self._free, self.now) + SERVICE_US + nbytes * NS_PER_BYTE / 1000
        self.at(self._free, answer)

    def ask(self, nbytes: int, act: Callable[[], Any]) -> Any:
        """A rank sends a message and waits for the answer to it."""
        return self.park(lambda resume: self.serve(nbytes, lambda: resume(act())))

    def park(self, begin: Callable[[Callable[[Any], None]], None]) -> Any:
        me = getcurrent()

        def resume(value: Any) -> None:
            self.at(self.now + ROUND_TRIP_US / 2, lambda: me.switch(value))

        self.at(self.now + ROUND_TRIP_US / 2, lambda: begin(resume))
        return self._hub.switch()


class SimulatedStore:
    """The ``Store`` of one rank. Counts its messages."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.messages = 0

    def _ask(self, act: Callable[[], Any], nbytes: int = 0) -> Any:
        self.messages += 1
        return self._simulation.ask(nbytes, act)

    def claim(self, key: str, value: bytes) -> bytes:
        def act() -> bytes:
            found = self._simulation.keys.setdefault(key, value)
            for wake in self._simulation.waiting.pop(key, []):
                self._simulation.serve(0, wake)
            return found

        return self._ask(act, len(value))  # type: ignore[no-any-return]

    def look(self, key: str) -> bytes | None:
        return self._ask(lambda: self._simulation.keys.get(key))  # type: ignore[no-any-return]

    def count(self, key: str) -> int:
        def act() -> int:
            self._simulation.keys[key] = b"%d" % (int(self._simulation.keys.get(key, b"0")) + 1)
            return int(self._simulation.keys[key])

        return self._ask(act)  # type: ignore[no-any-return]

    def delete(self, key: str) -> None:
        self._ask(lambda: self._simulation.keys.pop(key, None))

    release = delete

    def wait(self, key: str, *, rank: int, at: Point, unless: str | None = None, others: object = None) -> bytes | None:
        def begin(resume: Callable[[Any], None]) -> None:
            def look() -> None:
                if key in self._simulation.keys:
                    resume(None)
                else:
                    self._simulation.waiting[key].append(lambda: resume(None))

            self._simulation.serve(0, look)

        self.messages += 1
        self._simulation.park(begin)  # torch waits for the key first, then gets it
        return self._ask(lambda: self._simulation.keys[key])  # type: ignore[no-any-return]


class SimulatedFolder:
    """A ``Folder`` that publishes."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def taken_by(self) -> None: ...

    def to_final(self) -> str:
        return "done"

    def sync(self) -> None:
        self._simulation.sleep(FOLDER_US)


@dataclass(frozen=True)
class Cost:
    """What one commit costs."""

    milliseconds: float  # until the last rank has its answer
    median: float  # messages of a rank
    most: int  # messages of the rank that has the most
    messages: int
    keys_left: int


def commit(world_size: int) -> Cost:
    """Simulates one save."""
    simulation = Simulation()
    stores = [SimulatedStore(simulation) for _ in range(world_size)]
    answered: list[float] = []

    def rank(number: int) -> None:
        seat = Seat("run", 1, number, world_size, stores[number], Path())
        folder: Any = SimulatedFolder(simulation)
        ballot = Ballot(seat, 1, 1, "layout", target=Path(), folder=lambda _: folder)
        if number == 0:
            ballot.begin("name")
            ballot.vote(RECEIPT)
            assert len(ballot.receipts()) == world_size
            ballot.decide()
        else:
            ballot.staged_name()
            ballot.vote(RECEIPT)
            ballot.outcome()
        answered.append(simulation.now)

    for number in range(world_size):
        simulation.at(0.0, partial(greenlet(rank).switch, number))
    simulation.run()
    assert len(answered) == world_size
    counts = [store.messages for store in stores]
    return Cost(max(answered) / 1000, statistics.median(counts), max(counts), simulation.messages, len(simulation.keys))


def table(sizes: tuple[int, ...] = SIZES) -> str:
    """The costs as Markdown."""
    rows = [
        "| ranks | children of rank 0 | messages of a rank: median, most | µs of the store a rank | commit, ms |",
        "|--:|--:|--:|--:|--:|",
    ]
    for size in sizes:
        cost = commit(size)
        assert cost.keys_left == 0
        rows.append(
            f"| {size:,} | {len(children_of(0, size))} | {cost.median:g}, {cost.most} "
            f"| {cost.messages * SERVICE_US / size:.0f} | {cost.milliseconds:,.1f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(tuple(map(int, sys.argv[1:])) or SIZES))
