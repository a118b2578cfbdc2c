"""Lightning: ``Trainer(plugins=[LazyCheckpointIO()])`` or ``Fabric(plugins=[LazyCheckpointIO()])`` saves lazily.

Lightning expects a file to exist when the call that saves it returns. Here it does not exist yet, and the weights may
not be copied yet. So there are two parts. A CheckpointIO saves, waits before it loads, and removes in order. A callback
(lightning_callback.py), which every Trainer with this CheckpointIO gets, handles cases that a CheckpointIO does not
see: code that asks whether a file exists, code that swaps weights, the end of training. Without the callback a
Trainer's saves block.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lazyckpt
from lazyckpt import private_names, settings
from lazyckpt.config import Settings, check_writers, spells_out
from lazyckpt.gate import hooks
from lazyckpt.integrations import StartsAnew, close_and_warn
from lazyckpt.ranks.meeting import all_ranks_at
from lazyckpt.ranks.team import has_ranks
from lazyckpt.reading.on_all_ranks import load_together
from lazyckpt.storage import commit, folders
from lazyckpt.warn import warn

with private_names.needed("lightning"):
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    from lazyckpt.integrations import lightning_last
    from lazyckpt.integrations.lightning_callback import Attended, LazyCheckpointCallback
    from lazyckpt.integrations.lightning_done import Reports
    from lazyckpt.integrations.lightning_last import local_path
    from lazyckpt.integrations.lightning_mirrors import Mirrored, check_mirrors, in_mirror
    from lazyckpt.integrations.lightning_ranks import EVERYONES, SLURM_PREFIX, save_in_signal_handler

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LazyCheckpointCallback", "LazyCheckpointIO"]

_TRAINER_CHECKPOINT = "pytorch-lightning_version"  # a key that Trainer.save_checkpoint writes, and Fabric does not


class LazyCheckpointIO(StartsAnew, Mirrored, Attended, TorchCheckpointIO):
    """Saves checkpoints lazily and durably: ``Trainer(plugins=[LazyCheckpointIO()])``, or Fabric's.

    Keyword arguments are the fields of ``Config``, except ``keep_last`` and ``keep_every``: retention is
    ``ModelCheckpoint(save_top_k=…)``. Raises ConfigError for an invalid one. Make it before training begins.

    ``writers`` is for Trainers with DDPStrategy, and chooses the ranks that write each file together, as that of a
    Checkpointer does: "all", one of each "node", so many, or "auto". None and "rank0": rank 0 writes alone.

    A Trainer's saves block (are durable when they return) outside ``fit`` and its like, after an exception, and in
    SLURM's signal handler. A save that fails in the background raises SaveError at the next save or load, or at the end
    of ``fit``; ``on_error="warn"`` makes it a warning. Its threads and buffers live as long as ``fit``; with Fabric,
    from the first save to the end of the program.

    With ``mirrors``, the files go there, too (docs/mirrors.md). ``ckpt_path`` may be a URL below one of them, and
    "last" takes the newest of them where the folder has no checkpoint.

    ``on_done`` is called for a checkpoint when a resumed run would find it: with ``save_last``, when ``last`` is
    durable, too. The call is on a background thread or, if everything is durable already, on the training thread.
    """

    @spells_out(Settings)
    def __init__(
        self, *, writers: Literal["auto", "all", "node", "rank0"] | int | None = None, **knobs: Unpack[Settings]
    ) -> None:
        check_writers(writers)
        self.writers = None if writers == "rank0" else writers
        self._config = settings.config_of(type(self), knobs, "ModelCheckpoint counts its checkpoints; use save_top_k")
        self._knobs = knobs
        self.mirrors = list(self._config.mirrors)
        check_mirrors(self.mirrors)
        self._start_anew()

    def _start_anew(self) -> None:
        hooks.install()  # now, not at the first save: only optimizers seen to step before it are copied lazily
        self._saver: lazyckpt.Saver | None = None  # its threads run while there is something to save
        self._at_the_end: Any = None  # closes _saver
        self._pid = os.getpid()
        self._attended: bool | None = None  # by the callback, now; None: there was no Trainer yet
        self._failure: lazyckpt.SaveError | None = None  # for the callback
        self._unreported: list[lazyckpt.SaveHandle] = []  # for the callback
        self._news: list[tuple[lazyckpt.SaveHandle | None, Callable[[], None]]] = []
        self.reports = Reports()
        self._failed_at_once: Path | None = None  # the newest save, if it blocked and failed
        self._removed: set[Path] = set()  # may still be there
        self._links: set[Path] = set()  # may not be there yet
        self._linked: dict[Path, int] = {}  # the number of the newest link() that was made
        self._link_numbers = itertools.count(1)
        self._lock = threading.Lock()  # of _linked
        self._saving = False
        self._resumed: tuple[Path, int | None] | None = None  # the file that was loaded last, and its step
        self.on_all_ranks = False  # each rank saves a part of every checkpoint, not rank 0 all of it

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Returns when ``checkpoint`` may change, apart from tensors that optimizers step; it is durable soon after.

        Raises SaveError, of this or an earlier save, TypeError for ``storage_options`` of a local path, and ConfigError
        if Fabric saves with ``writers``.
        """
        target = local_path(path)
        if self.writers is not None and _TRAINER_CHECKPOINT not in checkpoint and has_ranks():
            raise lazyckpt.ConfigError(
                f"LazyCheckpointIO(writers={self.writers!r}) is for a Trainer: Fabric saves on rank 0 alone. Leave out "
                "writers here, or save with lazyckpt.Checkpointer(…, writers=…) on every rank"
            )
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        elif self._saving or target.name.startswith(SLURM_PREFIX):
            save_in_signal_handler(checkpoint, target)
        else:
            self._saving = True
            try:
                self._save(checkpoint, target)
            finally:
                self._saving = False

    def _save(self, checkpoint: dict[str, Any], target: Path) -> None:
        if target in self._removed:
            self.wait()  # otherwise Lightning might remove this one
        if self._must_block(checkpoint):
            self._save_at_once(checkpoint, target)
            return
        self._failed_at_once = None
        step = checkpoint.get("global_step")
        handle = self._open_saver().save(checkpoint, target, step=step if isinstance(step, int) else None)
        self.reports.add(handle)
        if self._attended:
            self._unreported.append(handle)

    def save_folder(self, target: Path, fill: Callable[[lazyckpt.StagedFolder], None], step: int | None) -> None:
        """For the strategies whose ranks save a folder together: each fills it, and all of it is saved."""
        if target in self._removed:
            self.wait()
        blocking = self._attended is not True
        with self._open_saver().stage(target, step=step, all_ranks=True) as staged:
            fill(staged)
            handle = staged.save(blocking=blocking)
            self.reports.add(handle)
        if blocking:
            self._close_saver()  # ``teardown`` may not be called after this
        else:
            self._unreported.append(handle)

    def save_together(self, checkpoint: dict[str, Any], target: Path) -> None:
        """For the callback: saves, on every rank, its part of the file."""
        if target in self._removed:
            self.wait()
        assert self.writers is not None
        step = checkpoint.get("global_step")
        handle = self._open_saver().save_together(
            checkpoint, target, writers=self.writers, everyones=EVERYONES, step=step if isinstance(step, int) else None
        )
        self.reports.add(handle)
        self._unreported.append(handle)

    def check(self) -> None:
        """Raises the first SaveError that was not raised yet, without waiting."""
        if (saver := self._own_saver()) is not None:
            saver.check()

    def _must_block(self, checkpoint: dict[str, Any]) -> bool:
        if self._attended is not None or _TRAINER_CHECKPOINT not in checkpoint:
            return self._attended is False
        if checkpoint.get("global_step"):  # otherwise it may still come: Lightning has not set up its callbacks
            warn(
                "LazyCheckpointIO: every save blocks, since this Trainer has no LazyCheckpointCallback. A Trainer that "
                "is made with the plugin has one; add it to the callbacks of this one"
            )
        return True

    def _save_at_once(self, checkpoint: dict[str, Any], target: Path) -> None:
        """Saves without a Saver, since ``teardown`` may not be called after this."""
        self.wait()
        self._failed_at_once = None
        try:
            if self.mirrors:
                self._open_saver().save(checkpoint, target, blocking=True)
                self._close_saver()  # waits for the mirrors
            else:
                folders.make_folder(target.parent)
                lazyckpt.save(checkpoint, target)
        except lazyckpt.SaveError as error:
            if self._config.on_error == "raise":
                raise
            self._failed_at_once = target
            warn(str(error))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> Any:
        """Waits for pending saves, then loads and verifies every checksum. All ranks must call it, as Lightning does;
        each byte is read by one of them.

        Raises LoadError, FileNotFoundError, the SaveError of a save that failed, and RankError. If one rank fails, all
        raise.
        """
        with all_ranks_at(path, self._config.rank_timeout_s) as team:
            team.agree(self.wait)  # only rank 0 knows the pending saves
            if (place := in_mirror(path, self.mirrors)) is not None:
                return load_together(place, map_location, weights_only, team)
            target = local_path(path)
            try:
                if target is not None and not os.path.isdir(target):
                    loaded = load_together(target, map_location, weights_only, team)
                    self._note_resumed(target, loaded)
                    return loaded
            except lazyckpt.UnsupportedFormatError:
                pass
            except lazyckpt.LoadError as error:
                if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                    raise
        return super().load_checkpoint(path, map_location, weights_only)  # torch may read it, or raises its own error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes ``path`` once everything saved so far is durable; if that fails, keeps it and warns."""
        if self._failed_at_once is not None:
            warn(f"{path} is kept, since the checkpoint after it was not saved ({self._failed_at_once})")
            return
        target = local_path(path)
        saver = self._own_saver()
        if target is None or saver is None:
            super().remove_checkpoint(path)
            return
        self._removed.add(target)
        if self._news:  # a logger that has not yet been told of the file must find it
            self._news.append((None, lambda: saver.remove(target)))
        else:
            saver.remove(target)

    def wait(self) -> None:
        """Waits until everything saved is durable. Raises the first SaveError that was not raised yet."""
        saver = self._own_saver()
        if saver is None:
            return
        try:
            if self._news:
                saver.drain()
                self.tell()
            saver.wait()  # also for removals, and for done-callbacks of handles: link()
        finally:
            self._links.clear()
            self._removed.clear()

    def teardown(self) -> None:
        """Waits; stops the threads. The next save starts new ones."""
        attended, self._attended = self._attended, False
        self.reports.release()
        try:
            try:
                self.wait()
            finally:
                self._close_saver()
        except lazyckpt.SaveError as error:
            if not attended:
                raise
            self._failure = error  # the callback raises it on every rank

    def _close_saver(self) -> None:
        saver, self._saver = self._own_saver(), None
        if saver is not None:
            self._at_the_end.detach()
            saver.close()

    # for the callback

    def exists(self, target: Path) -> bool:
        """Whether the local file would exist now if saves and removals took no time."""
        there = target in self._links or any(handle.path == target for handle in self._pending())
        return target not in self._removed and (there or os.path.exists(target))

    def link(self, path: str | Path, link: str | Path) -> None:
        """Makes ``link`` a durable symbolic link to ``path`` once ``path`` is durable.

        Until then, and if the save of ``path`` fails, ``link`` stays as it was. Removals that are requested later come
        after the link.
        """
        target, name = Path(path).absolute(), Path(link).absolute()
        if name in self._removed:
            self.wait()
        number = next(self._link_numbers)
        self._links.add(name)

        def make(_: object = None) -> None:
            with self._lock:
                if number < self._linked.get(name, 0) or not os.path.exists(target):
                    return
                self._linked[name] = number
                try:
                    commit.publish_link(name, target)
                except OSError as error:
                    warn(f"{name} could not be made a link to {target}: {error}")

        pending = [handle for handle in self._pending() if handle.path == target]
        if pending:
            pending[-1].add_done_callback(make)
        else:
            make()

    def tell(self) -> None:
        """Tells the loggers of durable files, then removes files whose removal waited for that. Runs on the training
        thread: loggers are not made for others."""
        while self._news and (self._news[0][0] is None or self._news[0][0].done()):
            handle, act = self._news.pop(0)
            if handle is None or Future.exception(handle) is None:
                act()

    def _own_saver(self) -> lazyckpt.Saver | None:
        return self._saver if self._pid == os.getpid() else None  # not that inherited by a forked process

    def _drain(self) -> None:
        """Waits as ``wait`` does, and raises nothing."""
        saver = self._own_saver()
        if saver is not None:
            saver.drain()

    def _pending(self) -> list[lazyckpt.SaveHandle]:
        saver = self._own_saver()
        return saver.pending() if saver is not None else []

    def _open_saver(self) -> lazyckpt.Saver:
        saver = self._own_saver()
        if saver is None:
            knobs: dict[str, Any] = {**self._knobs}
            if self._config.on_done is not None:
                self.reports.on_done, knobs["on_done"] = self._config.on_done, self.reports.settled
            saver = self._saver = lazyckpt.Saver(**knobs)
            self._pid = os.getpid()
            self._at_the_end = weakref.finalize(self, close_and_warn, saver)  # Fabric calls no teardown()
            if self._resumed is not None:
                saver.resumed(*self._resumed)
        return saver


lightning_last.install(LazyCheckpointIO)
