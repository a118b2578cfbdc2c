"""One file of one save that several ranks write, as one of them takes part in it: it is, byte for byte, the file that
one rank would write.

No rank has the checksum of a storage that several write. Rank 0 has the blocks of the file where such checksums stand,
and writes them when it has the receipts of all.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lazyckpt import _engine
from lazyckpt.formats import program
from lazyckpt.pipeline.replicated.plan import ComparedPlan, Program, ReplicaCache, SharePlan
from lazyckpt.pipeline.replicated.share import Split
from lazyckpt.pipeline.replicated.whole import WholeFile
from lazyckpt.storage.manifest import FileEntry
from lazyckpt.warn import warn_in_background

_MAX_NAMES = 3
Run = tuple[int, int, int]  # offset, bytes, CRC-32
Part = tuple[int, int, int]  # storage, begin and end


class Share(NamedTuple):
    """What one rank wrote."""

    runs: list[Run]
    crcs: array[int]  # of the parts of storages that it wrote
    compared: array[int]  # of those that it compared


class ReplicaFile:
    """One file of one save. ``name``: relative to the folder that is saved."""

    def __init__(self, name: str, whole: WholeFile, cache: ReplicaCache, ordinal: int) -> None:
        """``ordinal``: the number of the save among those of all ranks."""
        self.name = name
        share = SharePlan(whole, cache, ordinal)
        self._plans: tuple[SharePlan, ComparedPlan] | None = (share, ComparedPlan(share))  # they hold the state
        self._laid_out: Program | None = None
        self._compares = 0
        self._turn = share.turn
        self._cache = cache
        self._ordinal = ordinal
        self._told_alone: bool | None = None  # what rank 0 tells with this save
        self._shift = 0  # from the offsets of this rank's program to those of rank 0's
        self._late: list[tuple[int, bytes]] = []  # rank 0: what it writes when it has all receipts: offset, bytes

    @property
    def plans(self) -> tuple[SharePlan, ComparedPlan]:
        """Of this rank's part, and of what it compares. Only before the save is launched."""
        assert self._plans is not None
        return self._plans

    @property
    def _program(self) -> Program:
        if self._laid_out is None:
            share, compared = self.plans
            assert share.program is not None
            self._laid_out, self._compares, self._plans = share.program, compared.parts, None
        return self._laid_out

    # before it is written

    def tell(self) -> dict[str, Any]:
        """Rank 0: what the others need to know before they open the file."""
        split = self._program.split
        told: dict[str, Any] = {"begin": split.begin, "identity": split.identity}
        if self._cache.differ != self._cache.alone_told:
            self._told_alone = told["alone"] = self._cache.differ
        if told["identity"] != self._cache.told:
            told["tensors"] = self._shared_tensors(split)
        return told

    def hear(self, told: Mapping[str, Any]) -> str | None:
        """Another rank: takes what rank 0 told. Returns why this rank cannot write its part, if it cannot."""
        self._cache.of_rank_0 = told.get("tensors", self._cache.of_rank_0)
        split = self._program.split
        self._told_alone = told.get("alone")
        if told["identity"] != split.identity:
            return self._difference(split)
        self._shift = told["begin"] - split.begin
        return None

    def _difference(self, split: Split) -> str:
        """Names the first tensor that this rank does not have as rank 0 has it."""
        mine = [[name, nbytes] for name, nbytes in self._shared_tensors(split)]
        theirs = self._cache.of_rank_0
        at = next(
            (at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        here, there = (
            f"{of[at][0]} with {of[at][1]} bytes" if at < len(of) else "no more tensors" for of in (mine, theirs)
        )
        found = f"where rank 0 has {there}, this rank has {here}"
        if here == there:
            found = "this rank has other tensors besides the parameters and the state of optimizers"
        return (
            f"the state differs from that of rank 0: {found}. With writers={self._cache.writers.setting!r} all ranks "
            "save the same state, in the same order, with optimizers for the same parameters"
        )

    def _shared_tensors(self, split: Split) -> list[tuple[str, int]]:
        return [
            (split.names.get(at, "?"), split.laid.sizes[at]) for at in range(split.laid.shared, len(split.laid.sizes))
        ]

    def open(self, job: _engine.Job, number: int, path: Path) -> None:
        """``number``: of the file in the job. Raises OSError."""
        if self._cache.rank == 0:
            job.open(number, path, self._program.nbytes)
        else:
            job.open_existing(number, path, self._shift)

    # once it is written

    def own_counts(self) -> tuple[int, int]:
        """How many parts of storages this rank writes, and how many it compares."""
        split, writer, *_ = self._program
        return len(split.cut(writer).parts), self._compares

    def counts(self, rank: int) -> tuple[int, int]:
        """How many parts of storages a rank writes, and how many it compares."""
        split = self._program.split
        written = len(split.parts(split.writers.index(rank))) if rank in split.writers else 0
        return written, len(split.compared(rank, self._turn))

    def read(self, path: Path, shares: Sequence[Share]) -> FileEntry:
        """Rank 0: puts together what all ranks wrote; ``path`` is for messages. Raises ValueError if that is not the
        file."""
        split, _, nbytes, sums_extent, no_sums = self._program
        assert sums_extent is not None
        runs: list[Run] = []
        sums: dict[Part, int] = {}  # of the parts in the file
        compared: list[tuple[int, Part, int]] = []  # rank, part and CRC-32
        for rank, share in enumerate(shares):
            runs += share.runs
            parts = split.parts(split.writers.index(rank)) if rank in split.writers else []
            sums.update(zip(parts, share.crcs, strict=True))
            others = split.compared(rank, self._turn)
            compared += [(rank, *both) for both in zip(others, share.compared, strict=True)]
        crcs = _whole([(*part, crc) for part, crc in sums.items()], split.laid.sizes)
        whole = [(at, 0, n) for at, n in enumerate(split.laid.sizes)]
        self._compare(path, split, compared, dict(zip(whole, crcs, strict=True)) if split.alone else sums)
        zero = bytes(4)
        late = [(at, zero, crcs[storage].to_bytes(4, "little")) for at, storage in split.cut(0).late]
        late.append((sums_extent.offset, no_sums, program.rendered(sums_extent, crcs)))
        crc = _crc_of_file(self.name, runs, nbytes)
        for offset, before, data in late:
            changed = _engine.crc32(data) ^ _engine.crc32(before)
            crc ^= _engine.crc32_combine(changed, 0, nbytes - offset - len(data))
        self._late = [(offset, data) for offset, _, data in late]
        return FileEntry(self.name, nbytes, crc)

    def _compare(
        self, path: Path, split: Split, compared: list[tuple[int, Part, int]], written: Mapping[Part, int]
    ) -> None:
        """Rank 0: finds out whether replicas differ, and warns if that is new."""
        differing = [(rank, part[0]) for rank, part, crc in compared if written[part] != crc]
        if split.alone and len(split.writers) > 1:
            known, self._cache.differ = self._cache.differ, bool(differing)
        else:
            known, self._cache.differ = self._cache.differ, self._cache.differ or bool(differing)
        if known or not differing:
            return
        rank = differing[0][0]
        other = split.writers[split.compares_with(rank, self._turn)]
        names = list(dict.fromkeys(split.names.get(at, "?") for of, at in differing if of == rank))
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        kept = "the checkpoint holds those of rank 0" if split.alone else "the checkpoint holds parts of both"
        warn_in_background(
            f"{path}: ranks {min(rank, other)} and {max(rank, other)} hold different values in "
            f"{', '.join(names[:_MAX_NAMES])}{more}, so the replicas are none; {kept}. Rank 0 writes all of the next "
            "ones until all ranks hold the same again"
        )

    def complete(self, path: Path) -> None:
        """Rank 0: writes what no rank knew before. Raises OSError."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for offset, data in self._late:
                left = memoryview(data)
                while left:
                    n = os.pwrite(fd, left, offset)
                    left, offset = left[n:], offset + n
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def writers(self) -> list[int]:
        """The ranks that wrote the file."""
        split = self._program.split
        return [rank for number, rank in enumerate(split.writers) if split.ranges(number)]

    def published(self) -> None:
        """Notes, on every rank, that the save is committed."""
        if self._cache.rank == 0:
            self._cache.told = self._program.split.identity
        if self._told_alone is not None:
            self._cache.told_alone(self._ordinal, self._told_alone)


def _whole(sums: list[tuple[int, int, int, int]], sizes: Sequence[int]) -> list[int]:
    """The CRC-32 of each storage, from those of its parts: storage, begin, end, CRC-32. Raises ValueError unless they
    make up the storages."""
    crcs, ends = [0] * len(sizes), [0] * len(sizes)
    for storage, begin, end, crc in sorted(sums):
        if begin != ends[storage]:
            raise ValueError(f"no rank wrote bytes {ends[storage]} to {begin} of storage {storage}")
        crcs[storage] = crc if begin == 0 else _engine.crc32_combine(crcs[storage], crc, end - begin)
        ends[storage] = end
    for storage, (end, nbytes) in enumerate(zip(ends, sizes, strict=True)):
        if end != nbytes:
            raise ValueError(f"no rank wrote bytes {end} to {nbytes} of storage {storage}")
    return crcs


def _crc_of_file(name: str, runs: list[Run], nbytes: int) -> int:
    """The CRC-32 of a file that was written in these runs. Raises ValueError if they do not make up the file."""
    crc = end = 0
    for offset, n, of_run in sorted(runs):
        if offset != end:
            between = f"{min(offset, end)} and {max(offset, end)}"
            raise ValueError(f"no rank, or more than one, wrote the bytes of {name} between {between}")
        crc, end = _engine.crc32_combine(crc, of_run, n), end + n
    if end != nbytes:
        raise ValueError(f"{name} has {nbytes} bytes, of which the ranks wrote {end}")
    return crc
