"""Which part of a file each rank writes: a function of the names, sizes and owners of the storages, so that ranks
that hold the same state agree on it without talking (FastPersist, 4.2)."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Container, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

from lazyckpt.formats import program, safetensors, torch_zip
from lazyckpt.formats.program import Cut, Extent
from lazyckpt.ranks import shares

LARGE_BYTES = 64 << 10  # storages from here on begin with a block of the file, after all smaller ones
AUTO_BYTES = 16 << 20  # that a writer takes at least, if their number is up to lazyckpt


class Laid(NamedTuple):
    """The storages of a state in the order of the file. The large ones with an owner are the last."""

    keys: list[str]
    sizes: array[int]
    owned: bytes  # of each storage: whether it has an owner
    shared: int  # the place of the first large storage with an owner; only these are cut
    besides: int  # bytes of the others that are rank 0's, as far as all ranks have them


class Form(Protocol):
    """Where the storages of a file lie."""

    data: Extent | None  # the program that writes them; None if there are none
    end: int  # the exact offset behind that

    @property
    def begins(self) -> Sequence[int]:
        """The offsets of the storages."""

    def region(self, laid: Laid, writers: int) -> shares.Region:
        """The part of the file that so many writers share."""


class ZipForm:
    """That of an archive."""

    def __init__(self, archive: str, laid: Laid) -> None:
        self.layout = torch_zip.Layout(archive, laid.keys, laid.sizes)
        self.begins = self.layout.begins
        self.data = self.layout.head[0] if self.layout.head else None
        self.end = self.layout.head_end

    def region(self, laid: Laid, writers: int) -> shares.Region:
        return shares.cut(self.begins[laid.shared :], laid.sizes[laid.shared :], laid.besides, writers)


class SafetensorsForm:
    """That of a safetensors file, in which tensors with and without an owner follow one another."""

    def __init__(self, layout: safetensors.Layout, laid: Laid) -> None:
        *begins, self.end = accumulate(laid.sizes, initial=layout.header_bytes)
        self.begins: Sequence[int] = begins
        self.data: Extent | None = layout.data

    def region(self, laid: Laid, writers: int) -> shares.Region:
        placed = zip(self.begins, laid.sizes, laid.owned, strict=True)
        kept = [(begin, begin + nbytes) for begin, nbytes, owned in placed if nbytes and not owned]
        return shares.cut_around(self.begins[0], self.end, kept, writers)


class Split:
    """The file, cut for its writers.

    They compare their replicas, too: a writer copies, for their checksums alone, storages that another one writes; or
    rank 0 writes the file alone, and the others do this with all storages that have an owner."""

    def __init__(self, laid: Laid, form: Form, writers: list[int], *, alone: bool) -> None:
        """``writers``: the ranks that write, rank 0 first; if ``alone``, only that one, and the others compare."""
        self.laid = laid
        self.form = form
        self.writers = writers
        self.alone = alone
        self.region: shares.Region | None = None  # None: one rank writes all
        if len(writers) > 1 and len(laid.sizes) > laid.shared and not alone:
            self.region = form.region(laid, len(writers))
        self.names: dict[int, str] = {}  # of the storages with an owner
        self._cuts: dict[int | None, Cut] = {}
        self._rows: array[int] | None = None  # with the checksums of all storages, and as they are written first:
        self._no_sums = b""

    @property
    def begin(self) -> int:
        """Where the bytes of the other writers begin; other ranks may have it some blocks before or behind."""
        return 0 if self.region is None else self.region.begin

    @cached_property
    def identity(self) -> str:
        """The same on two ranks only if they cut the file alike."""
        if len(self.writers) == 1:
            return "one writer"
        ranges: list[list[tuple[int, int]]] = []
        if self.region is not None:
            begin = self.region.begin
            ranges = [[(a - begin, b - begin) for a, b in of_one] for of_one in self.region.ranges[1:]]
        first, sizes = self.laid.shared, self.laid.sizes
        small = [n for n, owned in zip(sizes[:first], self.laid.owned, strict=False) if owned]
        told = [self.alone, self.writers, ranges, self.laid.keys[first:], list(sizes[first:]), small]
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def compared(self, rank: int, turn: int) -> list[tuple[int, int, int]]:
        """The parts of storages that a rank compares, as ``parts``. In the next turn they are those of another rank."""
        if rank not in self.writers or len(self.writers) == 1:
            return []
        if self.alone:
            sizes = self.laid.sizes
            return [(at, 0, sizes[at]) for at, owned in enumerate(self.laid.owned) if owned and sizes[at] and rank]
        return [part for part in self.parts(self.compares_with(rank, turn)) if self.laid.owned[part[0]]]

    def compares_with(self, rank: int, turn: int) -> int:
        """The number of the writer with whose part of the file a rank compares its own copy."""
        count = len(self.writers)
        return 0 if self.alone else (self.writers.index(rank) + 1 + turn % (count - 1)) % count

    def ranges(self, writer: int | None) -> list[tuple[int, int]]:
        """What a writer, by its number, writes of the program of the storages, up to ``form.end``; the first one also
        writes what else is in the file. None: no writer."""
        begin, end = 0 if self.form.data is None else self.form.data.offset, self.form.end
        if self.region is None:
            return [(begin, end)] if writer == 0 else []
        if writer is None:
            return []
        ranges = self.region.ranges[writer]
        if writer:
            return ranges
        edges = (begin, self.region.begin), (self.region.end, end)
        return shares.joined([one for one in (edges[0], *ranges, edges[1]) if one[0] < one[1]])

    def cut(self, writer: int | None) -> Cut:
        """The program of the ranges of a writer. The first one's ends at ``form.end``."""
        if writer not in self._cuts:
            data = self.form.data
            self._cuts[writer] = program.cut(data, self.ranges(writer)) if data is not None else Cut([], [], [])
        return self._cuts[writer]

    def without_checksums(self, sums: Extent) -> bytes:
        """The bytes of an extent with the checksums of all storages, as long as these are not known: 0 each."""
        if self._rows is not sums.rows:
            self._rows, self._no_sums = sums.rows, program.rendered(sums, [0] * len(self.laid.sizes))
        return self._no_sums

    def parts(self, writer: int | None) -> list[tuple[int, int, int]]:
        """The parts of storages that a writer writes, in this order: storage, begin and end in it."""
        begins, sizes = self.form.begins, self.laid.sizes
        found = []
        for begin, end in self.ranges(writer):
            at = max(bisect_right(begins, begin) - 1, 0)
            while at < len(sizes) and begins[at] < end:
                first, last = max(begin - begins[at], 0), min(end - begins[at], sizes[at])
                if first < last:
                    found.append((at, first, last))
                at += 1
        return found


def writers_of(setting: str | int, sizes: Sequence[int], nodes: Sequence[str]) -> list[int]:
    """The ranks that write, for a value of ``Config.writers``. ``sizes``: of the storages that are cut; ``nodes``: that
    of each rank."""
    everyone = list(range(len(nodes)))
    if setting == "all":
        return everyone
    if setting == "rank0":
        return [0]
    if setting == "node":
        return sorted({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values())
    count = sum(sizes) // AUTO_BYTES if setting == "auto" else int(setting)
    return shares.spread(nodes, min(max(count, 1), len(nodes)))


def laid_out(keys: list[str], sizes: array[int], owned: list[bool], own: Container[int]) -> tuple[list[int], Laid]:
    """The places of the storages in the order of an archive. ``own``: of those that are not the same on all ranks."""
    places = torch_zip.file_order(sizes, owned)
    ordered = array("Q", map(sizes.__getitem__, places))
    shared = len(places)
    while shared and ordered[shared - 1] >= LARGE_BYTES and owned[places[shared - 1]]:
        shared -= 1
    besides = sum(ordered[at] for at in range(shared) if places[at] not in own)
    with_owner = bytes(owned[at] for at in places)
    return places, Laid([keys[at] for at in places], ordered, with_owner, shared, besides)
