"""Saves of a state that all ranks hold: they write its files together (file.py).

Rank 0 makes the staged folder, and creates the files in it before it tells the others the name. So a rank that opens
a file finds it there.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyckpt import _engine
from lazyckpt.errors import SaveError
from lazyckpt.pipeline.plan import FilePlan, NoPlan, StatePlan
from lazyckpt.pipeline.replicated.file import ReplicaFile, Share
from lazyckpt.pipeline.replicated.plan import ReplicaCache
from lazyckpt.pipeline.replicated.whole import WholeState
from lazyckpt.pipeline.request import About, Lineage, Request
from lazyckpt.pipeline.sharded.crew import Crew
from lazyckpt.pipeline.sharded.request import SharedCheckpointRequest, SharedRequest
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.global_state import is_own
from lazyckpt.storage.commit import Staging
from lazyckpt.storage.manifest import STATE, FileEntry, own_file
from lazyckpt.storage.shared import AttachedStaging

COMPARED = "compared with other ranks"  # begins what stands in the place of the name of a file


class TogetherRequest(SharedRequest):
    """A save with files that the ranks write together, beside others that each has of its own."""

    _replicas: Sequence[ReplicaFile] = ()  # not changed once it is launched
    _job: _engine.Job | None = None

    def plans(self, own: Mapping[str, FilePlan]) -> dict[str, FilePlan]:
        """The plans of this rank's files. ``own``: of those that it writes alone."""
        parts: dict[str, FilePlan] = {}
        compared: dict[str, FilePlan] = {}
        for number, each in enumerate(self._replicas):
            parts[each.name], compared[f"{COMPARED} ({number})"] = each.plans
        return {**parts, **own, **compared}

    def _begin(self) -> Staging:
        assert self._ballot is not None
        if self._rank == 0:
            self._staging = self._stage_here()
            return self._staging
        try:
            name, note = self._ballot.staged_name()
        finally:
            if self._ballot.step_of_rank_0 is not None:
                self._crew.numbers.strayed(self._ordinal, self._ballot.step_of_rank_0)
        told = json.loads(note)
        if [each.name for each in self._replicas] != list(told):
            mine = [each.name for each in self._replicas]
            what = f"rank 0 saves {list(told)} with the other ranks, this rank {mine}"
            raise SaveError(what, path=self.path, step=self.step)
        for each in self._replicas:
            if (why := each.hear(told[each.name])) is not None:
                raise SaveError(why, path=self.path, step=self.step)
        return self._attach(name)

    def open(self, job: _engine.Job, number: int, path: Path, nbytes: int) -> None:
        self._job = job
        if path.name.startswith(COMPARED):
            job.drop(number)
        elif number < len(self._replicas):
            self._replicas[number].open(job, number, path)
        else:
            super().open(job, number, path, nbytes)

    def opened(self) -> None:
        """Rank 0: tells the others the name of the folder, in which the files now exist."""
        if self._rank == 0:
            assert self._ballot is not None and self._staging is not None
            told = {each.name: each.tell() for each in self._replicas}
            self._ballot.begin(self._staging.path.name, json.dumps(told))

    def agree(self, files: list[FileEntry]) -> None:
        """Votes that this rank's bytes are durable. Rank 0 returns when all have voted."""
        assert self._ballot is not None and self._job is not None
        job, self._job = self._job, None
        count = len(self._replicas)
        own = files[count : len(files) - count]
        of_sources = job.source_crcs()
        sums = array("I")
        counts = [each.own_counts() for each in self._replicas]
        at, behind = 0, len(of_sources) - sum(compared for _, compared in counts)
        for written, compared in counts:
            sums.extend(of_sources[at : at + written])
            sums.extend(of_sources[behind : behind + compared])
            at, behind = at + written, behind + compared
        if sys.byteorder == "big":
            sums.byteswap()
        head = {"files": own, "runs": [job.runs(number) for number in range(count)]}
        if isinstance(self._staging, AttachedStaging):
            self._staging.sync(entry.name for entry in (*files[:count], *own))
        self._ballot.vote(json.dumps(head).encode() + b"\n" + sums.tobytes())
        if self._rank == 0:
            try:
                self._read(self._ballot.receipts())
            except ValueError as error:
                raise SaveError(str(error), path=self.path, step=self.step) from error

    def _read(self, receipts: Sequence[bytes]) -> None:
        """Rank 0: puts together what all ranks wrote. Raises ValueError if a file is not whole."""
        self._files = []
        shares: list[list[Share]] = [[] for _ in self._replicas]
        for rank, receipt in enumerate(receipts):
            head, _, of_parts = receipt.partition(b"\n")
            told = json.loads(head)
            self._files.append([FileEntry(name, n, crc) for name, n, crc in told["files"]])
            crcs = array("I", of_parts)
            if sys.byteorder == "big":
                crcs.byteswap()
            at = 0
            for each, found, runs in zip(self._replicas, shares, told["runs"], strict=True):
                written, compared = each.counts(rank)
                middle, end = at + written, at + written + compared
                found.append(Share([(offset, n, crc) for offset, n, crc in runs], crcs[at:middle], crcs[middle:end]))
                at = end
        entries = [each.read(self.path, found) for each, found in zip(self._replicas, shares, strict=True)]
        self._files[0][:0] = entries

    def describe(self, staging: Staging, files: list[FileEntry]) -> None:
        """Rank 0: completes the files, and writes the manifest if there is one."""
        if self._rank != 0:
            return
        for each in self._replicas:
            each.complete(staging.path / each.name)
        written = [entry for of_rank in self._files for entry in of_rank]
        self.crcs = {entry.name: entry.crc32 for entry in written}
        own = {entry.name: [rank] for rank, of_rank in enumerate(self._files) for entry in of_rank}
        self.writers = {**own, **{each.name: each.writers() for each in self._replicas}}
        staging.describe(self._manifest(), [entry.name for entry in written])

    def published(self) -> None:
        Request.published(self)
        for each in self._replicas:
            each.published()


class ReplicatedRequest(TogetherRequest, SharedCheckpointRequest):
    """A numbered checkpoint of a state that all ranks hold. Every rank but 0 has a small file for its own state, such
    as random states."""

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
        self._replicas = [ReplicaFile(STATE, WholeState(state, cache.archive), cache, self._ordinal)]

    def _manifest(self) -> dict[str, Any]:
        written = [entry for of_rank in self._files for entry in of_rank]
        ranks = {"world_size": len(self._files), "writers": self.writers}
        return self._lineage.manifest(self._number, written, self._about, **ranks)

    def published(self) -> None:
        super().published()
        self._continue_line()


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
    own: dict[str, FilePlan] = {}
    if crew.rank != 0:
        mine = CompositeProvider()
        mine.parts = {name: part for name, part in state.parts.items() if is_own(part)}
        own[own_file(crew.rank)] = StatePlan(mine, cache.own)
    return request, request.plans(own)
