"""Exchanges the contents of the ranks' files.

A rank sends rank 0 the contents of its file (its *inventory*) at the first save and when they change; later it sends
only the hash. So from the second save on a checkpoint costs one small message for each rank, in the background.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence

from lazyckpt.formats.inventory import Inventory, Item, decode, encode, metadata_of
from lazyckpt.storage.manifest import FileEntry

# By folder: the names that rank 0 writes and other ranks may have, too, with their kinds.
Shared = Mapping[str, Mapping[str, str]]


class Inventories:
    """The inventories that the ranks have exchanged, from save to save. Background threads call it in the order of
    the saves."""

    def __init__(self) -> None:
        self._told = ""  # the hash of this rank's last inventory that rank 0 knows
        self._noted = ""  # rank 0: its last note that all ranks know
        self._of_rank: dict[int, tuple[str, Inventory]] = {}  # rank 0: with its hash
        self._metadata: tuple[list[str], dict[str, bytes]] = [], {}  # rank 0: hashes by rank, and the result for them

    def receipt(self, files: list[FileEntry], inventory: Inventory) -> bytes:
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

    def read(self, receipts: Sequence[bytes]) -> tuple[list[list[FileEntry]], dict[str, bytes]]:
        """Rank 0: the files of each rank, and the pickle of each ``.metadata`` by the name of its folder. Raises
        ValueError if the files do not make up one state."""
        files: list[list[FileEntry]] = []
        for rank, receipt in enumerate(receipts):
            head, _, inventory = receipt.partition(b"\n")
            told = json.loads(head)
            files.append([FileEntry(name, nbytes, crc) for name, nbytes, crc in told["files"]])
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
