"""Decides which rank writes which shard, or which bytes of a file: pure functions of facts that every rank knows, so
ranks agree without talking.

A shard that one rank holds is written by that rank. Replicas of a shard, and of a whole state, share the work by bytes
(FastPersist, 4.2).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate, chain, pairwise, zip_longest
from typing import NamedTuple

BLOCK_BYTES = 4096


class Held(NamedTuple):
    """A shard that this rank holds."""

    name: str
    nbytes: int
    group: Hashable  # the ranks that hold the same shards hold equal groups in equal order
    replica: int  # which of them this rank is, from 0
    replicas: int  # how many there are


def writes(held: Sequence[Held]) -> list[bool]:
    """Whether this rank writes each shard: exactly one of its replicas does, and their bytes differ by at most the
    largest shard."""
    answer = [shard.replicas == 1 for shard in held]
    groups: dict[Hashable, list[int]] = {}
    for at, shard in enumerate(held):
        if shard.replicas > 1:
            groups.setdefault((shard.group, shard.replicas), []).append(at)
    for members in groups.values():
        members.sort(key=lambda at: (-held[at].nbytes, held[at].name))
        loads = [(0, replica) for replica in range(held[members[0]].replicas)]
        for at in members:
            nbytes, replica = loads[0]
            heapq.heapreplace(loads, (nbytes + held[at].nbytes, replica))
            answer[at] = replica == held[at].replica
    return answer


class Region(NamedTuple):
    """The part of one file that several ranks write."""

    begin: int  # of the first storage
    end: int  # where the block with the last byte of the last storage begins; what follows is rank 0's
    ranges: list[list[tuple[int, int]]]
    """Begin and end of what each writer writes, in the order of the file: whole blocks between ``begin`` and ``end``. A
    storage that several of them write has its checksum in a block of the first writer."""


def cut(begins: Sequence[int], sizes: Sequence[int], before: int, writers: int) -> Region:
    """Cuts storages that follow one another in a file into ranges for so many writers, of which each takes equal bytes.

    ``begins``: the offsets of the storages, multiples of 4096; ``sizes``: their bytes, none 0. ``before``: the bytes
    that the first writer writes besides. No writer takes more than a block beyond the mean; but the first one takes all
    of ``before``, even if that is more, and up to a block of each storage that others share."""
    ends = list(accumulate(sizes, initial=0))
    total = ends[-1]
    first = min(max((before + total) / writers - before, 0), total)
    targets = [first + (total - first) * k / max(writers - 1, 1) for k in range(writers - 1)]
    end = _floor(begins[-1] + sizes[-1])
    cuts: list[int] = []
    held: dict[int, int] = {}  # the blocks with checksums of storages that are cut
    for target in targets:
        at = min(bisect_right(ends, target) - 1, len(sizes) - 1)
        offset = _place(target - ends[at], sizes[at])
        behind = begins[at + 1] if at + 1 < len(sizes) else end
        if offset == sizes[at]:
            cuts.append(behind)
            continue
        cuts.append(begins[at] + offset)
        if offset and at + 1 < len(sizes):
            held[_floor(begins[at] + sizes[at])] = behind
    bounds = [begins[0], *cuts, end]
    gaps = sorted(held.items())
    ranges = [_without(gaps, begin, end) for begin, end in pairwise(bounds)]
    ranges[0] = joined(sorted(ranges[0] + gaps))
    return Region(begins[0], end, ranges)


def cut_around(begin: int, end: int, kept: Sequence[tuple[int, int]], writers: int) -> Region:
    """Cuts bytes that follow one another in a file into ranges for so many writers. Each takes equal bytes, but the
    first one all that it must.

    ``begin``: a multiple of 4096; ``end``: exact. ``kept``: begin and end of what the first writer must write, in
    order; it takes whole blocks."""
    last = _floor(end)
    gaps: list[tuple[int, int]] = []
    for first, behind in kept:
        gap = _floor(first), min(-(-behind // BLOCK_BYTES) * BLOCK_BYTES, last)
        if gaps and gap[0] <= gaps[-1][1]:
            gap = gaps.pop()[0], gap[1]
        if gap[0] < gap[1]:
            gaps.append(gap)
    free = _without(gaps, begin, last)
    before, total = sum(b - a for a, b in gaps), sum(b - a for a, b in free)
    first_takes = min(max((before + total) / writers - before, 0), total)
    bounds = [0, *(first_takes + (total - first_takes) * k / max(writers - 1, 1) for k in range(writers))]
    edges = [_floor(round(bound)) for bound in bounds]
    edges[-1] = total
    ranges: list[list[tuple[int, int]]] = []
    for low, high in pairwise(edges):
        found, at = [], 0
        for a, b in free:
            piece = a + max(low - at, 0), min(a + high - at, b)
            if piece[0] < piece[1]:
                found.append(piece)
            at += b - a
        ranges.append(found)
    ranges[0] = joined(sorted(ranges[0] + gaps))
    return Region(begin, last, ranges)


def _place(target: float, nbytes: int) -> int:
    """The offset nearest to the target at which a storage can be cut: a multiple of 4096, or its end."""
    below = _floor(int(target))
    return min(below, min(below + BLOCK_BYTES, nbytes), key=lambda offset: abs(offset - target))


def _floor(offset: int) -> int:
    return offset // BLOCK_BYTES * BLOCK_BYTES


def _without(gaps: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The range without the gaps."""
    left = []
    for gap_begin, gap_end in gaps:
        if begin < gap_end and gap_begin < end:
            left.append((begin, gap_begin))
            begin = gap_end
    left.append((begin, end))
    return [(a, b) for a, b in left if a < b]


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


class Piece(NamedTuple):
    """A part of one storage, or all of it."""

    number: int  # of the storage
    begin: int  # bytes
    nbytes: int


def runs(begins: Sequence[int], sizes: Sequence[int], count: int) -> list[list[Piece]]:
    """Cuts storages that follow one another in a file into ``count`` runs of about equal bytes, for reads: at multiples
    of 4096 in the file, so that no block is read twice.

    ``begins`` and ``sizes``: the offsets of the storages, and their bytes."""
    ends = list(accumulate(sizes, initial=0))
    found: list[list[Piece]] = [[] for _ in range(count)]
    number, done = 0, 0
    for k, run in enumerate(found, 1):
        target = ends[-1] * k // count
        while number < len(sizes):
            upto = sizes[number]
            if ends[number] + upto > target:
                upto = max(_floor(begins[number] + target - ends[number]) - begins[number], done)
            if upto > done:
                run.append(Piece(number, done, upto - done))
            done = upto
            if done < sizes[number]:
                break
            number, done = number + 1, 0
    return found


def spread(nodes: Sequence[Hashable], count: int) -> list[int]:
    """Chooses ``count`` ranks, evenly from all nodes, and rank 0 among them; in their order. ``nodes``: that of each
    rank."""
    by_node: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    turns = chain.from_iterable(zip_longest(*by_node.values()))
    return sorted([rank for rank in turns if rank is not None][:count])
