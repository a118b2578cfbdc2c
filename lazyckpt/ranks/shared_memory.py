"""Sends tensors from one rank to the others of its machine, through memory that they share.

Each rank has a segment: a ring of slots, and counters that only it writes. The sender fills slots and counts them. The
others take the bytes and count what they have taken, so the sender knows which slots are free. There is no lock, and a
rank may leave at any time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from lazyckpt import waits
from lazyckpt.config import MIB
from lazyckpt.ranks.broadcast import Undelivered, bytes_of
from lazyckpt.ranks.lookout import Lookout
from lazyckpt.ranks.rounds import RankLost, StoreLost

SLOT_BYTES = 2 * MIB  # small, so that they stay in a processor's cache
SLOTS = 4
_HEAD_BYTES = 4096  # counters
_ALIGNED = 64  # bytes, in a slot


class Segment:
    """The shared memory of one rank, as this or another process sees it."""

    def __init__(self, fd: int, owns: bool = False) -> None:
        self._fd = fd
        self._owns = owns
        memory = mmap.mmap(fd, _HEAD_BYTES + SLOTS * SLOT_BYTES)
        self.counters = memoryview(memory)[:_HEAD_BYTES].cast("Q")  # filled slots; then the slots taken, by sender
        self.slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEAD_BYTES).view(SLOTS, SLOT_BYTES)

    @classmethod
    def make(cls) -> tuple[Segment | None, str]:
        """Returns new memory, and how other processes of this machine find it. It goes with the last that maps it.

        If the system allows none, the offer is empty: no process finds it."""
        name = f"lazyckpt-{uuid.uuid4().hex}"
        try:
            fd = os.memfd_create(name)
        except OSError:
            return None, ""
        try:
            os.ftruncate(fd, _HEAD_BYTES + SLOTS * SLOT_BYTES)
            return cls(fd, owns=True), f"{os.getpid()}/{fd}/{name}"
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def find(cls, offer: str) -> Segment:
        """Maps the memory of another process. Raises OSError if that is not on this machine, or in a container of its
        own, where the same number may be another process."""
        pid, number, name = offer.split("/")
        path = f"/proc/{int(pid)}/fd/{int(number)}"
        if not os.readlink(path).startswith(f"/memfd:{name} "):
            raise OSError(f"{path} is not {name}")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Other processes cannot find it any more."""
        if self._owns:
            os.close(self._fd)


class Part(NamedTuple):
    """Bytes of one tensor in a slot."""

    number: int  # of the tensor
    begin: int  # bytes
    nbytes: int
    at: int  # in the slot


def packed(sizes: Sequence[int]) -> Iterator[list[Part]]:
    """Lays tensors of so many bytes out in slots, one after the other."""
    parts: list[Part] = []
    at = 0
    for number, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if at >= SLOT_BYTES:
                yield parts
                parts, at = [], 0
            nbytes = min(size - begin, SLOT_BYTES - at)
            parts.append(Part(number, begin, nbytes, at))
            begin += nbytes
            at = -(-(at + nbytes) // _ALIGNED) * _ALIGNED
    if parts:
        yield parts


class SharedMemory:
    """Takes the place of ``Broadcasts`` for ranks of one machine, on any device."""

    def __init__(self, lookout: Lookout, rank: int, segments: Mapping[int, Segment]) -> None:
        """``segments``: of all ranks that take part, by rank."""
        self.lookout = lookout
        self._rank = rank
        self._segments = segments
        self._done = dict.fromkeys(segments, 0)  # slots, by their sender

    @torch.no_grad()
    def start(self, root: int, tensors: Iterable[torch.Tensor]) -> None:
        """As ``Broadcasts.start``; returns when this rank has sent or taken all."""
        tensors = list(tensors)
        wholes = [tensor.contiguous() for tensor in tensors]
        contents = [bytes_of(whole) for whole in wholes]
        for parts in packed([tensor.nbytes for tensor in tensors]):
            slot = self._segments[root].slots[self._done[root] % SLOTS]
            self._await(root)
            for number, begin, nbytes, at in parts:
                content, shared = contents[number][begin : begin + nbytes], slot[at : at + nbytes]
                if root == self._rank:
                    shared.copy_(content)
                else:
                    content.copy_(shared)
            self._done[root] += 1
            counters = self._segments[self._rank].counters
            counters[0 if root == self._rank else 1 + root] = self._done[root]
        if root != self._rank:
            for tensor, whole in zip(tensors, wholes, strict=True):
                if whole is not tensor:
                    tensor.copy_(whole)

    def finish(self) -> None:
        """As ``Broadcasts.finish``."""

    def _await(self, root: int) -> None:
        """Waits until the next slot of this sender is free, or filled."""
        done = self._done[root]
        if root == self._rank:
            taken = [s.counters for rank, s in self._segments.items() if rank != root]
            self._until(lambda: all(counters[1 + root] > done - SLOTS for counters in taken))
        else:
            filled = self._segments[root].counters
            self._until(lambda: filled[0] > done)

    def _until(self, is_so: Callable[[], bool]) -> None:
        pause_s = waits.SLOT_FIRST_LOOK_S
        try:
            while not is_so():
                self.lookout.look()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, waits.SLOT_LAST_LOOK_S)
        except (RankLost, StoreLost) as error:
            self.lookout.give_up(error)
            raise Undelivered from None


def found(offers: Mapping[int, str], rank: int, own: Segment | None) -> dict[int, Segment] | None:
    """The segments of these ranks, by rank. None if one cannot be mapped: then it is not on this machine."""
    with contextlib.suppress(OSError, ValueError):
        segments = {other: Segment.find(offer) for other, offer in offers.items() if other != rank}
        return None if own is None else {rank: own, **segments}
    return None
