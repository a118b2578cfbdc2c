"""``Checkpointer``: tracks the state of a run, restores it, and saves it while training goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NoReturn

from lazyckpt.capture.gate import gate
from lazyckpt.config import MIB
from lazyckpt.errors import ConfigError, LoadError, ReadError, save_error
from lazyckpt.observe.interval import interval
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.plan import ArchiveCache, StatePlan
from lazyckpt.pipeline.reentry import alone
from lazyckpt.pipeline.request import CheckpointRequest, Lineage
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.data_loader import track_loader
from lazyckpt.providers.sharded import refuse_parts
from lazyckpt.providers.training import ModuleProvider, OptimizerProvider, RngProvider, provider_for
from lazyckpt.reading.restore import restore_newest, restore_one
from lazyckpt.saver import Saver
from lazyckpt.storage import commit, folders, manifest, paths, removal
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import STATE, Checkpoint
from lazyckpt.warn import warn

RNG = "rng"
_READ_AHEAD_BYTES = 64 * MIB


class Checkpointer:
    """Saves and restores a training run in the folder ``directory``. Makes the folder if it is missing.

        with lazyckpt.Checkpointer("runs/a") as ckpt:
            ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler)
            loader = ckpt.track_loader(loader)
            step = ckpt.restore() or 0
            ...
            optimizer.step()
            ckpt.save(step)

    ``save_every`` is for ``maybe_save``: a number of steps, or "auto": as often as possible while checkpoints cost at
    most the fraction ``max_overhead`` of the training time. The other keyword arguments are the fields of ``Config``.
    One thread at a time may call: a second one, and a signal handler inside a call, get a ConfigError.
    Raises ConfigError for an invalid knob, ReadError if the folder cannot be read, SaveError if it cannot be written
    to. If such a folder holds checkpoints, that is a warning instead: they can be restored, and saves fail.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: int | Literal["auto"] | None = None,
        max_overhead: float = 0.02,
        **knobs: Any,
    ) -> None:
        self.directory = paths.local(directory)
        self._interval = None if save_every is None else interval(save_every, max_overhead)
        self._saver = Saver(**knobs)
        self._launcher = self._saver.launcher
        self._launcher.owner = f"the Checkpointer of {self.directory}"
        self._callers = self._launcher.callers
        self.config = self._saver.config
        self._catalog = Catalog(self.directory)
        try:
            folders.make_folder(self.directory)
            removal.sweep(self.directory)
            commit.Staging(self.directory / "writable").discard()
        except OSError as error:
            if not self._holds_any():
                self._saver.close()
                raise save_error(error, path=self.directory, opening=True) from error
            warn(f"{self.directory}: {error.strerror}; restore() works there, save() does not")
        self._lineage = Lineage(self._catalog, keep_last=self.config.keep_last, keep_every=self.config.keep_every)
        self._provider = CompositeProvider()
        self._archive = ArchiveCache()
        if (newest := self._lineage.newest) is not None:  # restore() reads ahead; the first save grows the ring further
            self._saver.reserve(min(newest.nbytes, _READ_AHEAD_BYTES))
        self._track(RNG, RngProvider())

    def _holds_any(self) -> bool:
        """Whether the folder holds a checkpoint, be it broken. Raises ReadError if that cannot be told."""
        try:
            return bool(self._catalog.scan() or self._catalog.broken)
        except ReadError:
            raise
        except LoadError:
            return False  # there is no such folder

    # what is saved

    def track(self, **state: Any) -> None:
        """Name what is saved. Values: modules, optimizers, anything with ``state_dict``/``load_state_dict``,
        tensors, dicts and lists (restored in place), or a ``StateProvider``.

        The random number generators are tracked as ``rng``. Raises ConfigError for other values, and for a tensor that
        is sharded over several ranks (FSDP2, tensor parallelism), since this process would save only its own shard.
        """
        self._launcher.check_usable()
        gate.guard_averages()
        for name, obj in state.items():
            if name in self._provider.parts:
                reserved = " (reserved for the random number generators)" if name == RNG else ""
                raise ConfigError(f"track: the name {name!r} is taken{reserved}")
            refuse_parts(obj, name)
            self._track(name, obj)

    def track_loader(self, loader: Any, name: str = "loader") -> Any:
        """Track a data loader. Returns what to iterate instead: a wrapper that knows its position, or the loader itself
        if it has ``state_dict`` and ``load_state_dict``."""
        wrapped = track_loader(loader)
        self.track(**{name: wrapped})
        return wrapped

    def _track(self, name: str, obj: Any) -> None:
        provider = provider_for(name, obj)
        # RNG last: restoring other state may draw random numbers.
        parts = {**self._provider.parts, name: provider}
        if RNG in parts:
            parts[RNG] = parts.pop(RNG)
        self._provider.parts = parts
        if isinstance(provider, ModuleProvider):
            self._saver.watch(provider.obj)
        if isinstance(provider, ModuleProvider | OptimizerProvider):
            self._saver.expect(provider.obj)

    # restore

    @alone("restore()")
    def restore(self, *, step: int | None = None, path: str | os.PathLike[str] | None = None) -> int | None:
        """Load the newest committed checkpoint into the tracked state; return its step, or None if there is none.

        The newest is the one saved last, whatever its step. A damaged one is passed over with a warning. ``step`` or
        ``path`` (a checkpoint folder) select another one. Waits for saves in flight.

        Raises RestoreError if the checkpoint does not fit the tracked state (nothing is touched then), if tracked state
        fails to load it, or if no checkpoint is whole; LoadError if the selected one, or the folder, cannot be read;
        UnsupportedFormatError if it holds types that are not allowed (``torch.serialization.add_safe_globals``).
        """
        self._launcher.check_usable()
        if step is not None and path is not None:
            raise ConfigError("restore: give a step or a path, not both")
        self._saver.drain()
        gate.wait_all()  # other Checkpointers may still be copying the state that this overwrites
        if step is not None:
            path = self._folder_of(step)
        checkpoint: Checkpoint | None
        if path is None:
            checkpoint = restore_newest(self._catalog, self._provider, self._saver.engine)
        else:
            checkpoint = restore_one(Path(path), self._provider, self._saver.engine)
        if checkpoint is None:
            return None
        self._launcher.forget_frozen()
        self._lineage.restored(checkpoint, own=checkpoint.path.parent.resolve() == self.directory.resolve())
        return checkpoint.step

    # save

    @alone("save()")
    def save(self, step: int, *, blocking: bool = False) -> SaveHandle:
        """Snapshot the tracked state as checkpoint ``step`` and make it durable in the background.

        Returns in milliseconds. State that only an optimizer step changes is copied during the next forward and
        backward; the next ``optimizer.step()`` waits for these copies. Everything else is copied before this returns.
        Waits while ``max_in_flight`` checkpoints are not durable yet. ``blocking=True`` returns when it is durable.

        Raises SaveError if an earlier checkpoint failed in the background (``on_error="raise"``) or if this one fails
        at once. With ``on_error="warn"`` these are warnings, and the handle holds the error.
        """
        request = CheckpointRequest(self._folder_of(step), step, self._lineage)
        plan = StatePlan(self._provider, self._archive)
        return self._launcher.launch(request, {STATE: plan}, blocking=blocking)

    def _folder_of(self, step: int) -> Path:
        return self.directory / manifest.folder_name(_checked_step(step))

    def maybe_save(self, step: int) -> SaveHandle | None:
        """Save if it is time. Call this once after every optimizer step.

        With ``save_every=n`` it is time at every multiple of ``n``; with "auto", every ``interval`` steps.
        Raises ConfigError without ``save_every``, and whatever ``save`` raises.
        """
        if self._interval is None:
            raise ConfigError('maybe_save: give the Checkpointer save_every, a number of steps or "auto"')
        self._launcher.check_usable()
        if not self._interval.due(_checked_step(step), in_flight=bool(self._saver.pending())):
            return None
        handle = self.save(step)
        self._interval.saved(handle.metrics)
        return handle

    @property
    def interval(self) -> int | None:
        """Steps between checkpoints of ``maybe_save``; None without ``save_every``.

        With ``save_every="auto"``, the shortest interval that keeps the overhead within ``max_overhead`` and in which a
        checkpoint becomes durable. Overhead is the time in ``save()`` plus the slowdown of iterations until the
        checkpoint is durable. Tuned after every checkpoint."""
        return None if self._interval is None else self._interval.every

    # the end

    def close(self) -> None:
        """Wait until every checkpoint is durable; stop the threads. Raises the SaveError of one that failed."""
        self._saver.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the Checkpointer of {self.directory} cannot be copied or pickled, since one process at a time saves into "
            "a folder; make one where the training runs, and call track() and restore() there"
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *raised: Any) -> Literal[False]:
        return self._saver.__exit__(*raised)


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= manifest.MAX_NUMBER:
        raise ConfigError(f"step={step!r}: expected a whole number, at least 0 and of at most 63 bits")
    return step
