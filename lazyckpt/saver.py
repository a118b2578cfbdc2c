"""``Saver``: saves any object as a file or folder, lazily and durably."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Hashable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from lazyckpt import _engine
from lazyckpt.config import Config, RunSettings, spells_out
from lazyckpt.errors import ClosedError, ConfigError, RankError, SaveError, save_error
from lazyckpt.gate import hooks
from lazyckpt.gate.gate import gate
from lazyckpt.mirroring import Mirroring, at_the_end, call
from lazyckpt.observe.trace import Trace
from lazyckpt.pipeline.background import Background
from lazyckpt.pipeline.handle import SaveHandle, wait_for
from lazyckpt.pipeline.launch import Launcher
from lazyckpt.pipeline.plan import ArchiveCache, CastPlan, plan_for
from lazyckpt.pipeline.reentry import alone, other_thread, refuse
from lazyckpt.pipeline.replicated.together import Teams
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.sharded.request import stage_shared
from lazyckpt.pipeline.staging_buffer import StagingBuffer
from lazyckpt.ranks.team import has_ranks
from lazyckpt.staged import StagedFolder
from lazyckpt.storage import hidden, in_place, paths, removal
from lazyckpt.storage.commit import Staging

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Saver(Mirroring):
    """Saves any object, lazily and durably. Each save is one file or folder, which appears whole under its name.

        with lazyckpt.Saver() as saver:
            ...
            optimizer.step()
            saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"runs/step{step}.pt")

    Parameters and optimizer state, whatever object holds them, are copied while the next forward and backward compute.
    Everything else is copied before ``save`` returns. A ``Checkpointer`` adds a folder of checkpoints, retention and
    restoration.

    Keyword arguments are the fields of ``Config``; ``keep_last`` and ``keep_every`` have no effect here. One thread at
    a time may call: a second one, and a signal handler inside a call, get a ConfigError. Saves become durable in the
    order of the calls. Raises ConfigError for an invalid knob.
    """

    @spells_out(RunSettings)
    def __init__(self, **knobs: Unpack[RunSettings]) -> None:
        self.config = config = Config.of(knobs, type(self).__name__)
        self._archives = ArchiveCache()  # of lone archives, whatever their names
        self._staged_archives: dict[str, ArchiveCache] = {}  # of archives in staged folders, by name
        self._prepared: set[Path] = set()  # folders
        self._staged_in: dict[Path, Path] = {}  # by the folder that the checkpoints appear in
        self._pid = os.getpid()
        self._ended = False  # every save is durable
        self._leaving = at_the_end(self)  # before the background, so at exit it runs after that
        self._trace = Trace(config.trace) if config.trace is not None else None
        self._background = Background(config, self._trace)
        try:
            self._open_mirrors(config, self._leaving)
            self._buffer = StagingBuffer(config)
        except ConfigError:
            self._background.close()
            if self._trace is not None:
                self._trace.close()
            raise
        self._teams = Teams(config, self._background.drain)
        self.launcher = Launcher(config, self._buffer, self._background, self._trace)
        self._callers = self.launcher.callers
        hooks.install()

    @alone("save()")
    def save(
        self,
        obj: Any,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        dtype: torch.dtype | None = None,
        blocking: bool = False,
    ) -> SaveHandle:
        """Save ``obj`` as the file ``path``, as ``torch.save`` would. A name that ends in ``.safetensors`` gives that
        format; ``obj`` is then a dict of tensors.

        Returns in milliseconds, but waits while ``max_in_flight`` saves are not durable yet. ``blocking=True`` returns
        when the file is durable. ``step`` is the training step, for messages; several saves of one step stay lazy,
        although no optimizer has stepped between them. ``dtype`` converts the floating-point tensors of ``obj``, a
        state dict, before this call returns: in host memory, which holds them until they are copied.

        Raises SaveError if this save fails at once, or an earlier one has failed in the background: then ``obj`` is
        saved all the same. With ``on_error="warn"`` these are warnings, and the handle holds the error.
        """
        return self.save_at(step, obj, path, step=step, dtype=dtype, blocking=blocking)

    def stage(
        self,
        path: str | os.PathLike[str],
        *,
        inside: str | os.PathLike[str] | None = None,
        step: int | None = None,
        all_ranks: bool = False,
        keep_others: bool = True,
        latest: str | os.PathLike[str] | None = None,
        writers: str | int | None = None,
        wait: bool = True,
    ) -> StagedFolder:
        """Begin a folder that appears as ``path`` when everything in it is durable.

        Until then it has a temporary name beside ``path``, or in the folder ``inside`` if that is on the same mount; so
        do paths that ``remove`` removes later. It replaces a folder of that name, but keeps files there that it lacks
        itself, unless ``keep_others`` is false. A folder that cannot be renamed, such as a mount point, is filled
        instead, and keeps them (in_place.py). A symbolic link is followed. Raises SaveError if it cannot be made.

        ``latest`` is a text file that then names the folder. It is replaced before the handle is done, on any rank.

        With ``all_ranks``, the ranks of torch.distributed fill one folder together. Every rank calls this with the same
        arguments, for the same folders in the same order, and then ``save`` of the returned folder. It waits until rank
        0 has made the temporary folder, which all see. The folder appears when the parts of all ranks are durable, or
        not at all: then every rank gets a RankError. ``inside`` must be on the same mount, and a folder that cannot be
        renamed is refused.

        For the trainers: without ``wait``, and with ``writers``, ranks other than 0 do not wait for the temporary name.
        ``path`` of their folder is the final one, and they only ``add`` files. With ``writers`` (as for a Checkpointer)
        the ranks hold the same state, and write files of ``StagedFolder.write_together`` together.
        """
        refuse("stage()")
        self.launcher.check_usable()
        target = paths.local(path)
        folder, pointer = (None if one is None else paths.local(one) for one in (inside, latest))
        try:
            if target.is_symlink() or target.name == "..":
                target = Path(os.path.realpath(target, strict=True))
            prepare = partial(self._prepare_both, folder)
            if all_ranks and writers is not None and has_ranks():
                together = self._teams.together(folder or target.parent, writers)
                request: Request = together.folder(target, step, prepare, keep_others=keep_others, latest=pointer)
            elif all_ranks:
                crew = self._teams.crew(folder or target.parent)
                alone = partial(self._stage_alone, target, folder, keep_others)
                request = stage_shared(
                    crew, target, step, alone, prepare, keep_others=keep_others, latest=pointer, wait=wait
                )
            else:
                request = Request(target, step, self._stage_alone(target, folder, keep_others), latest=pointer)
        except OSError as error:
            raise save_error(error, path=target, step=step) from error
        return StagedFolder(self.launcher, self._mirrored(request), self._staged_archives)

    def _stage_alone(self, target: Path, inside: Path | None, keep_others: bool) -> Staging:
        if inside is not None:
            self._staged_in[target.parent] = inside
        return in_place.stage(target, inside, self._prepare, keep_others=keep_others)

    def _prepare(self, folder: Path) -> None:
        """Makes a folder to save into and removes the remains of dead processes in it, once. Raises OSError."""
        if folder not in self._prepared:
            self._leave_places()
            hidden.make(folder)
            for one in hidden.swept_with(folder):
                removal.sweep(one)
            self._prepared.add(folder)

    def _prepare_both(self, inside: Path | None, parent: Path) -> None:
        """Rank 0 of a crew: prepares the folder of a checkpoint, and that in which it is staged."""
        self._prepare(parent)
        if inside is not None:
            self._staged_in[parent] = inside
            self._prepare(inside)

    def _leave_places(self) -> None:
        """Removes the places (hidden.py) that are empty. The next save into one makes it again."""
        for place in filter(hidden.is_place, self._prepared):
            hidden.remove(place)
        self._prepared = set(filter(os.path.isdir, self._prepared))  # False where this process may not look

    def watch(self, module: torch.nn.Module) -> None:
        """Make ``module.load_state_dict`` wait for pending copies. Also lets its frozen parameters become lazy."""
        if not any(module is known for known in self.launcher.modules):
            self.launcher.modules.append(module)
            gate.watch(module)

    def unwatch(self, module: torch.nn.Module) -> None:
        """Undo ``watch``."""
        self.launcher.modules[:] = [known for known in self.launcher.modules if known is not module]

    def expect(self, *objects: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Announce the objects of the first save, so that its staging buffer is ready in time.

        After the first step of one of these optimizers a background thread allocates the memory, and pins it if there
        is a GPU. Otherwise the first save starts that, and its copies wait. A process that only loads takes no memory.
        """
        for obj in objects:
            self._buffer.warmup.expect(obj)

    def pending(self) -> list[SaveHandle]:
        """The saves that are not durable yet, oldest first."""
        return self._background.pending

    def wait(self, path: str | os.PathLike[str] | None = None) -> None:
        """Wait for all pending saves, removals and done-callbacks; with ``path``, only for saves of that name or below.
        Raises the first SaveError that was not reported yet (``on_error="raise"``)."""
        refuse("wait()")
        self.launcher.check_process()
        if path is None:
            self._background.drain()
            self._leave_places()
        else:
            wanted = Path(path).resolve()  # however it was spelled
            ways = [(h, h.path.resolve()) for h in self.pending()]
            wait_for(h for h, there in ways if there == wanted or wanted in there.parents)
        self._background.raise_failed()

    def check(self) -> None:
        """Raise the first SaveError that was not reported yet (``on_error="raise"``), without waiting."""
        refuse("check()")
        self._background.raise_failed()

    @alone("remove()")
    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or folder in the background, once every save before this call is durable and its done-callbacks
        have returned. It stays if the last of these saves fails, with a warning: it may be the last good one. So does a
        path that is saved again after this call."""
        self.launcher.check_usable()
        local = paths.local(path)
        self._background.remove(local, self._staged_in.get(local.parent))

    def close(self) -> None:
        """Wait until everything is durable; stop the threads. Raises the SaveError of a save that failed."""
        if self._ended or os.getpid() != self._pid:
            return
        closed, self.launcher.closed = self.launcher.closed, True
        # Inside a call of another Saver this may go on: a garbage collection there may be what closes this one.
        if self._callers or gate.is_held():
            self.launcher.closed = closed
            refuse("close()")
            raise other_thread("close()")
        self._background.close()
        call(self._leaving)
        self._teams.close()
        self._leave_places()
        if self._trace is not None:
            self._trace.close()
        self.launcher.modules.clear()
        self._buffer.close()
        self._ended = True
        self._background.raise_failed()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, since its threads and its staging buffer belong to "
            f"this process; make another {type(self).__name__} with the same settings where you need one"
        )

    @property
    def closed(self) -> bool:
        return self.launcher.closed

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> Literal[False]:
        try:
            self.close()
        except SaveError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), stacklevel=2)  # the exception that ended training matters more
        return False

    # for Checkpointer, which builds on it

    @property
    def engine(self) -> _engine.Engine:
        """Raises ClosedError after ``close``."""
        if self._buffer.engine is None:
            raise ClosedError(f"{self.launcher.label} is closed")
        return self._buffer.engine

    def save_at(
        self,
        training_step: Hashable,
        obj: Any,
        path: str | os.PathLike[str],
        *,
        step: int | None,
        dtype: torch.dtype | None,
        blocking: bool,
    ) -> SaveHandle:
        """As ``save``. Saves of one ``training_step`` stay lazy, even if their ``step`` differs."""
        if not Path(path).name:
            raise ConfigError(f"save: {str(path)!r} is not the name of a file")
        target = paths.local(path)
        paths.refuse_special_file(target)
        try:
            self._prepare(target.parent)
        except OSError as error:
            raise save_error(error, path=target, step=step) from error
        plan = plan_for(target.name, obj, cache=self._archives) if dtype is None else CastPlan(target.name, obj, dtype)
        request = self._mirrored(Request(target, step))
        return self.launcher.launch(request, {target.name: plan}, blocking=blocking, training_step=training_step)

    def reserve(self, nbytes: int) -> None:
        """Grows the staging buffer, as far as ``host_buffer_bytes`` allows."""
        self._buffer.reserve(nbytes)

    def drain(self) -> None:
        """Like ``wait``, but leaves failures for the next save to raise."""
        self._background.drain()

    # for the trainers, in which all ranks call together

    def lost_rank(self, path: Path) -> RankError | None:
        """Returns the error, for ``path``, of the rank whose loss made a collective of torch fail; None if all live."""
        return self._teams.lost_rank(path)

    @alone("save()")
    def save_together(
        self,
        obj: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        writers: str | int,
        everyones: Collection[str],
        step: int | None = None,
        blocking: bool = False,
    ) -> SaveHandle:
        """As ``save``, of an archive. Every rank calls it with the same path, in the same order, and the ranks write
        the file together. ``writers``: as for a Checkpointer. ``everyones``: the names in ``obj`` whose values are the
        same on all ranks; of the others, rank 0's are saved.

        Raises ConfigError, on all ranks, if they have other ``writers``."""
        self.launcher.check_usable()
        target = paths.local(path)
        paths.refuse_special_file(target)
        together = self._teams.together(target.parent, writers)
        try:
            request, plans = together.lone_file(target, step, obj, everyones, self._prepare)
        except OSError as error:
            raise save_error(error, path=target, step=step) from error
        return self.launcher.launch(self._mirrored(request), plans, blocking=blocking, training_step=step)
