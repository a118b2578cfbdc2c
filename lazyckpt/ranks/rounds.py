"""One question to all ranks, through a key-value store: the answers go up a tree of ranks, the outcome is one key.

Each rank waits for few others, whatever the number of ranks, and watches those that it waits for. The first rank to
learn that the question must fail says so under the key of the outcome. This module knows neither torch nor clocks.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from lazyckpt.errors import RankError

FAN_IN = 8  # ranks below one rank, at each level of the tree: usually those of one node
NO_RANKS: Mapping[int, str] = MappingProxyType({})
_ENTRY = struct.Struct("<II")  # rank, bytes


class StoreLost(Exception):
    """The store no longer answers."""


class RankLost(Exception):
    """A rank gives no sign of life, or does not take part."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank
        self.why = why


class Point(NamedTuple):
    """A save or an exchange, by number. Every rank reaches it at about the same time."""

    kind: Literal["save", "exchange"]
    number: int


class Store(Protocol):
    """The keys of a job. Every call is one message. Raises StoreLost."""

    def claim(self, key: str, value: bytes) -> bytes:
        """Sets a key unless a rank has set it. Returns its value."""

    def look(self, key: str) -> bytes | None:
        """Returns the value of a key, or None, at once."""

    def wait(
        self, key: str, *, rank: int, at: Point, unless: str | None = None, others: Mapping[int, str] = NO_RANKS
    ) -> bytes | None:
        """Returns the value of ``key`` once ``rank`` has set it, or None once ``unless`` is set. ``others``: the ranks
        that the caller waits for next, and their keys.

        Raises RankLost if ``rank``, or one of the others that has not set its key, gives no sign of life or does not
        reach the point ``at``."""

    def release(self, key: str) -> None:
        """Ends the request for ``key`` that a ``wait`` without an answer has left behind."""

    def count(self, key: str) -> int:
        """Adds one. Returns the sum."""

    def delete(self, key: str) -> None: ...


def children_of(rank: int, world_size: int, fan_in: int = FAN_IN) -> list[int]:
    """The ranks that give their votes to ``rank``: at most ``fan_in - 1`` at each of log(world_size) levels.

    With a fan-in of 8, the children of rank 8 are 9 to 15; those of rank 0 are 1 to 7, 8, 16, …, 56, 64, 128, …."""
    found: list[int] = []
    step = 1
    while step < world_size and rank % (step * fan_in) == 0:
        found += range(rank + step, min(rank + step * fan_in, world_size), step)
        step *= fan_in
    return found


@dataclass(frozen=True)
class Seat:
    """One rank's place in the votes of its job."""

    run: str  # the job's uuid
    generation: int  # how often the job has started; keeps stale ranks out
    rank: int
    world_size: int
    store: Store
    directory: Path  # for messages
    fan_in: int = FAN_IN
    server: int | None = None  # the rank whose process serves the store, if one does

    def without_store(self, error: StoreLost) -> Aborted:
        """The answer of a rank that has lost the store."""
        if self.server in (None, self.rank):
            return Aborted(self.rank, f"lost the store: {error}")
        what = f"has ended, or cannot be reached: rank {self.rank} has lost the store, which rank {self.server} serves"
        return Aborted(self.server, f"{what} ({error})")


@dataclass(frozen=True)
class Aborted:
    """The answer that a save failed: which rank caused it, and how."""

    rank: int
    why: str

    def encode(self) -> bytes:
        return json.dumps({"aborted": self.why, "rank": self.rank}).encode()


_VALUES = b"+"  # before the result of an exchange
_END = b"\0"  # of the topic, before a value


def decode(answer: bytes) -> Aborted | None:
    """Returns why a save failed; None for any other value of a key."""
    if answer.startswith(_VALUES):
        return None
    told = json.loads(answer)
    return Aborted(told["rank"], told["aborted"]) if "aborted" in told else None


def pack(values: dict[int, bytes]) -> bytes:
    return b"".join(_ENTRY.pack(rank, len(value)) + value for rank, value in values.items())


def unpack(packed: bytes) -> dict[int, bytes]:
    values = {}
    at = 0
    while at < len(packed):
        rank, nbytes = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size
        values[rank] = packed[at : at + nbytes]
        at += nbytes
    return values


class Round:
    """One question that all ranks answer: its keys, and the way of the answers up the tree."""

    def __init__(self, seat: Seat, at: Point) -> None:
        self.seat = seat
        self.at = at
        self._prefix = f"{seat.run}/{seat.generation}/{at.kind}-{at.number}"
        self.outcome = self.key("outcome")
        self.cause = self.key("cause")  # of an abort, as the first rank saw it
        self.settled = self.key("settled")

    def key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def gather(self, own: bytes) -> dict[int, bytes] | None:
        """Returns the values of this rank and of all ranks below it, or None if the outcome is known before.

        Raises RankLost and StoreLost."""
        seat = self.seat
        values = {seat.rank: own}
        waiting = {child: self.key(child) for child in children_of(seat.rank, seat.world_size, seat.fan_in)}
        while waiting:
            child = next(iter(waiting))
            del waiting[child]
            told = None
            try:
                told = seat.store.wait(self.key(child), rank=child, at=self.at, unless=self.outcome, others=waiting)
            finally:
                if told is None:
                    seat.store.release(self.key(child))
            if told is None:
                return None
            values.update(unpack(told))
        return values

    def finish(self) -> None:
        """Deletes this rank's key; the last rank deletes the others. Call it once, when the answer is known here."""
        store = self.seat.store
        with contextlib.suppress(StoreLost):
            store.delete(self.key(self.seat.rank))
            if store.count(self.settled) == self.seat.world_size:
                for key in (self.key("begin"), self.cause, self.outcome, self.settled):
                    store.delete(key)


def exchange(seat: Seat, number: int, topic: str, value: bytes) -> list[bytes]:
    """Returns the values of all ranks, by rank. Every rank calls it with the same topic and a number that is new.

    Raises RankError, on all ranks, if one of them is lost or has another topic."""
    round = Round(seat, Point("exchange", number))
    try:
        told = _exchange(round, topic.encode() + _END + value)
    except StoreLost as error:
        told = seat.without_store(error).encode()
    except BaseException as error:
        if not isinstance(error, Exception):  # an interrupt: the others would wait for this rank
            _leave(round, error)
        raise
    round.finish()
    if (aborted := decode(told)) is not None:
        raise RankError(aborted.why, rank=aborted.rank, path=seat.directory, agreeing_on=topic.partition("/")[0])
    values = []
    for rank, entry in sorted(unpack(told.removeprefix(_VALUES)).items()):
        theirs, _, found = entry.partition(_END)
        if theirs.decode() != topic:
            raise RankError(f"is at {theirs.decode()!r}", rank=rank, path=seat.directory, agreeing_on=topic)
        values.append(found)
    return values


def _leave(round: Round, error: BaseException) -> None:
    """Fails an exchange for all ranks, unless it has a result."""
    aborted = Aborted(round.seat.rank, f"failed: {type(error).__name__}")
    with contextlib.suppress(StoreLost):
        round.seat.store.claim(round.outcome, aborted.encode())
    round.finish()


def _exchange(round: Round, value: bytes) -> bytes:
    seat = round.seat
    try:
        if (values := round.gather(value)) is not None:
            if seat.rank == 0:
                return seat.store.claim(round.outcome, _VALUES + pack(values))
            seat.store.claim(round.key(seat.rank), pack(values))
        told = seat.store.wait(round.outcome, rank=0, at=round.at)
        assert told is not None
        return told
    except RankLost as lost:
        return seat.store.claim(round.outcome, Aborted(lost.rank, lost.why).encode())
