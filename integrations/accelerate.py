"""Hugging Face Accelerate: ``save_state()`` returns in milliseconds, and its folder appears when it is durable.

Accelerate's own ``save_state`` still decides what to save, and runs the hooks, but in a temporary folder. lazyckpt
lazily saves the objects that pass through ``accelerate.checkpointing.save`` (models, optimizers, schedulers, samplers,
registered objects), and the files that hooks write with safetensors. Accelerate writes the small rest at once (scaler,
loader and random states, other files of hooks). The folder gets its name when all of it is durable; ``load_state``
needs no lazyckpt.

Under FSDP2 every rank saves its shards of model and optimizer (fsdp2.py) into that folder; otherwise the main process
saves.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lazyckpt
from lazyckpt import settings
from lazyckpt.config import Settings, spells_out
from lazyckpt.gate import hooks
from lazyckpt.integrations import StartsAnew, announce, close_and_warn
from lazyckpt.integrations.redirect import safetensors_into
from lazyckpt.storage import folders, hidden, in_place, removal, unfinished
from lazyckpt.warn import warn

try:
    import accelerate.accelerator
    from accelerate import Accelerator, checkpointing
    from accelerate.commands.config import config_args
    from accelerate.utils import DistributedType, clean_state_dict_for_safetensors

    from lazyckpt.integrations.fsdp2 import shards_into

    if tuple(map(int, accelerate.__version__.split(".")[:2])) < (1, 9):
        raise ImportError(f"there is accelerate {accelerate.__version__}")
except ImportError as error:
    raise ImportError(
        f"lazyckpt needs accelerate 1.9 or newer: pip install 'lazyckpt[accelerate]' ({error})"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP")
_METHODS = ("prepare", "save_state", "load_state", "end_training", "free_memory")
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")

_alive: weakref.WeakSet[StateSaver] = weakref.WeakSet()
os.register_at_fork(after_in_child=_alive.clear)  # the parent waits for its saves


@spells_out(Settings)
def enable(accelerator: Accelerator, *, enabled: bool | None = None, **knobs: Unpack[Settings]) -> StateSaver | None:
    """Make ``save_state`` of this Accelerator lazy and durable. Every rank must call it.

    Keyword arguments are ``enabled`` and the fields of ``Config``, except retention, which is ``total_limit`` of
    accelerate's ProjectConfiguration. They override ``LAZYCKPT_*`` variables, and these override ``lazyckpt.yaml``
    beside accelerate's ``default_config.yaml``. A second call replaces the settings of the first.

    Returns None and changes nothing if ``enabled`` is false and, with a warning, where accelerate writes sharded
    checkpoints by itself (FSDP 1, DeepSpeed, Megatron-LM, XLA) or one on each node. Raises ConfigError for an invalid
    setting.
    """
    code = knobs if enabled is None else {**knobs, "enabled": enabled}
    gathered = settings.gather(default_settings_file(), code)
    before = getattr(accelerator.save_state, "__self__", None)
    if isinstance(before, StateSaver):
        before.close()
    if not gathered.pop("enabled", True):
        return None
    if reason := _unsupported(accelerator):
        warn(f"lazyckpt leaves save_state to accelerate: {reason}")
        return None
    return StateSaver(accelerator, **gathered)


def default_settings_file() -> Path:
    """Returns the settings file beside accelerate's own; ``LAZYCKPT_CONFIG_FILE`` names another."""
    return Path(config_args.cache_dir) / "lazyckpt.yaml"


def _unsupported(accelerator: Accelerator) -> str | None:
    kind = DistributedType(accelerator.distributed_type).value
    if kind in _SHARDED and not accelerator.is_fsdp2:
        return f"{kind} writes its checkpoints by itself"
    if accelerator.project_configuration.save_on_each_node and _on_several_nodes(accelerator):
        return "save_on_each_node is set"
    return None


def _on_several_nodes(accelerator: Accelerator) -> bool:
    ranks = int(accelerator.num_processes)
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks


class StateSaver(StartsAnew):
    """Replaces ``save_state``, ``load_state``, ``end_training`` and ``free_memory`` of one Accelerator; see ``enable``.

    The main process saves; under FSDP2 every rank does. All ranks take part in every ``save_state`` and ``load_state``:
    all raise the failure of one, and those that wait for a dead rank raise too. Only the votes of FSDP2's ranks travel
    in the background.

    An Accelerator that is pickled comes back enabled, with the same settings. Its threads and its group start at its
    first ``save_state``; every rank must unpickle one.
    """

    last_save: lazyckpt.SaveHandle | None
    """The handle of the last ``save_state``; None on ranks that do not save."""

    @spells_out(Settings)
    def __init__(self, accelerator: Accelerator, **knobs: Unpack[Settings]) -> None:
        self._accelerator = accelerator
        self._knobs = knobs
        # Not the Accelerator's bound methods: unpickled, these would be our own.
        self._replaced = {name: vars(accelerator)[name] for name in _METHODS if name in vars(accelerator)}
        self._start_anew()
        self._open_saver()  # now, since a setting may be wrong
        self._sweep()
        self._open_group()
        for name in _METHODS:
            setattr(accelerator, name, getattr(self, name))
        self._expect()

    def _start_anew(self) -> None:
        hooks.install()  # only optimizers that were seen to step are copied lazily
        self._saver: lazyckpt.Saver | None = None
        self._at_the_end: Any = None  # closes _saver
        self._group: Any = None
        self.last_save = None
        _alive.add(self)

    def _expect(self) -> None:
        if self._saver is not None:
            accelerator = self._accelerator
            announce(self._saver, lambda: [*accelerator._models, *accelerator._optimizers])

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> StateSaver:
        return self  # as the copy of an Accelerator is that Accelerator

    __copy__ = __deepcopy__

    def _own(self, name: str) -> Any:
        """Returns the method that the Accelerator had before."""
        return self._replaced.get(name) or functools.partial(getattr(type(self._accelerator), name), self._accelerator)

    def _open_saver(self) -> lazyckpt.Saver | None:
        """Returns the Saver of a rank that saves; None on the others."""
        if self._saver is None and (self._accelerator.is_main_process or self._accelerator.is_fsdp2):
            self._saver = lazyckpt.Saver(**self._knobs)
            # For a script that does not call end_training().
            self._at_the_end = weakref.finalize(self._accelerator, close_and_warn, self._saver)
        return self._saver

    def _sweep(self) -> None:
        """Removes the remains of dead runs from places where a script looks for the newest folder, before it looks."""
        if self._accelerator.is_main_process:
            for folder in {Path.cwd(), Path(self._accelerator.project_dir or ".").absolute()}:
                with contextlib.suppress(OSError):  # a save will raise it
                    removal.sweep(folder)

    def _close_saver(self) -> None:
        if self._saver is not None:
            self._at_the_end.detach()  # it would keep the model alive
            self._saver.close()

    def _open_group(self) -> Any:
        """Returns the group of all ranks, if there are several. All must call it."""
        if self._group is None and self._accelerator.num_processes > 1:
            # Gloo, since it needs no GPU; and a group of its own, so that it meets no collective of the training.
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group

    # of the Accelerator

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """``accelerate.Accelerator.prepare``. Saves hold the prepared objects."""
        prepared = self._own("prepare")(*args, **kwargs)
        self._open_saver()
        self._expect()
        return prepared

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Path:
        """``accelerate.Accelerator.save_state``, but returns when the state is captured or guarded.

        The folder appears when it is durable; before this returns, if no optimizer has stepped since the last save.
        Other files in an existing folder of that name stay. Also raises, on every rank, the SaveError of an earlier
        save that failed in the background.
        """
        target = self._target(output_dir)
        with contextlib.ExitStack() as unless_saved:
            staged = None
            with self._on_all_ranks(target):
                saver = self._open_saver()
                if saver is not None:
                    saver.check()  # raise an earlier failure before anything is written
                    self._check_new(target, saver)
            with self._on_all_ranks(target):  # not above: ranks that stage together wait for each other
                if saver is not None:
                    staged = unless_saved.enter_context(self._stage(target, saver))
            folder = Path(self._from_main(str(staged.path) if staged is not None else ""))
            with self._on_all_ranks(target):
                if not os.path.isdir(folder):
                    raise lazyckpt.SaveError(f"{folder} of the main process is not seen here", path=target)
                self._write(folder, staged, safe_serialization, **kwargs)
                if staged is None and _on_several_nodes(self._accelerator):
                    _sync(folder)  # files cached by this node; the main process syncs those of its own node
            with self._on_all_ranks(target):
                if staged is not None and saver is not None:
                    self.last_save = staged.save()
                    if self._accelerator.is_main_process:
                        self._prune(target, saver)
                    if not self.last_save.in_training:
                        self.wait()
        return target

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """``accelerate.Accelerator.load_state``, after all saves of this process's Accelerators are durable.

        First finishes the publication of ``input_dir`` if a crash cut it off; raises LoadError if that fails, and for
        the temporary name of a checkpoint. Raises the SaveError of a failed save that was not raised before; a second
        call then loads the folder.
        """
        with self._on_all_ranks(Path(self._accelerator.project_dir or ".")):
            for saver in {*_alive, self}:
                saver.wait()
            if input_dir is not None:
                unfinished.refuse(Path(input_dir).expanduser())
            if self._accelerator.is_main_process and input_dir is not None:
                _finish(Path(input_dir).expanduser())
        lazyckpt.wait_captured()  # other Savers may still be copying tensors that this overwrites
        self._own("load_state")(input_dir, *args, **kwargs)

    def end_training(self) -> None:
        """``accelerate.Accelerator.end_training``, after everything is durable. The main process raises SaveError."""
        try:
            self.wait()
        finally:
            self._own("end_training")()

    def free_memory(self, *objects: Any) -> Any:
        """``accelerate.Accelerator.free_memory``, after everything is durable; also frees lazyckpt's memory.

        Raises the SaveError of a failed save.
        """
        try:
            self._close_saver()
        finally:
            self._saver = None  # the next save_state opens another
            objects = self._own("free_memory")(*objects)
        return objects

    # of a Saver

    def pending(self) -> list[lazyckpt.SaveHandle]:
        """Returns the saves that are not durable yet, oldest first; none on ranks that do not save."""
        return self._saver.pending() if self._saver is not None else []

    def wait(self, path: str | os.PathLike[str] | None = None) -> None:
        """Waits until nothing is pending, or nothing under ``path``; returns at once on ranks that do not save.

        Raises the first SaveError that was not raised yet.
        """
        if self._saver is not None:
            self._saver.wait(path)

    def close(self) -> None:
        """Waits until everything is durable, and restores the Accelerator's own methods. Raises like ``wait``."""
        for name in _METHODS:
            vars(self._accelerator).pop(name, None)
        vars(self._accelerator).update(self._replaced)
        self._close_saver()

    # the steps of save_state

    def _target(self, output_dir: str | os.PathLike[str] | None) -> Path:
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            return Path(project.project_dir) / "checkpoints" / f"checkpoint_{project.iteration}"
        if output_dir is None:
            raise lazyckpt.ConfigError("save_state: give an output_dir, or use automatic_checkpoint_naming")
        return Path(output_dir)

    def _check_new(self, target: Path, saver: lazyckpt.Saver) -> None:
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming and os.path.exists(target):
            saver.wait()  # total_limit may be about to remove it; accelerate removes at once
            if os.path.exists(target):
                what = "exists already; set accelerator.project_configuration.iteration to what comes after it"
                raise ValueError(f"{target} {what}")

    def _stage(self, target: Path, saver: lazyckpt.Saver) -> lazyckpt.StagedFolder:
        for model in self._accelerator._models:
            saver.watch(model)
        # Not in checkpoints/: load_state() takes the highest number there, and fails on a name without one.
        root, parent = Path(self._accelerator.project_dir or target.parent).resolve(), target.parent.resolve()
        inside = hidden.place(root if root in parent.parents else parent)
        return saver.stage(target.absolute(), inside=inside, all_ranks=self._accelerator.is_fsdp2)

    def _write(self, folder: Path, staged: lazyckpt.StagedFolder | None, *args: Any, **kwargs: Any) -> None:
        """Makes accelerate save into ``folder``."""
        main, sharded = (
            staged if which else None for which in (self._accelerator.is_main_process, self._accelerator.is_fsdp2)
        )
        accelerates_own = checkpointing.save
        hooks = self._accelerator._save_model_state_pre_hook.values()
        namespaces = [hook.__globals__ for hook in hooks if hasattr(hook, "__globals__")]

        def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
            if not Path(f).is_relative_to(folder):
                accelerates_own(obj, f, save_on_each_node=save_on_each_node, safe_serialization=safe_serialization)
            elif redirected is not None:
                obj = clean_state_dict_for_safetensors(obj) if safe_serialization else obj
                redirected.add(str(Path(f).relative_to(folder)), obj, {"format": "pt"} if safe_serialization else None)

        project = self._accelerator.project_configuration
        automatic = project.automatic_checkpoint_naming
        project.automatic_checkpoint_naming = False  # or it would choose the folder
        checkpointing.save = save
        try:
            with (
                shards_into(sharded, folder, accelerate.accelerator),
                safetensors_into(main, folder, *namespaces) as redirected,
            ):
                self._own("save_state")(str(folder), *args, **kwargs)
        finally:
            checkpointing.save = accelerates_own
            project.automatic_checkpoint_naming = automatic

    def _prune(self, target: Path, saver: lazyckpt.Saver) -> None:
        """Removes the lowest numbers above ``total_limit``, once the new checkpoint is durable."""
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming or project.total_limit is None:
            return
        folder = target.parent
        names = {entry.name for entry in folder.iterdir()} | {h.path.name for h in saver.pending()}
        old = sorted((int(m[1]), name) for name in names - {target.name} if (m := _CHECKPOINT.fullmatch(name)))
        for _, name in old[: max(len(old) + 1 - max(project.total_limit, 1), 0)]:
            saver.remove(folder / name)

    # between the ranks

    @contextlib.contextmanager
    def _on_all_ranks(self, path: Path) -> Iterator[None]:
        """A context that ends on all ranks together, and raises on all if it failed on one."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        group = self._open_group()
        told: list[Any] = [None] * self._accelerator.num_processes
        if group is not None:
            what = f"{type(failure).__name__}: {failure}" if failure is not None else None
            torch.distributed.all_gather_object(told, what, group=group)
        if failure is not None:
            raise failure
        for rank, what in enumerate(told):
            if what is not None:
                if self._accelerator.is_fsdp2:
                    self.wait()  # usually raises: a save fails on all ranks, but they learn of it one by one
                raise lazyckpt.SaveError(f"rank {rank}: {what}", path=path)

    def _from_main(self, value: str) -> str:
        values = [value]
        group = self._open_group()
        if group is not None:
            torch.distributed.broadcast_object_list(values, src=0, group=group)
        return values[0]


def _finish(folder: Path) -> None:
    try:
        os.scandir(os.path.join(folder, ".")).close()  # the dot takes the permission to open files of the folder
    except (FileNotFoundError, NotADirectoryError):
        return  # accelerate says so
    except OSError as error:
        what = f"cannot be read: {error.strerror} ({error.errno})"
        raise lazyckpt.ReadError(what, path=folder, errno=error.errno or 0) from error
    try:
        in_place.finish(folder)
    except OSError as error:
        what = f"the publication of a checkpoint was cut off, and cannot be finished: {error}"
        raise lazyckpt.LoadError(what, path=folder) from error


def _sync(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in (*names, ""):
            with contextlib.suppress(FileNotFoundError):  # other ranks are at work here, too
                folders.sync_path(Path(parent, name))
