"""One checkpoint of a state that all ranks hold: each writes its part of ``state.pt``, which is, byte for byte, the
file that one rank would write.

No rank has the checksum of a storage that several write. Rank 0 has the blocks of the file where such checksums stand,
and writes them when it has the receipts of all, together with the directory of the archive. Every other rank has a
small file for its own state, such as random states.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyckpt import _engine
from lazyckpt.errors import SaveError
from lazyckpt.formats import program
from lazyckpt.pipeline.plan import FilePlan, NoPlan, StatePlan
from lazyckpt.pipeline.replicated.plan import ComparedPlan, Program, ReplicaCache, SharePlan
from lazyckpt.pipeline.replicated.share import Split
from lazyckpt.pipeline.request import About, Lineage, Request
from lazyckpt.pipeline.sharded.crew import Crew
from lazyckpt.pipeline.sharded.request import SharedCheckpointRequest
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.global_state import is_own
from lazyckpt.storage.commit import Staging
from lazyckpt.storage.manifest import STATE, FileEntry, own_file
from lazyckpt.storage.shared import AttachedStaging
from lazyckpt.warn import warn_in_background

COMPARED = "compared with other ranks"  # in the place of the name of a file
_MAX_NAMES = 3
Run = tuple[int, int, int]  # offset, bytes, CRC-32
Part = tuple[int, int, int]  # storage, begin and end


class ReplicatedRequest(SharedCheckpointRequest):
    """A numbered checkpoint of a state that all ranks hold."""

    def __init__(
        self,
        path: Path,
        step: int,
        lineage: Lineage,
        about: About,
        *,
        crew: Crew,
        state: CompositeProvider,
        cache: ReplicaCache,
    ) -> None:
        super().__init__(path, step, lineage, about, crew=crew, layout=f"{', '.join(state.parts)} in one file")
        self._cache = cache
        self.plan_of_state = SharePlan(state, cache, self._ordinal)
        self.compared = ComparedPlan(self.plan_of_state)
        self._told_alone: bool | None = None  # what rank 0 tells with this save
        self._job: _engine.Job | None = None
        self._shift = 0  # from the offsets of this rank's program to those of rank 0's
        self._late: list[tuple[int, bytes]] = []  # rank 0: what it writes when it has all receipts: offset, bytes

    @property
    def _program(self) -> Program:
        assert self.plan_of_state.program is not None
        return self.plan_of_state.program

    def _begin(self) -> Staging:
        assert self._ballot is not None and self._group is not None
        if self._rank == 0:
            self._staging = self._group.stage(self.path)
            return self._staging
        try:
            name, note = self._ballot.staged_name()
        finally:
            if self._ballot.step_of_rank_0 is not None:
                self._crew.numbers.strayed(self._ordinal, self._ballot.step_of_rank_0)
        told = json.loads(note)
        self._cache.of_rank_0 = told.get("tensors", self._cache.of_rank_0)
        split = self._program.split
        self._told_alone = told.get("alone")
        if told["identity"] != split.identity:
            raise SaveError(self._difference(split), path=self.path, step=self.step)
        self._shift = told["begin"] - split.begin
        return self._group.attach(self.path, name)

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
            f"the state differs from that of rank 0: {found}. With writers={self._cache.setting!r} all ranks track the "
            "same state, in the same order, with optimizers for the same parameters"
        )

    def _shared_tensors(self, split: Split) -> list[tuple[str, int]]:
        return [(split.names[at], split.laid.sizes[at]) for at in range(split.laid.shared, len(split.laid.sizes))]

    def open(self, job: _engine.Job, number: int, path: Path, nbytes: int) -> None:
        self._job = job
        if path.name == COMPARED:
            job.drop(number)
        elif number > 0:
            super().open(job, number, path, nbytes)
        elif self._rank == 0:
            job.open(number, path, self._program.nbytes)
        else:
            job.open_existing(number, path, self._shift)

    def opened(self) -> None:
        """Rank 0: tells the others the name of the folder, in which ``state.pt`` now exists."""
        if self._rank != 0:
            return
        assert self._ballot is not None and self._staging is not None
        split = self._program.split
        told: dict[str, Any] = {"begin": split.begin, "identity": split.identity}
        if self._cache.differ != self._cache.alone_told:
            self._told_alone = told["alone"] = self._cache.differ
        if told["identity"] != self._cache.told:
            told["tensors"] = self._shared_tensors(split)
        self._ballot.begin(self._staging.path.name, json.dumps(told))

    def agree(self, files: list[FileEntry]) -> None:
        """Votes that this rank's bytes are durable. Rank 0 returns when all have voted."""
        assert self._ballot is not None and self._job is not None
        job, self._job = self._job, None
        split, writer, *_ = self._program
        of_sources, compared = job.source_crcs(), len(self.compared.parts)
        sums = array("I", of_sources[: len(split.cut(writer).parts)] + of_sources[len(of_sources) - compared :])
        if sys.byteorder == "big":
            sums.byteswap()
        own = [entry for entry in files[1:] if entry.name != COMPARED]
        receipt = json.dumps({"files": own, "runs": job.runs(0)}).encode() + b"\n" + sums.tobytes()
        if isinstance(self._staging, AttachedStaging):
            self._staging.sync([STATE, *(entry.name for entry in own)])
        self._ballot.vote(receipt)
        if self._rank == 0:
            try:
                self._read(self._ballot.receipts())
            except ValueError as error:
                raise SaveError(str(error), path=self.path, step=self.step) from error

    def _read(self, receipts: Sequence[bytes]) -> None:
        """Rank 0: puts together what all ranks wrote. Raises ValueError if that is not the file."""
        split, _, nbytes, directory = self._program
        assert directory is not None
        runs: list[Run] = []
        sums: dict[Part, int] = {}  # of the parts in the file
        compared: list[tuple[int, Part, int]] = []  # rank, part and CRC-32
        self._files = []
        for rank, receipt in enumerate(receipts):
            head, _, of_parts = receipt.partition(b"\n")
            told = json.loads(head)
            self._files.append([FileEntry(name, n, crc) for name, n, crc in told["files"]])
            runs += [(offset, n, crc) for offset, n, crc in told["runs"]]
            crcs = array("I", of_parts)
            if sys.byteorder == "big":
                crcs.byteswap()
            parts = split.parts(split.writers.index(rank)) if rank in split.writers else []
            sums.update(zip(parts, crcs[: len(parts)], strict=True))
            others = split.compared(rank, self.plan_of_state.turn)
            compared += [(rank, *both) for both in zip(others, crcs[len(parts) :], strict=True)]
        crcs_of_storages = _whole([(*part, crc) for part, crc in sums.items()], split.laid.sizes)
        whole = [(at, 0, n) for at, n in enumerate(split.laid.sizes)]
        self._compare(split, compared, dict(zip(whole, crcs_of_storages, strict=True)) if split.alone else sums)
        late = [(at, crcs_of_storages[storage].to_bytes(4, "little")) for at, storage in split.cut(0).late]
        late.append((directory.offset, program.rendered(directory, crcs_of_storages)))
        crc = _crc_of_file(runs, nbytes)
        for offset, data in late:
            before = split.no_sums if offset == directory.offset else bytes(4)
            crc ^= _engine.crc32_combine(_engine.crc32(data) ^ _engine.crc32(before), 0, nbytes - offset - len(data))
        self._late = late
        self._files[0].insert(0, FileEntry(STATE, nbytes, crc))

    def _compare(self, split: Split, compared: list[tuple[int, Part, int]], written: Mapping[Part, int]) -> None:
        """Rank 0: finds out whether replicas differ, and warns if that is new."""
        differing = [(rank, part[0]) for rank, part, crc in compared if written[part] != crc]
        if split.alone and len(split.writers) > 1:
            known, self._cache.differ = self._cache.differ, bool(differing)
        else:
            known, self._cache.differ = self._cache.differ, self._cache.differ or bool(differing)
        if known or not differing:
            return
        rank = differing[0][0]
        other = split.writers[split.compares_with(rank, self.plan_of_state.turn)]
        names = list(dict.fromkeys(split.names.get(at, "?") for of, at in differing if of == rank))
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        kept = "the checkpoint holds those of rank 0" if split.alone else "the checkpoint holds parts of both"
        warn_in_background(
            f"{self.path}: ranks {min(rank, other)} and {max(rank, other)} hold different values in "
            f"{', '.join(names[:_MAX_NAMES])}{more}, so the replicas are none; {kept}. Rank 0 writes all of the next "
            "ones until all ranks hold the same again"
        )

    def describe(self, staging: Staging, files: list[FileEntry]) -> None:
        """Rank 0: completes ``state.pt``, and writes the manifest."""
        if self._rank != 0:
            return
        _write(staging.path / STATE, self._late)
        staging.describe(self._manifest(), [entry.name for of_rank in self._files for entry in of_rank])

    def _manifest(self) -> dict[str, Any]:
        written = [entry for of_rank in self._files for entry in of_rank]
        writers: dict[str, Sequence[int]] = {
            entry.name: [rank] for rank, of_rank in enumerate(self._files) for entry in of_rank
        }
        split = self._program.split
        writers[STATE] = [rank for number, rank in enumerate(split.writers) if split.ranges(number)]
        return self._lineage.manifest(self._number, written, self._about, world_size=len(self._files), writers=writers)

    def published(self) -> None:
        if self._rank == 0:
            self._lineage.published()
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


def _crc_of_file(runs: list[Run], nbytes: int) -> int:
    """The CRC-32 of a file that was written in these runs. Raises ValueError if they do not make up the file."""
    crc = end = 0
    for offset, n, of_run in sorted(runs):
        if offset != end:
            between = f"{min(offset, end)} and {max(offset, end)}"
            raise ValueError(f"no rank, or more than one, wrote the bytes of {STATE} between {between}")
        crc, end = _engine.crc32_combine(crc, of_run, n), end + n
    if end != nbytes:
        raise ValueError(f"{STATE} has {nbytes} bytes, of which the ranks wrote {end}")
    return crc


def _write(path: Path, late: Sequence[tuple[int, bytes]]) -> None:
    """Writes bytes into a file that exists, and syncs it. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for offset, data in late:
            left = memoryview(data)
            while left:
                n = os.pwrite(fd, left, offset)
                left, offset = left[n:], offset + n
        os.fdatasync(fd)
    finally:
        os.close(fd)


def replicated_checkpoint(
    crew: Crew,
    cache: ReplicaCache,
    path: Path,
    step: int,
    lineage: Lineage,
    about: About,
    state: CompositeProvider,
) -> tuple[Request, Mapping[str, FilePlan]]:
    """Returns a save of ``state``, which all ranks hold, as checkpoint ``path``, and the plans of this rank's files."""
    crew.give_up_refused(step)
    if (why := crew.numbers.find(step, path)) is not None:
        return Request(path, step), {STATE: NoPlan(SaveError(why, path=path, step=step))}
    request = ReplicatedRequest(path, step, lineage, about, crew=crew, state=state, cache=cache)
    plans: dict[str, FilePlan] = {STATE: request.plan_of_state}
    if crew.rank != 0:
        own = CompositeProvider()
        own.parts = {name: part for name, part in state.parts.items() if is_own(part)}
        plans[own_file(crew.rank)] = StatePlan(own, cache.own)
    plans[COMPARED] = request.compared
    return request, plans
