"""Uploads this rank's files of the checkpoints that rank 0 brings to one mirror (others.py): one thread a mirror.

It begins with a checkpoint when rank 0 has, and is done with it when rank 0 says how it has ended.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from lazyckpt import waits
from lazyckpt.errors import CorruptFileError, LoadError, MirrorError
from lazyckpt.ranks.board import SharedSave
from lazyckpt.ranks.pulse import Watch
from lazyckpt.ranks.rounds import RankLost, StoreLost
from lazyckpt.storage.manifest import MANIFEST, FileEntry, is_missing, parsed, read_checkpoint, read_manifest
from lazyckpt.tiers.mirror import Mirror
from lazyckpt.tiers.others import Word, digest_of, owners_of
from lazyckpt.tiers.pending import paced, parts_of, reason
from lazyckpt.tiers.tier import Tier
from lazyckpt.warn import warn_in_background

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Share:
    """This rank's files of a checkpoint on its way to one mirror."""

    def __init__(self, path: Path, step: int | None, save: SharedSave) -> None:
        self.path = path
        self.step = step
        self.save = save
        self.sequence: int | None = None  # once rank 0 has begun
        self.tried = ""  # the place in which this rank is done: all its files are there, or it cannot upload them
        self.durable_at = time.monotonic()
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()
        self.nbytes = self.sent = 0

    def __str__(self) -> str:
        return f"step {self.step}" if self.step is not None else self.path.name


class _Over(Exception):
    """Rank 0 does not upload this checkpoint any more."""


class Helper:
    """A rank other than 0, for one mirror. Any thread calls ``add`` and what tells; as ``Uploads``."""

    def __init__(self, mirror: Mirror, tier: Tier, topic: str) -> None:
        self.mirror = mirror
        self._tier = tier
        self._topic = topic
        self._changed = threading.Condition()
        self._shares: list[Share] = []  # whose end rank 0 has not told, in the order of the saves
        self._new = False  # there is a share that the thread has not seen
        self._failures = 0  # in a row
        self._retry_at = 0.0
        self._word = Word()  # of rank 0, when last looked
        self._watch: Watch | None = None  # on rank 0
        self._closing = self._warned = self._left = False
        self._thread = threading.Thread(target=self._work, name=f"lazyckpt-mirror {mirror}", daemon=True)
        self._thread.start()

    # any thread

    def add(self, path: Path, step: int | None, save: SharedSave) -> Future[None]:
        """Takes a committed checkpoint. The Future is done when rank 0 says that it is there, and fails with a
        MirrorError if it does not go there."""
        new = Share(path, step, save)
        with self._changed:
            if not self._closing:
                self._shares.append(new)
                self._new = True
                self._changed.notify_all()
                return new.done
            self._left = True
        new.done.set_exception(self._closed(new))
        return new.done

    def holds(self) -> set[Path]:
        """Nothing: rank 0 removes checkpoints, and keeps those that it brings there."""
        return set()

    @property
    def lag_s(self) -> float:
        """How long the oldest checkpoint that goes there has been durable here; 0 if all are there."""
        with self._changed:
            return time.monotonic() - self._shares[0].durable_at if self._shares else 0.0

    @property
    def progress(self) -> float:
        """The part of the oldest checkpoint's files that this rank has sent."""
        with self._changed:
            return self._shares[0].sent / max(1, self._shares[0].nbytes) if self._shares else 1.0

    @property
    def failing(self) -> bool:
        """Whether the last upload of this rank or of rank 0 has failed, and is tried again."""
        return self._failures > 0 or self._word.failing

    def is_at_work(self) -> bool:
        """Whether something is on its way."""
        return self._thread.is_alive() and bool(self._shares)

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> bool:
        """Ends the thread when rank 0 has told the end of everything, or an upload has failed; returns whether
        everything is there or is not needed any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        waits.join(self._thread)
        return not self._left

    # the thread

    def _work(self) -> None:
        pause_s = waits.MIRROR_FIRST_LOOK_S
        try:
            while self._wait(pause_s):
                with self._changed:
                    shares = tuple(self._shares)
                acted = self._look(shares)
                pause_s = waits.MIRROR_FIRST_LOOK_S if acted else min(2 * pause_s, waits.MIRROR_LAST_LOOK_S)
        finally:
            with self._changed:
                self._closing = True
                left, self._shares = self._shares, []
                self._left = self._left or bool(left)
            for share in left:
                share.done.set_exception(self._closed(share))

    def _closed(self, share: Share) -> MirrorError:
        what = "the Checkpointer was closed before rank 0 had uploaded it"
        return MirrorError(what, mirror=str(self.mirror), step=share.step)

    def _wait(self, pause_s: float) -> bool:
        """Waits until it is time for a look. False at the end."""
        with self._changed:
            while not self._shares and not self._closing:
                self._changed.wait()
            if self._shares and not self._new:
                self._changed.wait(pause_s)
            self._new = False
            return bool(self._shares) and not (self._closing and self.failing)

    def _look(self, shares: Sequence[Share]) -> bool:
        """Does what rank 0 asks for now. Returns whether that was something."""
        try:
            word = self._word = self._told(shares[-1])
            left = self._settle(shares, word)
            if left:
                self._check_rank_0(left[-1])
            now = next((share for share in left if share.save.name == word.now), None)
            if now is not None and now.tried != word.place and time.monotonic() >= self._retry_at:
                self._bring(now, word)
                return True
            return len(left) < len(shares)
        except (RankLost, StoreLost) as lost:
            self._give_up(lost)
            return True

    def _told(self, share: Share) -> Word:
        return Word.decode(share.save.board.told(self._topic))

    def _check_rank_0(self, share: Share) -> None:
        """Raises RankLost if rank 0 has closed or is dead."""
        self._watch = self._watch or share.save.board.watch(0)
        self._watch.check()

    def _settle(self, shares: Sequence[Share], word: Word) -> list[Share]:
        """Ends the shares whose end rank 0 has told; returns the others. It uploads checkpoints in the order of the
        saves, so it has passed over those before the last one that it names."""
        ends: dict[int, str] = {}
        newer: Share | None = None
        for number, share in reversed(list(enumerate(shares))):
            if (why := word.ended.get(share.save.name)) is not None:
                ends[number] = why
            elif newer is not None:
                ends[number] = f"{newer}, which is newer, goes there instead"
            if newer is None and (why is not None or share.save.name == word.now):
                newer = share
        for number, why in sorted(ends.items()):
            self._end(shares[number], why)
        return [share for number, share in enumerate(shares) if number not in ends]

    def _end(self, share: Share, why: str) -> None:
        """``why`` it is not there; "" if it is."""
        with self._changed:
            self._shares.remove(share)
        if why:
            share.done.set_exception(MirrorError(why, mirror=str(self.mirror), step=share.step))
        else:
            share.done.set_result(None)

    def _give_up(self, lost: Exception) -> None:
        """Rank 0 says nothing any more: the place itself tells what it has committed."""
        why = str(lost) if isinstance(lost, RankLost) else f"the store of torch.distributed is lost: {lost}"
        with self._changed:
            shares = tuple(self._shares)
        newer: Share | None = None
        for share in reversed(shares):
            if self._is_there(share):
                self._end(share, "")
                newer = newer or share
            elif newer is not None:
                self._end(share, f"{newer}, which is newer, goes there instead")
            else:
                self._left = True
                self._end(share, f"{why}, and had not uploaded it")

    def _is_there(self, share: Share) -> bool:
        try:
            if share.sequence is None:
                share.sequence = read_checkpoint(share.path).sequence
            if self.mirror.what != "all":
                return share.step is not None and self._tier.has(share.step, share.sequence)
            return any(c.step == share.step and c.sequence == share.sequence for c in self._tier.checkpoints())
        except (OSError, LoadError):
            return False

    def _bring(self, share: Share, word: Word) -> None:
        """Uploads this rank's files of the checkpoint that rank 0 uploads now. Raises RankLost and StoreLost."""
        try:
            text = word.text.encode() or read_manifest(share.path / MANIFEST)
            if digest_of(text) == word.digest:  # else this step was saved again
                self._upload(share, word, text)
        except _Over:
            return
        except (RankLost, StoreLost):
            raise
        except Exception as error:  # no other thread would report it
            # what rank 0 has done meanwhile may be the cause
            if self._is_current(share, word) and not is_missing(share.path):
                self._failed(share, word, error)
            return
        share.tried = word.place
        self._failures = 0
        if self._warned:
            self._warned = False
            warn_in_background(f"mirror {self.mirror} works again on rank {share.save.rank}: {share}")

    def _upload(self, share: Share, word: Word, text: bytes) -> None:
        owners = owners_of(text)
        # of the files of other ranks, not even the size is looked up: that would be many calls of the file system
        sizes = {str(file["name"]): file["bytes"] for file in json.loads(text)["files"]}
        checkpoint = parsed(share.path, text, pinned=False, size_of=sizes.get)
        mine = [file for file in checkpoint.files if owners[file.name] == share.save.rank]
        share.sequence = checkpoint.sequence
        share.nbytes, share.sent = sum(file.nbytes for file in mine), 0
        self._tier.share(checkpoint, mine, lambda file: self._parts(share, word, file), word.place)
        if not self._is_current(share, word):
            self._tier.mend(checkpoint, mine, lambda file: parts_of(share.path / file.name, file, reuse=False))

    def _is_current(self, share: Share, word: Word) -> bool:
        """Whether rank 0 still waits for these files. Raises RankLost and StoreLost."""
        self._check_rank_0(share)
        told = self._told(share)
        return (told.now, told.place) == (share.save.name, word.place)

    def _parts(self, share: Share, word: Word, file: FileEntry) -> Iterator[Buffer]:
        """The bytes of a file in parts, as fast as the mirror may get them from each rank. Ends with an
        error if rank 0 does not wait for it any more: a rank that has slept must replace no file of a later save."""
        for part in paced(parts_of(share.path / file.name, file, reuse=self._tier.copies_at_once), self.mirror):
            if not self._is_current(share, word):
                raise _Over
            share.sent += len(part)
            yield part
        if not self._is_current(share, word):
            raise _Over

    def _failed(self, share: Share, word: Word, error: Exception) -> None:
        """Notes a failure, and warns of the first one in a row. Rank 0 uploads what this rank does not."""
        if isinstance(error, CorruptFileError) or not isinstance(error, OSError | LoadError):
            share.tried = word.place  # to try again would be in vain
        else:
            self._failures += 1
            pause_s = waits.MIRROR_FIRST_PAUSE_S * 2 ** min(self._failures - 1, 16)
            self._retry_at = time.monotonic() + min(waits.MIRROR_LONGEST_PAUSE_S, pause_s) * random.uniform(0.75, 1.25)
        warned, self._warned = self._warned, True
        if not warned:
            warn_in_background(
                f"mirror {self.mirror}: rank {share.save.rank} could not upload its files of {share}: "
                f"{reason(error)}; rank 0 uploads the rest in the end"
            )
