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
from lazyckpt.pipeline.replicated.plan import Program, ReplicaCache, SharePlan
from lazyckpt.pipeline.replicated.share import Split
from lazyckpt.pipeline.request import About, Lineage, Request
from lazyckpt.pipeline.sharded.crew import Crew
from lazyckpt.pipeline.sharded.request import SharedCheckpointRequest
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.global_state import is_own
from lazyckpt.storage.commit import Staging
from lazyckpt.storage.manifest import STATE, FileEntry, own_file
from lazyckpt.storage.shared import AttachedStaging

Run = tuple[int, int, int]  # offset, bytes, CRC-32


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
        self.plan_of_state = SharePlan(state, cache)
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
        if told["identity"] != split.identity():
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
        return list(zip(split.names, split.laid.sizes[split.laid.shared :], strict=True))

    def open(self, job: _engine.Job, number: int, path: Path, nbytes: int) -> None:
        if number > 0:
            return super().open(job, number, path, nbytes)
        self._job = job
        if self._rank == 0:
            job.open(number, path, self._program.nbytes)
        else:
            job.open_existing(number, path, self._shift)

    def opened(self) -> None:
        """Rank 0: tells the others the name of the folder, in which ``state.pt`` now exists."""
        if self._rank != 0:
            return
        assert self._ballot is not None and self._staging is not None
        split = self._program.split
        told: dict[str, Any] = {"begin": split.begin, "identity": split.identity()}
        if told["identity"] != self._cache.told:
            told["tensors"] = self._shared_tensors(split)
        self._ballot.begin(self._staging.path.name, json.dumps(told))

    def agree(self, files: list[FileEntry]) -> None:
        """Votes that this rank's bytes are durable. Rank 0 returns when all have voted."""
        assert self._ballot is not None and self._job is not None
        job, self._job = self._job, None
        split, writer, *_ = self._program
        sums = array("I", job.source_crcs()[: len(split.cut(writer).parts)])
        if sys.byteorder == "big":
            sums.byteswap()
        head = {"files": files[1:], "runs": job.runs(0)}
        receipt = json.dumps(head).encode() + b"\n" + sums.tobytes()
        if isinstance(self._staging, AttachedStaging):
            self._staging.sync(entry.name for entry in files)
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
        sums: list[tuple[int, int, int, int]] = []  # storage, begin, end, CRC-32
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
            sums += [(*part, crc) for part, crc in zip(parts, crcs, strict=True)]
        crcs_of_storages = _whole(sums, split.laid.sizes)
        late = [(at, crcs_of_storages[storage].to_bytes(4, "little")) for at, storage in split.cut(0).late]
        late.append((directory.offset, program.rendered(directory, crcs_of_storages)))
        crc = _crc_of_file(runs, nbytes)
        for offset, data in late:
            before = split.no_sums if offset == directory.offset else bytes(4)
            crc ^= _engine.crc32_combine(_engine.crc32(data) ^ _engine.crc32(before), 0, nbytes - offset - len(data))
        self._late = late
        self._files[0].insert(0, FileEntry(STATE, nbytes, crc))

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
            self._cache.told = self._program.split.identity()


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
    return request, plans
