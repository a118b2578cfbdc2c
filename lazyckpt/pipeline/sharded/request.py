"""One checkpoint that many ranks write: each its own files, rank 0 also ``.metadata`` and the manifest.

A rank tells rank 0 what its file holds (its *inventory*) at the first save and when that changes; later it sends only
the hash. So from the second save on a checkpoint costs one small message for each rank, in the background.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyckpt.errors import SaveError, described
from lazyckpt.formats.distcp import stamp_of
from lazyckpt.formats.inventory import Inventory, Item, decode, encode, metadata_of, sealed
from lazyckpt.pipeline.request import About, Lineage, Request
from lazyckpt.pipeline.sharded.rank_plan import Contents, RankCache, RankPlan
from lazyckpt.pipeline.turns import Turns
from lazyckpt.providers.global_state import Leaves
from lazyckpt.ranks.group import RankGroup
from lazyckpt.storage.commit import Staging
from lazyckpt.storage.manifest import DCP_FILE, DCP_METADATA
from lazyckpt.storage.shared import AttachedStaging

Files = list[tuple[str, int, int]]  # name, bytes and CRC-32 of each
# By folder: the names that rank 0 writes and other ranks may have, too, with their kinds.
Shared = Mapping[str, Mapping[str, str]]


class Inventories:
    """What the ranks have told each other of their files, from save to save. Background threads call it in the order of
    the saves."""

    def __init__(self) -> None:
        self._told = ""  # the hash of this rank's last inventory that rank 0 knows
        self._noted = ""  # rank 0: its last note that all ranks know
        self._of_rank: dict[int, tuple[str, Inventory]] = {}  # rank 0: with its hash
        self._metadata: tuple[list[str], dict[str, bytes]] = [], {}  # rank 0: hashes by rank, and what they give

    def receipt(self, files: Files, inventory: Inventory) -> bytes:
        """This rank's message to rank 0."""
        encoded = encode(inventory)
        name = hashlib.sha256(encoded).hexdigest()
        head = json.dumps({"files": files, "inventory": name}).encode()
        return head if name == self._told else head + b"\n" + encoded

    def note(self, shared: Shared) -> str:
        """Rank 0's message to the others; "" if they know."""
        note = json.dumps(shared)
        return "" if note == self._noted else note

    def committed(self, receipt: bytes, note: str) -> None:
        """Notes that the ranks have read each other's messages."""
        self._told = json.loads(receipt.partition(b"\n")[0])["inventory"]
        self._noted = note or self._noted

    def read(self, receipts: Sequence[bytes]) -> tuple[list[Files], dict[str, bytes]]:
        """Rank 0: the files of each rank, and the pickle of each ``.metadata`` by the name of its folder. Raises
        ValueError if the files do not make up one state."""
        files: list[Files] = []
        for rank, receipt in enumerate(receipts):
            head, _, inventory = receipt.partition(b"\n")
            told = json.loads(head)
            files.append([(name, nbytes, crc) for name, nbytes, crc in told["files"]])
            if inventory:
                self._of_rank[rank] = told["inventory"], decode(inventory)
            elif self._of_rank.get(rank, ("", {}))[0] != told["inventory"]:
                raise ValueError(f"rank {rank} did not say what its files hold")
        hashes = [self._of_rank[rank][0] for rank in range(len(files))]
        if self._metadata[0] != hashes:
            by_folder: dict[str, dict[str, Sequence[Item]]] = {}
            for rank in range(len(files)):
                for file, items in self._of_rank[rank][1].items():
                    folder, name = os.path.split(file)
                    by_folder.setdefault(folder, {})[name] = items
            self._metadata = hashes, {folder: metadata_of(found) for folder, found in by_folder.items()}
        return files, self._metadata[1]


class Member:
    """What successive saves of one rank of a job share."""

    def __init__(self, group: RankGroup | None) -> None:
        """``group``: None if this process is the only rank."""
        self.group = group
        self.rank = 0 if group is None else group.rank
        self.turns = Turns(group)
        self.inventories = Inventories()
        self.caches: dict[str, RankCache] = {}  # by the name of the folder of torch.distributed.checkpoint
        self.shared: Shared = {}  # rank 0: of the save before


class JobRequest(Request):
    """A folder that the ranks of a job fill together, as one rank saves it. It may have several folders of
    torch.distributed.checkpoint, and any other files."""

    def __init__(
        self,
        path: Path,
        step: int | None,
        *,
        member: Member,
        layout: str,
        alone: Callable[[], Staging],
        prepare: Callable[[Path], None] = lambda folder: None,
        keep_others: bool = False,
    ) -> None:
        """``layout`` must be the same on all ranks. ``alone`` makes the staged folder if this is the only rank. Rank 0
        calls ``prepare`` with the folder above. ``keep_others``: as in ``Staging``."""
        super().__init__(path, step)
        self._ordinal = member.turns.next()
        self._member = member
        self._alone = alone
        self._prepare = prepare
        self._keep_others = keep_others
        self._group, self._rank = member.group, member.rank
        self._inventories = member.inventories
        self._ballot = None if member.group is None else member.group.ballot(self._ordinal, step, layout, path)
        self._stamp = stamp_of(uuid.uuid4().hex if member.group is None else member.group.name_of(self._ordinal))
        self._contents: dict[str, Contents] = {}  # of this rank's sharded files, by name
        self._receipt, self._note = b"", ""
        self._files: list[Files] = []  # of all ranks
        self._metadata: dict[str, bytes] = {}

    def plan(self, folder: str, state: Leaves) -> tuple[str, RankPlan]:
        """The name and the plan of the file with this rank's share of ``state``, in ``folder``, "" being the root."""
        contents = Contents()
        cache = self._member.caches.setdefault(folder, RankCache())
        name = os.path.join(folder, f"__{self._rank}_0{DCP_FILE}")
        self._contents[name] = contents
        return name, RankPlan(state, self._rank, cache, contents, self._stamp)

    def reached(self) -> None:
        if self._group is not None:
            self._group.reach(self._ordinal)

    def stage(self) -> Staging:
        if self._staging is None:
            self._staging = self._begin()
        return self._staging

    def _begin(self) -> Staging:
        if self._ballot is None or self._group is None:
            return self._alone()
        if self._rank == 0:
            self._note = self._inventories.note(self._shared() or self._member.shared)
            self._prepare(self.path.parent)
            staging = self._staging = self._group.stage(self.path, keep_others=self._keep_others)
            self._ballot.begin(staging.path.name, self._note)
            return staging
        try:
            name, note = self._ballot.staged_name()
        finally:
            if self._ballot.step_of_rank_0 is not None:
                self._member.turns.strayed(self._ordinal, self._ballot.step_of_rank_0)
        for folder, kinds in json.loads(note or "{}").items():
            self._member.caches.setdefault(folder, RankCache()).elsewhere = kinds
        return self._group.attach(self.path, name)

    def _shared(self) -> Shared:
        return {os.path.dirname(name): contents.shared() for name, contents in self._contents.items()}

    def check(self) -> None:
        if self._ballot is not None and (aborted := self._ballot.aborted()) is not None:
            raise aborted

    def agree(self, files: Files) -> None:
        """Votes that this rank's files are durable. Rank 0 returns when all have voted."""
        inventory = {file: contents.items() for file, contents in self._contents.items()}
        self._receipt = self._inventories.receipt(files, inventory)
        if isinstance(self._staging, AttachedStaging):
            self._staging.sync(name for name, _, _ in files)
        if self._ballot is not None:
            self._ballot.vote(self._receipt)
        if self._rank == 0:
            self._member.shared = self._shared()
            receipts = [self._receipt] if self._ballot is None else self._ballot.receipts()
            try:
                self._files, self._metadata = self._inventories.read(receipts)
            except ValueError as error:
                raise SaveError(str(error), path=self.path, step=self.step) from error

    def manifest(self, files: Files) -> dict[str, Any] | None:
        """Rank 0: writes the ``.metadata`` of each sharded state. There is no manifest."""
        for folder, pickled in self._metadata.items():
            name = os.path.join(folder, DCP_METADATA)
            metadata = sealed(pickled + self._stamp)
            with open(self.stage().path / name, "xb") as file:
                file.write(metadata)
            self._files[0].append((name, len(metadata), zlib.crc32(metadata)))
        return None

    def synced(self, files: list[str]) -> list[str]:
        return [name for of_rank in self._files for name, _, _ in of_rank] or files

    def publish(self, staging: Staging) -> Path | None:
        if self._ballot is not None:
            if self._rank == 0:
                self._ballot.decide()
            else:
                self._ballot.outcome()
        return super().publish(staging)

    def published(self) -> None:
        self._inventories.committed(self._receipt, self._note)

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


class JobCheckpointRequest(JobRequest):
    """A numbered checkpoint of a Checkpointer on every rank."""

    def __init__(self, path: Path, step: int, lineage: Lineage, about: About, *, member: Member, layout: str) -> None:
        super().__init__(path, step, member=member, layout=layout, alone=lambda: Staging(path))
        self._about = about
        self._number = step
        self._lineage = lineage

    def manifest(self, files: Files) -> dict[str, Any] | None:
        super().manifest(files)
        if self._rank != 0:
            return None
        written = [file for of_rank in self._files for file in of_rank]
        writers = {name: rank for rank, of_rank in enumerate(self._files) for name, _, _ in of_rank}
        return self._lineage.manifest(self._number, written, self._about, world_size=len(self._files), writers=writers)

    def published(self) -> None:
        super().published()
        if self._rank == 0:
            self._lineage.published()

    def superfluous(self) -> Iterable[Path]:
        if self._rank != 0:
            return ()
        if self._group is not None:
            self._group.check_claim()
        return self._lineage.superfluous()
