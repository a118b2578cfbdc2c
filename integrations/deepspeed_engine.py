"""``LazyCheckpointEngine``: what DeepSpeed's engine calls to save and load its files. See deepspeed.py."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

import lazyckpt
from lazyckpt.config import Settings, spells_out
from lazyckpt.integrations import announce, deepspeed_host, deepspeed_load, deepspeed_state
from lazyckpt.ranks.meeting import all_ranks_at

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LazyCheckpointEngine(CheckpointEngine):
    """Saves the checkpoints of one DeepSpeedEngine; ``enable`` makes it. All ranks take part in every save and load.

    DeepSpeed calls ``create``, ``makedirs``, ``save`` for each file of this rank, and asks ``is_decoupled``. True tells
    it to leave ``latest`` alone, and ``step()`` adds no barrier, since ``get_commit_info`` returns None.
    """

    last_save: lazyckpt.SaveHandle | None
    """The handle of the last ``save_checkpoint`` on this rank."""

    @spells_out(Settings)
    def __init__(
        self, engine: DeepSpeedEngine, *, host: deepspeed_host.Host | None = None, **knobs: Unpack[Settings]
    ) -> None:
        """``host`` has a Saver; without one the engine makes its own."""
        super().__init__()
        self.name = type(self).__name__
        self.last_save = None
        self._engine = weakref.ref(engine)
        self.host = host or deepspeed_host.alone(lazyckpt.Saver(**knobs), engine)
        self._owner = deepspeed_state.OuterStep(engine)
        self._saver.watch(engine.module)
        self._timeout_s = self._saver.config.rank_timeout_s
        self._collecting = False
        self._info: CheckpointCommitInfo | None = None
        self._files: dict[str, Any] = {}
        self._failure: OSError | None = None
        announce(self._saver, lambda: deepspeed_state.expected(engine))

    # DeepSpeed's calls, in this order

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begins a checkpoint, or the file of ``save_16bit_model``. Raises ConfigError, on all ranks, for a tag that
        is no folder of its own: the folder of a tag is replaced as a whole."""
        if Path(os.path.normpath(info.tag)).parts[:1] in ((), (os.pardir,)):
            raise lazyckpt.ConfigError(f"tag {info.tag!r} is no folder inside {info.save_dir}")
        self._info = info

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        """Makes ``save_dir``. The folder of the tag is staged: it appears when it is durable."""
        if self._name_in_tag(path) is None:
            try:
                os.makedirs(path, exist_ok=exist_ok)
            except OSError as error:
                self._note(error)

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Adds a file of this rank to the checkpoint. Another one, of ``save_16bit_model``, is durable on return."""
        name = self._name_in_tag(path)
        if name is None:
            self._saver.save(state_dict, path, blocking=True)
        else:
            self._files[name] = state_dict

    def is_decoupled(self) -> bool:
        """True: ``latest`` follows when the checkpoint is durable."""
        return True

    def get_commit_info(self) -> None:
        """None: nothing waits for ``step()``."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Ends ``save_16bit_model``."""
        self._info = None
        return True

    def preserves_storage_sharing(self) -> bool:
        """False: DeepSpeed need not clone the parts of larger storages, since only these parts are written."""
        return False

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """``torch.load``, verified. Raises LoadError."""
        try:
            return lazyckpt.load(path, map_location, weights_only=False)
        except lazyckpt.UnsupportedFormatError:  # DeepSpeed's older serialization, for example
            return torch.load(path, map_location=map_location, weights_only=False)

    def cleanup(self) -> None:
        """Waits until everything is durable, and stops the threads. A failed save becomes a warning."""
        self._owner.close()
        self.host.leave()

    # of a Saver

    @property
    def _saver(self) -> lazyckpt.Saver:
        return self.host.open()

    def pending(self) -> list[lazyckpt.SaveHandle]:
        """Returns the checkpoints that are not durable yet, oldest first."""
        return self.host.pending()

    def wait(self) -> None:
        """Waits until every checkpoint of this rank is durable. Raises the first SaveError that was not raised yet."""
        self.host.wait()

    # around DeepSpeed's own methods

    def save_checkpoint(self, write: Callable[[], Any]) -> Any:
        """Calls ``write``, DeepSpeed's ``save_checkpoint``, and saves what it hands over.

        Raises what failed only then: DeepSpeed's barriers are behind, so no rank waits for this one in vain."""
        with self._collected() as files:
            try:
                done = write()
            except RuntimeError as error:  # of a collective, perhaps
                if (lost := self._lost_rank()) is not None:
                    raise lost from error
                raise
            info, self._info = self._info, None
        engine = self._engine()
        assert info is not None and engine is not None
        target = Path(info.save_dir, info.tag)
        if self.host.took(info, files, self._failure, first=engine.global_rank == 0):
            return done
        with self._saver.stage(
            target,
            step=engine.global_steps,
            all_ranks=True,
            latest=Path(info.save_dir, "latest") if info.save_latest else None,
            wait=False,
        ) as staged:
            deepspeed_host.add(files, self._failure, staged, target)
            self.last_save = staged.save(blocking=deepspeed_host.may_be_rotated(target))
        return done

    def _lost_rank(self) -> lazyckpt.RankError | None:
        """The error of the rank whose loss explains that a collective of DeepSpeed's has failed."""
        if self.last_save is None:  # the ranks have not met yet
            return None
        info = self._info  # None in the barrier before ``create``
        return self._saver.lost_rank(self.last_save.path.parent if info is None else Path(info.save_dir, info.tag))

    @contextlib.contextmanager
    def _collected(self) -> Iterator[dict[str, Any]]:
        """A context in which files of the tag are collected."""
        self._files, self._failure, self._collecting = {}, None, True
        try:
            yield self._files
        finally:
            self._files, self._collecting = {}, False

    def load_checkpoint(self, read: Callable[[str | None], Any], load_dir: str, tag: str | None) -> Any:
        """Calls ``read``, DeepSpeed's ``load_checkpoint``, with the newest whole tag, or with ``tag`` if it is whole.

        Waits for this rank's saves and for the other ranks. Every file is verified before anything is loaded. Raises
        LoadError, on all ranks; and SaveError if a save has failed that was not told yet: a second call then loads."""
        lazyckpt.wait_captured()
        with all_ranks_at(load_dir, self._timeout_s) as team:
            team.agree(self.wait)
            found = deepspeed_load.whole_tag(team, Path(load_dir), tag)
        loaded = read(found)
        if found is not None and self.host.close is not None:  # otherwise a trainer owns the folder
            self._saver.resumed(Path(load_dir, found))
        return loaded

    def copy_recovery_script(self, copy: Callable[[], None]) -> None:
        """Calls ``copy``, which writes ``zero_to_fp32.py`` into ``save_dir``."""
        try:
            copy()
        except OSError as error:
            self._note(error)

    def _note(self, error: OSError) -> None:
        """Keeps an error of this rank until all ranks have passed DeepSpeed's barriers."""
        if not self._collecting:
            raise error
        self._failure = self._failure or error

    def _name_in_tag(self, path: str | os.PathLike[str]) -> str | None:
        """Returns the name of a path inside the folder of the tag; None for one outside."""
        if not self._collecting or self._info is None:
            return None
        name = os.path.relpath(path, os.path.join(self._info.save_dir, self._info.tag))
        return None if name.partition(os.sep)[0] == os.pardir else name
