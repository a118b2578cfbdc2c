"""DeepSpeed: ``save_checkpoint()`` returns in milliseconds, and its tag appears when all of its files are durable.

    import lazyckpt.integrations.deepspeed          # then the JSON alone: {"lazyckpt": {"max_in_flight": 2}}
    enable(engine, max_in_flight=2)                 # or by hand, after deepspeed.initialize()

DeepSpeed still decides what to save. It hands each file to its checkpoint engine, here ``LazyCheckpointEngine``, which
collects the files of one ``save_checkpoint`` and, behind DeepSpeed's last barrier, saves them as one snapshot of all
ranks: copied lazily, committed together, and then named by ``latest``. The files, their names and their contents are
DeepSpeed's own; ``load_checkpoint`` needs no lazyckpt.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lazyckpt
from lazyckpt import private_names, settings
from lazyckpt.config import Settings, spells_out
from lazyckpt.integrations import announce, wrap
from lazyckpt.warn import warn

with private_names.needed("deepspeed"):
    import deepspeed
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.engine import DeepSpeedEngine

    from lazyckpt.integrations import deepspeed_host, deepspeed_load, deepspeed_state
    from lazyckpt.ranks.meeting import all_ranks_at

    if tuple(map(int, deepspeed.__version__.split("+")[0].split(".")[:3])) < (0, 18, 9):
        raise ImportError("its checkpoint engines are called in another order")

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEY = "lazyckpt"  # in the JSON
_RETENTION = "DeepSpeed keeps all checkpoints; `lazyckpt prune` removes old ones"


@spells_out(Settings)
def enable(
    engine: DeepSpeedEngine, *, enabled: bool | None = None, **knobs: Unpack[Settings]
) -> LazyCheckpointEngine | None:
    """Make ``save_checkpoint`` of this engine lazy and durable. Every rank must call it, before training.

    Keyword arguments are ``enabled`` and the fields of ``Config``, except retention: DeepSpeed keeps all checkpoints.
    They override ``LAZYCKPT_*`` variables, and these override the file that ``LAZYCKPT_CONFIG_FILE`` names. A second
    call replaces the settings of the first.

    Returns None and changes nothing if ``enabled`` is false. Raises ConfigError for an invalid setting, and by name for
    what lazyckpt cannot save: NVMe offload, ZenFlow, node-local storage, and an engine with a ``checkpoint.writer`` or
    ``datastates_ckpt`` of its own.
    """
    return _enable(engine, knobs if enabled is None else {**knobs, "enabled": enabled}, "the code")


def _enable(engine: DeepSpeedEngine, given: Mapping[str, Any], source: str) -> LazyCheckpointEngine | None:
    gathered = settings.gather(None, given, _RETENTION, source)
    before = engine.checkpoint_engine
    if not gathered.pop("enabled", True):
        if isinstance(before, LazyCheckpointEngine):
            engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
            before.cleanup()
        return None
    if "writers" in gathered:
        raise lazyckpt.ConfigError(f"writers={gathered['writers']!r}: under DeepSpeed each rank writes its own files")
    if (why := unsupported(engine)) is not None:
        raise lazyckpt.ConfigError(f"lazyckpt cannot save this DeepSpeed engine: {why}")
    if isinstance(before, LazyCheckpointEngine):
        before.cleanup()
    engine.checkpoint_engine = ours = LazyCheckpointEngine(engine, **gathered)
    return ours


def unsupported(engine: DeepSpeedEngine) -> str | None:
    """Returns why lazyckpt cannot save this engine; None if it can."""
    zero = engine._config.zero_config
    offloads = [getattr(zero, name) for name in ("offload_optimizer", "offload_param")]
    if any(offload is not None and str(offload.device).endswith("nvme") for offload in offloads):
        return "DeepSpeed copies what it has offloaded to NVMe past its checkpoint engine; offload to the CPU"
    if getattr(engine, "zenflow", False):
        return "ZenFlow's optimizer also writes outside of step(), while training goes on"
    if engine.use_node_local_storage():
        return "use_node_local_storage gives each node a folder of its own, and all ranks commit one together"
    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine | LazyCheckpointEngine):
        return f"the config asks for another checkpoint engine ({type(engine.checkpoint_engine).__name__})"
    return None


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
        """Begins a checkpoint, or the file of ``save_16bit_model``."""
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
            keep_others=False,  # files of another world size, for example
            latest=Path(info.save_dir, "latest") if info.save_latest else None,
            wait=False,
        ) as staged:
            deepspeed_host.add(files, self._failure, staged, target)
            self.last_save = staged.save(blocking=deepspeed_host.may_be_rotated(target))
        return done

    def _lost_rank(self) -> lazyckpt.RankError | None:
        """The error of the rank whose loss explains that a collective of DeepSpeed's has failed."""
        if self._info is None or self.last_save is None:  # the ranks have not met yet
            return None
        return self._saver.lost_rank(Path(self._info.save_dir, self._info.tag))

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
        return read(found)

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


_all = False  # engines without the key are enabled, too


def enable_all() -> None:
    """Enables every engine that is made from now on (lazyckpt/run.py). Warns of one that lazyckpt cannot save."""
    global _all
    _all = True


def _ours(engine: DeepSpeedEngine, *_: Any) -> LazyCheckpointEngine | None:
    found = engine.checkpoint_engine
    return found if isinstance(found, LazyCheckpointEngine) else None


def _settings_in(engine: DeepSpeedEngine, *_: Any) -> dict[str, Any] | None:
    """The settings in the JSON; None for an engine that is not to be enabled."""
    if deepspeed_host.joining:
        return {}
    found = engine._config._param_dict.get(KEY, {} if _all else None)
    if isinstance(found, bool):
        return {"enabled": found}
    if not isinstance(found, dict | None):
        raise lazyckpt.ConfigError(f'"{KEY}" in the DeepSpeed config: expected an object of settings, not {found!r}')
    return found


@wrap(DeepSpeedEngine, "_configure_checkpointing", _settings_in)
def _configure(found: dict[str, Any], original: Callable[[], None], engine: DeepSpeedEngine) -> None:
    original()
    if deepspeed_host.joining:
        deepspeed_host.joining[-1](engine)
        return
    why = unsupported(engine)
    if _all and why is not None and KEY not in engine._config._param_dict:
        warn(f"lazyckpt leaves save_checkpoint to DeepSpeed: {why}")
    else:
        _enable(engine, found, f'"{KEY}" in the DeepSpeed config')


@wrap(DeepSpeedEngine, "save_checkpoint", _ours)
def _save(ours: LazyCheckpointEngine, original: Any, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    return ours.save_checkpoint(lambda: original(*args, **kwargs))


@wrap(DeepSpeedEngine, "load_checkpoint", _ours)
def _load(
    ours: LazyCheckpointEngine,
    original: Any,
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if engine.load_universal_checkpoint():
        ours.wait()
        return original(load_dir, tag, *args, **kwargs)
    return ours.load_checkpoint(lambda found: original(load_dir, found, *args, **kwargs), load_dir, tag)


@wrap(DeepSpeedEngine, "_copy_recovery_script", _ours)
def _copy_script(ours: LazyCheckpointEngine, original: Any, engine: DeepSpeedEngine, save_path: str) -> None:
    ours.copy_recovery_script(lambda: original(save_path))


@wrap(DeepSpeedEngine, "_save_moe_checkpoint", _ours)
def _save_experts(ours: LazyCheckpointEngine, original: Any, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    with deepspeed_state.parameters_not_cloned(engine):
        return original(*args, **kwargs)


def _wait_captured(
    ours: LazyCheckpointEngine, original: Any, engine: DeepSpeedEngine, *args: Any, **kwargs: Any
) -> Any:
    """Tensors are about to move."""
    lazyckpt.wait_captured()
    return original(*args, **kwargs)


wrap(DeepSpeedEngine, "offload_states", _ours)(_wait_captured)
wrap(DeepSpeedEngine, "reload_states", _ours)(_wait_captured)
