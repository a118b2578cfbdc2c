"""Brings the checkpoints of a run to one mirror, in the background: one thread a mirror.

While a checkpoint is uploaded, of those that wait only the newest stays. A failed upload is tried again, with longer
and longer pauses; training goes on meanwhile. The parts are read from the durable files, and each file is compared with
its checksum on the way: one that has rotted here does not go there.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from lazyckpt import waits
from lazyckpt.errors import CorruptFileError, LoadError, MirrorError
from lazyckpt.ranks.board import SharedSave
from lazyckpt.storage.manifest import (
    MANIFEST,
    Checkpoint,
    FileEntry,
    checkpoint_of,
    read_manifest,
)
from lazyckpt.storage.retention import retention
from lazyckpt.stores.store import AnyPath
from lazyckpt.tiers.described import Saved
from lazyckpt.tiers.mirror import Mirror
from lazyckpt.tiers.others import Lead, Others
from lazyckpt.tiers.pending import Pending, gone, paced, parts_of, reason, told
from lazyckpt.tiers.tier import Tier
from lazyckpt.warn import warn_in_background

if TYPE_CHECKING:
    from typing_extensions import Buffer


_PATIENCE = 3  # failures in a row, before another checkpoint of a trainer gets its turn


class Uploads:
    """The checkpoints on their way to one mirror. Any thread calls ``add``, ``holds`` and what tells."""

    def __init__(
        self,
        mirror: Mirror,
        tier: Tier,
        run: Callable[[Path], str],
        *,
        found: Callable[[int], None] = lambda sequence: None,
        freed: Callable[[], None] = lambda: None,
        topic: str = "",
    ) -> None:
        """``run``: returns the id of the run that this checkpoint belongs to. ``found``: is told the highest sequence
        there. ``freed``: is called when a checkpoint is not held any more. ``topic``: the mirror on the board of the
        ranks."""
        self.mirror = mirror
        self._tier = tier
        self._run = run
        self._found = found
        self._freed = freed
        self._lead = Lead(topic, mirror.max_bytes_per_s)
        self.kept: frozenset[str] = frozenset()  # names that retention leaves there
        self._highest = 0  # sequence there, of what trainers have saved
        self._changed = threading.Condition()
        self._waiting: list[Pending] = []  # of a Checkpointer's, only the newest
        self._current: Pending | None = None
        self._failures = 0  # in a row
        self._closing = False
        self._warned = self._warned_of_removal = self._warned_of_newer = False
        self._left = False  # something was not uploaded when the thread ended
        self._claimed = False
        self._thread = threading.Thread(target=self._work, name=f"lazyckpt-mirror {mirror}", daemon=True)
        self._thread.start()

    # any thread

    def add(
        self, path: Path, step: int | None, saved: Saved | None = None, save: SharedSave | None = None
    ) -> Future[None]:
        """Takes a committed checkpoint. The Future is done when it is there; it fails with a MirrorError if a newer one
        takes its place. What a trainer has ``saved`` waits until it is uploaded, saved again, or let go. ``save``: if
        other ranks upload their files."""
        new = Pending(path, step, saved, save)
        with self._changed:
            if self._closing:
                new.done.set_exception(self._closed(new))
                self._left = True
                return new.done
            old = [pending for pending in self._waiting if saved is None or pending.path == path]
            self._waiting = [*(pending for pending in self._waiting if pending not in old), new]
            self._changed.notify_all()
        for pending in old:
            pending.done.set_exception(self._superseded(pending, new))
        return new.done

    def let_go(self, path: Path) -> None:
        """Gives up a checkpoint that is about to be removed here, if a newer one waits. One that is being uploaded
        fails several times first."""
        with self._changed:
            for pending in self._all():
                pending.is_leaving = pending.is_leaving or pending.path == path
        self._give_up()

    def _give_up(self) -> bool:
        """Whether there was one to give up."""
        with self._changed:
            newest = max(self._all(), key=lambda pending: pending.durable_at, default=None)
            old = [pending for pending in self._waiting if pending.is_leaving and pending is not newest]
            self._waiting = [pending for pending in self._waiting if pending not in old]
        for pending in old:
            assert newest is not None
            pending.done.set_exception(self._superseded(pending, newest))
        return bool(old)

    def holds(self) -> set[Path]:
        """The checkpoints that must stay here until they are there."""
        with self._changed:
            return {pending.path for pending in self._all()}

    def _all(self) -> list[Pending]:
        return [*([] if self._current is None else [self._current]), *self._waiting]

    @property
    def lag_s(self) -> float:
        """How long the oldest checkpoint that goes there has been durable here; 0 if all are there."""
        with self._changed:
            found = [pending.durable_at for pending in self._all()]
        return time.monotonic() - min(found) if found else 0.0

    @property
    def progress(self) -> float:
        """The part of the current upload that is sent."""
        current = self._current
        return current.sent / max(1, current.nbytes) if current is not None else 1.0

    @property
    def failing(self) -> bool:
        """Whether the last upload has failed, and is tried again."""
        return self._failures > 0

    def is_at_work(self) -> bool:
        """Whether something is on its way."""
        return self._thread.is_alive() and bool(self.holds())

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> bool:
        """Ends the thread when everything is there, or when an upload has failed; returns whether everything is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        waits.join(self._thread)
        return not self._left

    # the thread

    def _work(self) -> None:
        try:
            while (pending := self._next()) is not None:
                try:
                    self._upload(pending)
                except Exception as error:  # no other thread would report it
                    if (why := gone(pending)) is not None:
                        self._end(pending, MirrorError(why, mirror=str(self.mirror), step=pending.step))
                    else:
                        self._failed(pending, error)
                        if self._give_up():
                            self._freed()
                else:
                    self._succeeded(pending)
        finally:
            with self._changed:
                self._closing = True
                left = self._all()
                self._current, self._waiting = None, []
                self._left = self._left or bool(left)
            for pending in left:
                pending.done.set_exception(self._closed(pending))
            self._freed()
            if self._claimed:
                with contextlib.suppress(Exception):
                    self._tier.release()

    def _closed(self, pending: Pending) -> MirrorError:
        what = f"the {'Saver' if pending.saved else 'Checkpointer'} was closed before it was uploaded"
        return MirrorError(what, mirror=str(self.mirror), step=pending.step)

    def _next(self) -> Pending | None:
        """The checkpoint to upload now; None at the end. The current one has priority until a newer one waits; a
        trainer's, until it has failed several times."""
        with self._changed:
            while True:
                if self._waiting and self._current is not None:
                    if self._current.saved is None:
                        self._current.done.set_exception(self._superseded(self._current, self._waiting[-1]))
                        self._current = None
                    elif self._current.failures >= _PATIENCE and self._current.save is None:
                        self._current.failures = 0
                        self._waiting.append(self._current)
                        self._current = None
                if self._current is None and self._waiting:
                    self._current = self._waiting.pop(0)
                if self._current is not None and self._failures and self._closing:
                    return None
                if self._current is not None:
                    if not self._failures or self._paused():
                        return self._current
                    continue
                if self._closing:
                    return None
                self._changed.wait()

    def _paused(self) -> bool:
        """Waits before an upload is tried again. False if something has changed meanwhile."""
        pause_s = min(waits.MIRROR_LONGEST_PAUSE_S, waits.MIRROR_FIRST_PAUSE_S * 2 ** min(self._failures - 1, 16))
        return not self._changed.wait(pause_s * random.uniform(0.75, 1.25))

    def _superseded(self, old: Pending, new: Pending) -> MirrorError:
        what = f"{told(new)}, which is newer, goes there instead"
        return MirrorError(what, mirror=str(self.mirror), step=old.step)

    def _upload(self, pending: Pending) -> None:
        if not self._claimed:
            self._claim(pending)
        if pending.saved is None:
            text = read_manifest(pending.path / MANIFEST)
        else:
            text = pending.saved.described(self._highest + 1, self._highest or None, self.mirror.what)
        checkpoint = checkpoint_of(pending.path, text, "state" if pending.saved is None else pending.saved.layout)
        pending.sequence = checkpoint.sequence
        self._send(pending, checkpoint, text)
        if pending.saved is not None:
            self._highest = checkpoint.sequence

    def _send(self, pending: Pending, checkpoint: Checkpoint, text: bytes) -> None:
        self._send_with(self._lead.others(pending.save, checkpoint, text), pending, checkpoint, text)

    def _send_with(self, others: Others | None, pending: Pending, checkpoint: Checkpoint, text: bytes) -> None:
        pending.nbytes, pending.sent = checkpoint.nbytes, 0
        if others is not None:
            pending.nbytes -= others.nbytes
        self._tier.upload(checkpoint, text, lambda file: self._parts(pending, checkpoint.base, file, others), others)

    def _claim(self, pending: Pending) -> None:
        run = self._run(pending.path)
        if self._tier.belong(run) != run:
            go_on = "restore() before the first save()" if pending.saved is None else "resume from a checkpoint there"
            raise MirrorError(
                "it holds the checkpoints of another run; give each run a place of its own. To go on with the run "
                f"there, begin with an empty folder, and {go_on}",
                mirror=str(self.mirror),
                step=pending.step,
            )
        self._tier.claim()
        if pending.saved is not None:
            self._highest = max((checkpoint.sequence for checkpoint in self._tier.checkpoints()), default=0)
        self._claimed = True

    def _parts(self, pending: Pending, base: AnyPath, file: FileEntry, others: Others | None) -> Iterator[Buffer]:
        """The bytes of a file in parts, as fast as the mirror may get them."""
        assert isinstance(base, Path)
        try:
            for part in paced(parts_of(base / file.name, file, reuse=self._tier.copies_at_once), self.mirror):
                pending.sent += len(part)
                yield part
        except OSError as error:
            if others is None or not others.bring(file.name):
                raise
            raise others.cannot(file, error) from error

    def _succeeded(self, pending: Pending) -> None:
        with self._changed:
            self._current, self._failures = None, 0
            warned, self._warned = self._warned, False
        if warned:
            warn_in_background(f"mirror {self.mirror} works again: {told(pending)} is there")
        pending.done.set_result(None)
        self._lead.ended(pending.save)
        self._freed()
        try:
            self._prune(pending)
        except (OSError, LoadError, MirrorError) as error:  # the next one tries again
            if not self._warned_of_removal:
                self._warned_of_removal = True
                warn_in_background(f"mirror {self.mirror}: old checkpoints could not be removed: {reason(error)}")

    def _prune(self, last: Pending) -> None:
        """Removes what the retention of the mirror drops, unless there is something newer than ``last``: then another
        process has gone on with the run, and its checkpoints are not ours to weigh."""
        found = [checkpoint for checkpoint in self._tier.checkpoints() if self._weighs(checkpoint, last)]
        known = sorted(found, key=lambda c: c.sequence, reverse=True)
        self._tier.tidy()
        if known and last.sequence is not None and known[0].sequence > last.sequence:
            self._found(known[0].sequence)
            if not self._warned_of_newer:
                self._warned_of_newer = True
                warn_in_background(
                    f"mirror {self.mirror} holds step {known[0].step}, which this run did not restore; the checkpoints "
                    "from now on come after it, and until the next one is there nothing is removed from it"
                )
            return
        for checkpoint, fate in retention(known, self.mirror.keep_last, self.mirror.keep_every).items():
            if not fate.stays and checkpoint.path.name not in self.kept:
                self._tier.remove(checkpoint)

    def _weighs(self, checkpoint: Checkpoint, last: Pending) -> bool:
        """Whether retention counts a checkpoint, after ``last`` was uploaded: it is of the same kind."""
        return (checkpoint.layout == "state") == (last.saved is None)

    def _failed(self, pending: Pending, error: Exception) -> None:
        """Notes a failure, and warns of the first one in a row."""
        said = reason(error)
        # to try again would be in vain
        final = isinstance(error, CorruptFileError) or not isinstance(error, OSError | LoadError)
        with self._changed:
            self._failures = 0 if final else self._failures + 1
            pending.failures += 1
            warned, self._warned = self._warned, True
        if final:
            refused = error if isinstance(error, MirrorError) else None
            self._end(pending, refused or MirrorError(said, mirror=str(self.mirror), step=pending.step))
        else:
            self._lead.failed(pending.save)
        if not warned:
            then = "" if final else "; it is tried again, and training goes on"
            warn_in_background(f"mirror {self.mirror}: {told(pending)} could not be uploaded: {said}{then}")

    def _end(self, pending: Pending, error: MirrorError) -> None:
        """Gives an upload up."""
        with self._changed:
            self._current = None
        pending.done.set_exception(error)
        self._lead.ended(pending.save, error.what)
        self._freed()
