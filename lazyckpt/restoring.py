"""The calls of a Checkpointer that restore: from the newest checkpoint, another one, or the best."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyckpt.errors import ConfigError, LoadError, ReadError, save_error
from lazyckpt.gate.gate import gate
from lazyckpt.history import History, checked_step
from lazyckpt.mirroring import close_mirrors, finish_first
from lazyckpt.pipeline.joining import Joining
from lazyckpt.pipeline.launch import Launcher
from lazyckpt.pipeline.reentry import alone
from lazyckpt.providers.rename import Rename
from lazyckpt.ranks import streams
from lazyckpt.ranks.team import ALONE
from lazyckpt.reading.fit import Fit
from lazyckpt.reading.restore import restore_newest, restore_one
from lazyckpt.reading.restored import Restored
from lazyckpt.saver import Saver
from lazyckpt.storage import manifest, rollback
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.storage.retention import Best
from lazyckpt.stores.store import AnyPath
from lazyckpt.stores.urls import is_url, located
from lazyckpt.warn import warn

if TYPE_CHECKING:
    from lazyckpt.tiers.mirror import Mirror
    from lazyckpt.tiers.mirrors import Mirrors

_log = logging.getLogger("lazyckpt")
RNG = "rng"  # the name of the random number generators among the parts


class Restoring(Joining, History):
    """The calls of a Checkpointer that restore the tracked state."""

    _saver: Saver
    _launcher: Launcher
    _warned_of_newer: bool
    _tracked: dict[str, Any]
    _mirrors: Mirrors | None = None

    def _open_mirrors(self, given: Iterable[Mirror | str | os.PathLike[str]]) -> None:
        """Raises ConfigError."""
        self._tiers = self._catalog
        if not given:
            return
        from lazyckpt.tiers.mirror import mirrors_of
        from lazyckpt.tiers.mirrors import Mirrors, TieredCatalog

        wanted, models = mirrors_of(given), None
        if any(mirror.what == "model" for mirror in wanted):
            from lazyckpt.conversion.weights import Weights

            models = Weights(self._tracked, self.directory)
        mirrors = self._mirrors = Mirrors(wanted, self.directory, models)
        self._tiers = TieredCatalog(self._catalog, mirrors)
        self._leaving.append(partial(close_mirrors, mirrors, "the next Checkpointer of this folder uploads the newest"))
        finish_first(self, self._saver.finish)

    def restore(
        self,
        *,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        only: Iterable[str] | None = None,
        strict: bool = True,
        parts: Mapping[str, str] | None = None,
        rename: Rename | None = None,
        cast: bool = False,
        loader: bool = True,
        best: bool = False,
    ) -> Restored | None:
        """Load the newest committed checkpoint into the tracked state; return its step, or None if there is none. The
        step is a ``Restored``, an int that also tells what was restored.

        The newest is the one saved last, here or in a mirror, which may not have the highest step. A damaged one is
        skipped with a warning. Waits for saves in flight.

        Args:
            step: Selects the checkpoint of this step instead.
            path: Selects a checkpoint folder instead, of any run, or its URL.
            only: Names of the parts to restore, such as ["model"]. The others stay as they are, and of the file only
                the bytes of these parts are read.
            strict: False restores what the checkpoint and the tracked state both have: parts, and the entries of a
                module. The ``Restored`` tells what was missing or unexpected. Other shapes are an error still, and so
                is a checkpoint that has nothing of any module that is to be restored.
            parts: Names of parts in the checkpoint, by the names under which they are tracked: {"net": "model"}.
            rename: New names for the entries of modules: prefixes and their replacements, {"module.": ""}, or a
                function of a name. None as a new name leaves the entry out.
            cast: Converts floating-point tensors of modules to the dtype of the tracked ones.
            loader: False leaves tracked loaders as they are: training begins a new epoch.
            best: Takes the checkpoint with the best metric (``best`` and ``mode`` of the Checkpointer) instead.

        Raises:
            RestoreError: If the checkpoint does not fit the tracked state (nothing is touched then), if tracked state
                fails to load it, or if no checkpoint is whole.
            LoadError: If the selected checkpoint, or the folder, cannot be read; UnsupportedFormatError if it holds
                types that are not allowed (``torch.serialization.add_safe_globals``).
            ConfigError: For invalid arguments.
        """
        self._launcher.check_usable()
        if (step is not None) + (path is not None) + bool(best) > 1:
            raise ConfigError("restore: give one of step, path and best")
        fit = Fit.of(self._provider, only=only, strict=strict, parts=parts, rename=rename, cast=cast, loader=loader)
        if step is not None:
            found = self._restore(fit, "restore", f"step={step}", folder=lambda: self._place_of(step))
        elif path is not None:
            found = self._restore(
                fit,
                "restore",
                f"path={os.fspath(path) if is_url(path) else os.path.abspath(path)!r}",
                folder=lambda: self._located(path),
            )
        else:
            told = ["best=True"] if best else []
            found = self._restore(fit, "restore", *told, best=self._checked_best() if best else None)
        if found is None:
            return None
        checkpoint, restored = found
        if (step is not None or path is not None or best) and self._leads():
            self._warn_of_newer(checkpoint)
        return restored

    @property
    def mirror_lag_s(self) -> float:
        """How long the oldest checkpoint that a mirror does not have yet has been durable here; 0.0 if they have all
        that they take."""
        return 0.0 if self._mirrors is None else self._mirrors.lag_s

    @alone("restore()")
    def _restore(
        self,
        fit: Fit,
        call: str,
        *told: str,
        folder: Callable[[], AnyPath] | None = None,
        best: Best | None = None,
        check: Callable[[], None] | None = None,
    ) -> tuple[Checkpoint, Restored] | None:
        """Restores the newest checkpoint or the ``best``, or that in ``folder``, which is asked for once all saves are
        durable. ``call`` and ``told``: the method that was called, and which checkpoint it was told to take. ``check``
        of rank 0 may raise before the state of any rank is touched."""
        self._saver.drain()
        gate.wait_all()  # other Checkpointers may still be copying the state that this overwrites
        engine = self._saver.engine
        team = ALONE if (crew := self._join_if_shared()) is None else crew.meet()
        team.compare(f"{call}({', '.join([*told, *fit.told()])})")
        if folder is not None:
            path = folder()
            if check is not None:
                team.follow(check)
            found = restore_one(path, self._provider, engine, fit, team)
        elif (newest := restore_newest(self._tiers, self._provider, engine, fit, best, team)) is not None:
            found = newest
        else:
            return None
        self._launcher.decisions.forget_frozen()
        if self._mirrors is not None and self._mirrors.owns(found[0]) and self._leads():
            self._mirrors.adopt(found[0])
        if self._mirrors is not None and found[0].path.parent != self.directory:
            _log.info("restored step %d from %s", found[0].step, found[0].path.parent)
        self._lineage.restored(found[0], own=self._is_own(found[0]))
        if RNG in found[1].parts and not (found[0].is_sharded or found[0].has_own_state):
            streams.warn_if_equal(found[0].path)
        return found

    def _leads(self) -> bool:
        """Whether this process changes and judges the folder: rank 0 does, for all ranks."""
        return not self._read_only and (self._crew is None or self._crew.rank == 0)

    def _is_own(self, checkpoint: Checkpoint) -> bool:
        if self._mirrors is not None and self._mirrors.owns(checkpoint):
            return True
        path = checkpoint.path
        return isinstance(path, Path) and path.parent.resolve() == self.directory.resolve()

    def _located(self, path: str | os.PathLike[str]) -> AnyPath:
        return (None if self._mirrors is None else self._mirrors.located(path)) or located(path)

    def _place_of(self, step: int) -> AnyPath:
        """The folder of this step, here or in a mirror. Raises LoadError, which lists the steps there are."""
        here = self.directory / manifest.folder_name(checked_step(step))
        found = self._tiers.folder_of(step) if manifest.is_missing(here) else here
        if found is None:
            raise self._no_checkpoint(step, self.steps())
        return found

    def rollback(
        self,
        step: int,
        *,
        only: Iterable[str] | None = None,
        strict: bool = True,
        parts: Mapping[str, str] | None = None,
        rename: Rename | None = None,
        cast: bool = False,
        loader: bool = True,
    ) -> Restored:
        """Restore the checkpoint of ``step`` and make it the one to continue from, also after a crash before the next
        save. The other arguments are those of ``restore``.

        The newer checkpoints stay until retention drops them. Raises the errors of ``restore``, and SaveError.
        Touches nothing and raises ReadError if a mirror cannot be read: a newer checkpoint there would undo this.
        """
        self._launcher.check_usable()
        self._refuse_read_only("rollback()")

        def folder() -> Path:
            if (found := self._folder_of(step)).is_symlink():
                raise LoadError("a symbolic link, to which no run goes back; restore(path=…) follows it", path=found)
            return found

        newest = 0

        def check() -> None:
            nonlocal newest
            newest = max((c.sequence for c in self._tiers.scan()), default=0)
            for unread in self._tiers.unread:
                what = f"it may hold checkpoints that rollback({step}) gives up, and restore() would take them"
                told = f"{unread.what}; {what}. Try again when it can be read"
                raise ReadError(told, path=unread.path, errno=errno.EIO)

        fit = Fit.of(self._provider, only=only, strict=strict, parts=parts, rename=rename, cast=cast, loader=loader)
        found = self._restore(fit, "rollback", str(step), folder=folder, check=check)
        assert found is not None
        checkpoint, restored = found
        try:
            if self._leads():
                rollback.note(self.directory, checkpoint, newest)
        except OSError as error:
            raise save_error(error, path=self.directory / rollback.NOTE, step=step) from error
        return restored

    def _warn_of_newer(self, restored: Checkpoint) -> None:
        newest = next(iter(self._catalog.scan()), restored)
        if self._is_own(restored) and newest.path.name != restored.path.name and not self._warned_of_newer:
            self._warned_of_newer = True
            why = "was saved later" if newest.sequence > restored.sequence else "was chosen by rollback()"
            warn(
                f"restored step {restored.step}, but step {newest.step} {why}, and restore() takes that one "
                f"until this run saves; rollback({restored.step}) makes it stay at step {restored.step}"
            )
