"""One checkpoint that many ranks write: each its own files, rank 0 also ``.metadata`` and the manifest."""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lazyckpt.errors import SaveError, described, save_error
from lazyckpt.formats.distcp import stamp_of
from lazyckpt.formats.inventory import sealed
from lazyckpt.pipeline.plan import FilePlan, NoPlan
from lazyckpt.pipeline.request import About, Lineage, Request
from lazyckpt.pipeline.sharded.crew import Crew
from lazyckpt.pipeline.sharded.inventories import Shared
from lazyckpt.pipeline.sharded.rank_plan import RankCache, RankFile, RankPlan
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.global_state import Leaves, TrackedState
from lazyckpt.ranks.board import SharedSave
from lazyckpt.storage.commit import Staging
from lazyckpt.storage.manifest import DCP_FILE, DCP_METADATA, STATE, FileEntry
from lazyckpt.storage.shared import AttachedStaging


class SharedRequest(Request):
    """A folder that several ranks fill together, as one of them saves it. It may have several folders of
    torch.distributed.checkpoint, and any other files."""

    def __init__(
        self,
        path: Path,
        step: int | None,
        *,
        crew: Crew,
        layout: str,
        alone: Callable[[], Staging],
        prepare: Callable[[Path], None] = lambda folder: None,
        keep_others: bool = False,
        lone: bool = False,
        latest: Path | None = None,
    ) -> None:
        """``layout`` must be the same on all ranks. ``alone`` makes the staged folder if this is the only rank. Rank 0
        calls ``prepare`` with the folder above. ``keep_others``: as in ``Staging``. ``lone``: it is a lone file."""
        super().__init__(path, step, latest=latest)
        self._ordinal = crew.numbers.next()
        self._crew = crew
        self._alone = alone
        self._prepare = prepare
        self._keep_others = keep_others
        self._lone = lone
        self._group, self._rank = crew.group, crew.rank
        self._inventories = crew.inventories
        self._ballot = (
            None
            if crew.group is None
            else crew.group.ballot(self._ordinal, step, layout, path, lone=lone, latest=latest)
        )
        self._stamp = stamp_of(uuid.uuid4().hex if crew.group is None else crew.group.name_of(self._ordinal))
        self._rank_files: dict[str, RankFile] = {}  # of this rank's sharded files, by name
        self._receipt, self._note = b"", ""
        self._files: list[list[FileEntry]] = []  # of all ranks
        self._metadata: dict[str, bytes] = {}

    def plan(self, folder: str, state: Leaves) -> tuple[str, RankPlan]:
        """The name and the plan of the file with this rank's share of ``state``, in ``folder``, "" being the root."""
        file = RankFile()
        cache = self._crew.caches.setdefault(folder, RankCache())
        name = os.path.join(folder, f"__{self._rank}_0{DCP_FILE}")
        self._rank_files[name] = file
        return name, RankPlan(state, self._rank, cache, file, self._stamp)

    def reached(self) -> None:
        if self._group is not None:
            self._group.reach(self._ordinal)

    def stage(self) -> Staging:
        if self._staging is None:
            self._staging = self._begin()
        return self._staging

    def where(self) -> Path:
        return self.path if self._staging is None else self._staging.path

    def _begin(self) -> Staging:
        if self._ballot is None or self._group is None:
            return self._alone()
        if self._rank == 0:
            self._note = self._inventories.note(self._shared() or self._crew.shared)
            staging = self._staging = self._stage_here()
            self._ballot.begin(staging.path.name, self._note)
            return staging
        try:
            name, note = self._ballot.staged_name()
        finally:
            if self._ballot.step_of_rank_0 is not None:
                self._crew.numbers.strayed(self._ordinal, self._ballot.step_of_rank_0)
        for folder, kinds in json.loads(note or "{}").items():
            self._crew.caches.setdefault(folder, RankCache()).elsewhere = kinds
        return self._attach(name)

    def _stage_here(self) -> Staging:
        """Rank 0: makes the staged folder."""
        assert self._group is not None
        self._prepare(self.path.parent)
        return self._group.stage(self.path, keep_others=self._keep_others, lone=self._lone)

    def _attach(self, name: str) -> Staging:
        """Another rank: finds the staged folder by its name."""
        assert self._group is not None
        return self._group.attach(self.path, name)

    def _shared(self) -> Shared:
        return {os.path.dirname(name): file.shared() for name, file in self._rank_files.items()}

    def check(self) -> None:
        if self._ballot is not None and (aborted := self._ballot.aborted()) is not None:
            raise aborted

    def agree(self, files: list[FileEntry]) -> None:
        """Votes that this rank's files are durable. Rank 0 returns when all have voted."""
        inventory = {name: file.items() for name, file in self._rank_files.items()}
        self._receipt = self._inventories.receipt(files, inventory)
        if isinstance(self._staging, AttachedStaging):
            self._staging.sync(entry.name for entry in files)
        if self._ballot is not None:
            self._ballot.vote(self._receipt)
        if self._rank == 0:
            self._crew.shared = self._shared()
            receipts = [self._receipt] if self._ballot is None else self._ballot.receipts()
            try:
                self._files, self._metadata = self._inventories.read(receipts)
            except ValueError as error:
                raise SaveError(str(error), path=self.path, step=self.step) from error

    def describe(self, staging: Staging, files: list[FileEntry]) -> None:
        """Rank 0: writes the ``.metadata`` of each sharded state, and the manifest if there is one."""
        for folder, pickled in self._metadata.items():
            name = os.path.join(folder, DCP_METADATA)
            metadata = sealed(pickled + self._stamp)
            with open(staging.path / name, "xb") as file:
                file.write(metadata)
            self._files[0].append(FileEntry(name, len(metadata), zlib.crc32(metadata)))
        written = [entry for of_rank in self._files for entry in of_rank] or files
        self.crcs = {entry.name: entry.crc32 for entry in written}
        self.writers = {entry.name: [rank] for rank, of_rank in enumerate(self._files) for entry in of_rank}
        staging.describe(self._manifest(), [entry.name for entry in written])

    def _manifest(self) -> dict[str, Any] | None:
        """None: this folder has none."""
        return None

    def publish(self, staging: Staging) -> Path | None:
        if self._ballot is None:
            return super().publish(staging)
        if self._rank == 0:
            self._ballot.decide()
        else:
            self._ballot.outcome()
        return staging.publish()

    def published(self) -> None:
        super().published()
        self._inventories.committed(self._receipt, self._note)

    @property
    def shared(self) -> SharedSave | None:
        return None if self._group is None else self._group.shared(self._ordinal)

    def failed(self, error: BaseException) -> BaseException:
        if self._ballot is None:
            return error
        what = described(error)
        refused = self._ballot.refuse(what)
        if refused is None or refused.what == f"rank {self._rank} failed: {what}":
            return error
        return refused  # the save was aborted before; this error may be a consequence, since the staged folder is gone

    def abandon(self, why: str = "") -> None:
        if self._ballot is not None:
            self._ballot.refuse(why or "gave it up before save()")
        super().abandon()


class SharedCheckpointRequest(SharedRequest):
    """A numbered checkpoint of a Checkpointer on every rank."""

    def __init__(self, path: Path, step: int, lineage: Lineage, about: About, *, crew: Crew, layout: str) -> None:
        super().__init__(path, step, crew=crew, layout=layout, alone=lambda: Staging(path))
        self._about = about
        self._number = step
        self._lineage = lineage

    def _manifest(self) -> dict[str, Any] | None:
        if self._rank != 0:
            return None
        written = [entry for of_rank in self._files for entry in of_rank]
        ranks = {"world_size": len(self._files), "writers": self.writers}
        return self._lineage.manifest(self._number, written, self._about, **ranks)

    def published(self) -> None:
        super().published()
        self._continue_line()

    def _continue_line(self) -> None:
        if self._rank == 0:
            self._lineage.published(self.shared)
        else:
            self._lineage.published_by_rank_0(self._number, self._about, self.shared)

    def superfluous(self) -> Iterable[Path]:
        if self._rank != 0:
            return ()
        if self._group is not None:
            self._group.check_claim()
        return self._lineage.superfluous()


def shared_checkpoint(
    crew: Crew, path: Path, step: int, lineage: Lineage, about: About, state: CompositeProvider
) -> tuple[Request, Mapping[str, FilePlan]]:
    """Returns a save of ``state`` as checkpoint ``path``, and the plan of this rank's file."""
    crew.give_up_refused(step)
    if (why := crew.numbers.find(step, path)) is not None:
        return Request(path, step), {STATE: NoPlan(SaveError(why, path=path, step=step))}
    request = SharedCheckpointRequest(path, step, lineage, about, crew=crew, layout=", ".join(state.parts))
    name, plan = request.plan("", TrackedState(state.parts, crew.rank, crew.names))
    return request, {name: plan}


def stage_shared(
    crew: Crew,
    target: Path,
    step: int | None,
    alone: Callable[[], Staging],
    prepare: Callable[[Path], None],
    *,
    keep_others: bool,
    latest: Path | None,
    wait: bool,
) -> SharedRequest:
    """Makes the folder of a save that the ranks fill before they save it, and with ``wait`` waits until this rank knows
    its name. ``alone`` makes it where this process is the only rank; ``prepare`` makes the folder above.
    ``keep_others``, ``latest``: see ``Saver.stage``.

    Raises SaveError, of rank 0 too; then all ranks raise."""
    if step is not None and (why := crew.numbers.find(step, target)) is not None:
        raise SaveError(why, path=target, step=step)
    request = SharedRequest(
        target,
        step,
        crew=crew,
        layout=target.name,
        alone=alone,
        prepare=prepare,
        keep_others=keep_others,
        latest=latest,
    )
    try:
        if wait or crew.rank == 0:
            request.stage()
    except BaseException as error:
        told = request.failed(error)
        raise save_error(told, path=target, step=step) if isinstance(told, OSError) else told from None
    request.reached()  # the caller may have large files to write before it saves
    return request
