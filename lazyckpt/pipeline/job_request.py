"""One checkpoint that many ranks write: each its own file, rank 0 also ``.metadata`` and the manifest.

A rank tells rank 0 what its file holds (its *inventory*) at the first save and when that changes; later it sends only
the hash. So from the second save on a checkpoint costs one small message for each rank, in the background.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyckpt.errors import SaveError
from lazyckpt.formats.inventory import Inventory, Item, decode, encode, metadata_of
from lazyckpt.pipeline.rank_plan import Contents, RankCache
from lazyckpt.pipeline.request import About, CheckpointRequest, Lineage
from lazyckpt.ranks.job import Job
from lazyckpt.storage.commit import Staging
from lazyckpt.storage.manifest import DCP_METADATA

Files = list[tuple[str, int, int]]  # name, bytes and CRC-32 of each


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

    def note(self, shared: Sequence[str]) -> str:
        """Rank 0's message to the others: the names that it writes and other ranks may have, too; "" if they know."""
        note = json.dumps(shared)
        return "" if note == self._noted else note

    def committed(self, receipt: bytes, note: str) -> None:
        """Notes that the ranks have read each other's messages."""
        self._told = json.loads(receipt.partition(b"\n")[0])["inventory"]
        self._noted = note or self._noted

    def read(self, receipts: Sequence[bytes]) -> tuple[list[Files], dict[str, bytes]]:
        """Rank 0: the files of each rank, and the contents of each ``.metadata`` by the name of its folder. Raises
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


class JobRequest(CheckpointRequest):
    """A numbered checkpoint of a job, as one rank saves it."""

    def __init__(
        self,
        path: Path,
        step: int,
        lineage: Lineage,
        about: About,
        *,
        rank: int,
        contents: Mapping[str, Contents],
        cache: RankCache,
        inventories: Inventories,
        job: Job | None,
        number: int,
        layout: str,
    ) -> None:
        """``contents``: of this rank's files, by name, filled in when they are laid out. ``job``: None if this process
        is the only rank. ``number`` counts the saves of this rank, ``layout`` must be the same on all ranks."""
        super().__init__(path, step, lineage, about)
        self._rank = rank
        self._contents = contents
        self._cache = cache
        self._inventories = inventories
        self._job = job
        self._ballot = None if job is None else job.ballot(number, step, layout, path)
        self._receipt, self._note = b"", ""
        self._files: list[Files] = []  # of all ranks
        self._metadata: dict[str, bytes] = {}
        self._staging: Staging | None = None

    def stage(self) -> Staging:
        if self._ballot is None:
            self._staging = super().stage()
        elif self._rank == 0:
            assert self._job is not None
            self._note = self._inventories.note([name for of in self._contents.values() for name in of.shared()])
            self._staging = self._job.stage(self.path)
            self._ballot.begin(self._staging.path.name, self._note)
        else:
            assert self._job is not None
            name, note = self._ballot.staged_name()
            self._staging = self._job.attach(self.path, name)
            if note:
                self._cache.elsewhere = frozenset(json.loads(note))
        return self._staging

    def agree(self, files: Files) -> None:
        """Votes that this rank's files are durable. Rank 0 returns when all have voted."""
        inventory = {file: contents.items() for file, contents in self._contents.items()}
        self._receipt = self._inventories.receipt(files, inventory)
        if self._ballot is not None:
            self._ballot.vote(self._receipt)
        if self._rank == 0:
            receipts = [self._receipt] if self._ballot is None else self._ballot.receipts()
            try:
                self._files, self._metadata = self._inventories.read(receipts)
            except ValueError as error:
                raise SaveError(str(error), path=self.path, step=self.step) from error

    def manifest(self, files: Files) -> dict[str, Any] | None:
        if self._rank != 0:
            return None
        written = [file for of_rank in self._files for file in of_rank]
        writers = {name: rank for rank, of_rank in enumerate(self._files) for name, _, _ in of_rank}
        for folder, metadata in self._metadata.items():
            name = os.path.join(folder, DCP_METADATA)
            assert self._staging is not None
            with open(self._staging.path / name, "xb") as file:
                file.write(metadata)
            written.append((name, len(metadata), zlib.crc32(metadata)))
        return self._lineage.manifest(self._step, written, self._about, world_size=len(self._files), writers=writers)

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
        if self._rank == 0:
            super().published()

    def superfluous(self) -> Iterable[Path]:
        if self._rank != 0:
            return ()
        if self._job is not None:
            self._job.check_owner()
        return super().superfluous()

    def failed(self, error: BaseException) -> BaseException:
        if self._ballot is None:
            return error
        what = error.what if isinstance(error, SaveError) else getattr(error, "strerror", None) or str(error)
        refused = self._ballot.refuse(what)
        return error if refused is None or refused.rank == self._rank else refused

    def abandon(self) -> None:
        if self._ballot is not None:
            self._ballot.refuse("in save(); its own error says how")
