"""Several ranks upload one checkpoint: what rank 0 does about the others (helper.py is what these do).

    tell     rank 0 has claimed the place, and taken away what an earlier upload had left under the name of this
             checkpoint. It tells the others the name of the save, a hash of its manifest, and where the files go
    upload   each rank uploads the files whose first writer it is
    look     rank 0 looks into the place until the files of the others lie there, with the right size and label. It
             uploads those itself that do not come: of a rank that is lost, or has used up its time
    commit   rank 0 writes the manifest, or renames the folder, and tells the others

The vote is one look of rank 0 into the place, where the bytes are, and not what ranks say of themselves. So a rank that
dies or sleeps at any moment takes no commit with it, and makes none. It is safe that two ranks upload one file: both
compare it with the checksum in the same manifest, and a file appears whole. Rank 0 alone commits, removes and
decides which checkpoint goes there; the others do nothing without its word, so they leave nothing behind in a place of
another run, or of a checkpoint that a newer one has replaced.

The words go through the key-value store that the votes on saves use (ranks/board.py). Nothing waits in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lazyckpt import waits
from lazyckpt.ranks.board import Board, SharedSave
from lazyckpt.ranks.pulse import Watch
from lazyckpt.ranks.rounds import RankLost, StoreLost
from lazyckpt.storage.manifest import NO_STEP, Checkpoint, FileEntry
from lazyckpt.warn import warn_in_background

_MAX_TOLD = 4 << 20  # bytes of a manifest; above that, rank 0 uploads a trainer's folder alone
_REMEMBERED = 64  # saves of which rank 0 tells how they ended


@dataclass
class Word:
    """What rank 0 tells the others of one mirror."""

    now: str | None = None  # the save that is uploaded
    digest: str = ""  # of its manifest
    text: str = ""  # of the manifest, if the folder here has none: of a trainer's
    place: str = ""  # of its files, for ``Tier.share``: another one for each try
    failing: bool = False  # the last try has failed
    ended: dict[str, str] = field(default_factory=dict)  # "" for saves that are there, else why they are not

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, told: bytes | None) -> Word:
        return cls() if told is None else cls(**json.loads(told))


def digest_of(text: bytes) -> str:
    """Names the manifest with this text."""
    return hashlib.sha256(text).hexdigest()


def owners_of(text: bytes) -> Mapping[str, int]:
    """The rank that uploads each file, by name: the first that wrote it. ``text``: of a manifest, which was checked."""
    owners = {}
    for file in json.loads(text)["files"]:
        writers: Any = file.get("writers")
        owners[str(file["name"])] = writers[0] if isinstance(writers, list) and writers else 0
    return owners


class Lead:
    """Rank 0, which tells the others how far it is with one mirror."""

    def __init__(self, topic: str, bytes_per_s: float | None) -> None:
        self._topic = topic
        self._bytes_per_s = min(waits.MIRROR_SLOWEST_BYTES_PER_S, bytes_per_s or waits.MIRROR_SLOWEST_BYTES_PER_S)
        self._word = Word()
        self._order: deque[str] = deque()
        self._tries = 0
        self._warned_of: set[int] = set()  # ranks

    def others(self, save: SharedSave | None, checkpoint: Checkpoint, text: bytes) -> Others | None:
        """The other ranks that upload files of this checkpoint; None if there are none."""
        text_told = "" if checkpoint.layout == "state" else text.decode()
        if save is None or len(text_told) > _MAX_TOLD:
            return None

        def begin(place: str) -> None:
            self._tries += 1
            self._word.now, self._word.digest, self._word.failing = save.name, digest_of(text), False
            self._word.text = text_told
            self._word.place = place or f"try {self._tries}"
            self._tell(save)

        return Others(begin, save.board, checkpoint, owners_of(text), self._bytes_per_s, self._warned_of)

    def ended(self, save: SharedSave | None, why: str = "") -> None:
        """Tells how an upload has ended; ``why`` it is not there, if it is not."""
        if save is None:
            return
        self._word.now, self._word.failing, self._word.text = None, False, ""
        self._word.ended[save.name] = why
        self._order.append(save.name)
        if len(self._order) > _REMEMBERED:
            self._word.ended.pop(self._order.popleft(), None)
        self._tell(save)

    def failed(self, save: SharedSave | None) -> None:
        """Tells that a try has failed, and another one will follow."""
        if save is not None:
            self._word.failing = True
            self._tell(save)

    def _tell(self, save: SharedSave) -> None:
        with contextlib.suppress(StoreLost):  # then no other rank helps
            save.board.tell(self._topic, self._word.encode())


class Others:
    """The other ranks that upload files of one checkpoint, as rank 0 sees them during one try."""

    def __init__(
        self,
        begin: Callable[[str], None],
        board: Board,
        checkpoint: Checkpoint,
        owners: Mapping[str, int],
        bytes_per_s: float,
        warned_of: set[int],
    ) -> None:
        self._begin = begin
        self._warned_of = warned_of
        self._what = f"step {checkpoint.step}" if checkpoint.step != NO_STEP else checkpoint.path.name
        self._board = board
        self._owners = owners
        self._files = [file for file in checkpoint.files if owners[file.name] != 0]
        self._seconds: dict[int, float] = {}  # that each rank may take
        for file in self._files:
            rank = owners[file.name]
            self._seconds[rank] = self._seconds.get(rank, waits.MIRROR_PATIENCE_S) + file.nbytes / bytes_per_s
        self._began = 0.0
        self._watches: dict[int, Watch] = {}
        self._lost: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Of their files."""
        return sum(file.nbytes for file in self._files)

    def cannot(self, file: FileEntry, error: OSError) -> OSError:
        """Why a file of theirs is not there."""
        why = error.strerror or str(error)
        what = f"rank {self._owners[file.name]} has not uploaded {file.name}, and rank 0 cannot read it: {why}"
        return OSError(error.errno, what, error.filename)

    def begin(self, place: str = "") -> None:
        """Lets them begin. ``place``: as in ``Tier.share``."""
        self._began = time.monotonic()
        self._begin(place)

    def bring(self, name: str) -> bool:
        """Whether one of them uploads this file."""
        return self._owners[name] != 0

    def late(self, lacking: Callable[[list[FileEntry]], list[FileEntry]]) -> Iterator[FileEntry]:
        """Yields their files that do not come; returns when all the others are there. ``lacking``: returns which of
        these files are not there yet."""
        left, pause_s = self._files, waits.MIRROR_FIRST_LOOK_S
        while left and (left := lacking(left)):
            ranks = {rank: self._is_late(rank) for rank in {self._owners[file.name] for file in left}}
            late = [file for file in left if ranks[self._owners[file.name]]]
            yield from late
            left = [file for file in left if file not in late]
            if left and not late:
                waits.pause(pause_s)
                pause_s = min(2 * pause_s, waits.MIRROR_LAST_LOOK_S)

    def _is_late(self, rank: int) -> bool:
        """Whether rank 0 does not wait any longer for this rank."""
        if rank not in self._lost:
            try:
                self._watches.setdefault(rank, self._board.watch(rank)).check()
            except (RankLost, StoreLost):
                self._lost.add(rank)
        late = time.monotonic() - self._began > self._seconds[rank]
        if late and rank not in self._lost and rank not in self._warned_of:
            self._warned_of.add(rank)
            warn_in_background(
                f"rank {rank} lives, and has not uploaded its files of {self._what} within "
                f"{self._seconds[rank]:.0f} s, so rank 0 does. All ranks must have the same mirrors"
            )
        return late or rank in self._lost
