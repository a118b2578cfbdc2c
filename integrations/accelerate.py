"""Hugging Face Accelerate: ``save_state()`` returns in milliseconds, and its folder appears when it is durable.

Accelerate's own ``save_state`` still decides what to save, and runs the hooks, but in a temporary folder. lazyckpt
lazily saves the objects that pass through ``accelerate.checkpointing.save`` (models, optimizers, schedulers, samplers,
registered objects), and the files that hooks write with safetensors. Accelerate writes the small rest at once (scaler,
loader and random states, other files of hooks). The folder gets its name when all of it is durable; ``load_state``
needs no lazyckpt.

Under FSDP2 and DeepSpeed every rank saves its shards of model and optimizer (fsdp2.py, deepspeed_host.py) into that
folder. Otherwise the main process saves, or, with ``writers``, all ranks write its large files together (replicas.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

import lazyckpt
from lazyckpt import private_names, settings
from lazyckpt.config import Settings, check_writers, spells_out
from lazyckpt.gate import hooks
from lazyckpt.integrations import StartsAnew, announce, close_and_warn
from lazyckpt.storage import removal, unfinished
from lazyckpt.warn import warn

with private_names.needed("accelerate"):
    import accelerate.checkpointing
    from accelerate import Accelerator
    from accelerate.commands.config import config_args
    from accelerate.utils import gather_object

    from lazyckpt.integrations import accelerate_folder
    from lazyckpt.integrations.accelerate_ranks import (
        engines_joined,
        engines_left,
        is_sharded,
        on_several_nodes,
        unsupported,
    )
    from lazyckpt.integrations.deepspeed_host import Host
    from lazyckpt.integrations.loads import loading_together
    from lazyckpt.integrations.replicas import check_same, write_together

    if tuple(map(int, accelerate.__version__.split(".")[:2])) < (1, 9):
        raise ImportError("it loses its place in the data")

if TYPE_CHECKING:
    from typing_extensions import Unpack

_RETENTION = "Accelerate counts its checkpoints; use total_limit"
_METHODS = ("prepare", "save_state", "load_state", "end_training", "free_memory")

_alive: weakref.WeakSet[StateSaver] = weakref.WeakSet()
os.register_at_fork(after_in_child=_alive.clear)  # the parent waits for its saves


@spells_out(Settings)
def enable(
    accelerator: Accelerator,
    *,
    enabled: bool | None = None,
    writers: Literal["auto", "all", "node", "rank0"] | int | None = None,
    **knobs: Unpack[Settings],
) -> StateSaver | None:
    """Make ``save_state`` of this Accelerator lazy and durable. Every rank must call it.

    Keyword arguments are ``enabled``, ``writers`` and the fields of ``Config``, except retention, which is
    ``total_limit`` of accelerate's ProjectConfiguration. They override ``LAZYCKPT_*`` variables, and these override
    ``lazyckpt.yaml`` beside accelerate's ``default_config.yaml``. A second call replaces the settings of the first.

    ``writers`` is for DistributedDataParallel, and chooses the ranks that write the large files of each folder
    together, as that of a Checkpointer does: "all", one of each "node", so many, or "auto". With "rank0", and by
    default, the main process writes alone. All ranks give the same ``enabled`` and ``writers``.

    DeepSpeed's engines have these settings, too, whatever is under "lazyckpt" in its JSON.

    Returns None and changes nothing if ``enabled`` is false and, with a warning, where accelerate writes sharded
    checkpoints by itself (FSDP 1, Megatron-LM, XLA) or one on each node. Raises ConfigError for an invalid setting, if
    the ranks differ, and for a DeepSpeed engine that lazyckpt cannot save, also one that ``prepare`` makes.
    """
    given = {name: value for name, value in (("enabled", enabled), ("writers", writers)) if value is not None}
    gathered = settings.gather(default_settings_file(), knobs | given, _RETENTION)
    is_enabled = gathered.pop("enabled", True)
    why_not = unsupported(accelerator)
    if why_not is None:
        check_same(gather_object([{"enabled": is_enabled, "writers": gathered.get("writers")}]))
    before = getattr(accelerator.save_state, "__self__", None)
    if isinstance(before, StateSaver):
        before.close()
    if not is_enabled:
        return None
    if why_not is not None:
        warn(f"lazyckpt leaves save_state to accelerate: {why_not}")
        return None
    return StateSaver(accelerator, **gathered)


def default_settings_file() -> Path:
    """Returns the settings file beside accelerate's own; ``LAZYCKPT_CONFIG_FILE`` names another."""
    return Path(config_args.cache_dir) / "lazyckpt.yaml"


class StateSaver(StartsAnew):
    """Replaces ``save_state``, ``load_state``, ``end_training`` and ``free_memory`` of one Accelerator; see ``enable``.

    The main process saves; with shards, and with ``writers``, every rank does. All ranks take part in every
    ``save_state`` and ``load_state``: all raise the failure of one, and those that wait for a dead rank raise too. Only
    the votes of ranks that save together travel in the background.

    An Accelerator that is pickled comes back enabled, with the same settings. Its threads and its group start at its
    first ``save_state``; every rank must unpickle one.
    """

    last_save: lazyckpt.SaveHandle | None
    """The handle of the last ``save_state``; None on ranks that do not save."""

    @spells_out(Settings)
    def __init__(
        self, accelerator: Accelerator, *, writers: str | int | None = None, **knobs: Unpack[Settings]
    ) -> None:
        check_writers(writers)
        if writers is not None and is_sharded(accelerator):
            raise lazyckpt.ConfigError(
                f"writers={writers!r} is for DistributedDataParallel, not for FSDP2 or DeepSpeed"
            )
        self._writers = writers if writers != "rank0" and accelerator.num_processes > 1 else None
        self._accelerator = accelerator
        self._knobs = knobs
        # Not the Accelerator's bound methods: unpickled, these would be our own.
        self._replaced = {name: vars(accelerator)[name] for name in _METHODS if name in vars(accelerator)}
        self._start_anew()
        self._open_saver()  # now, since a setting may be wrong
        with engines_joined(accelerator, self._host):
            pass  # those that were prepared before
        self._sweep()
        for name in _METHODS:
            setattr(accelerator, name, getattr(self, name))
        self._expect()

    def _start_anew(self) -> None:
        hooks.install()  # only optimizers that were seen to step are copied lazily
        self._saver: lazyckpt.Saver | None = None
        self._host = Host(cast(Any, self._open_saver), lambda: self._saver)  # every rank has one under DeepSpeed
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
        if self._saver is None and (self._accelerator.is_main_process or self._on_all):
            self._saver = lazyckpt.Saver(**self._knobs)
            # For a script that does not call end_training().
            self._at_the_end = weakref.finalize(self._accelerator, close_and_warn, self._saver)
        return self._saver

    @property
    def _on_all(self) -> bool:
        """Whether every rank saves a part."""
        return is_sharded(self._accelerator) or self._writers is not None

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
        with engines_joined(self._accelerator, self._host):
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
        target = accelerate_folder.target_of(self._accelerator, output_dir)
        with contextlib.ExitStack() as unless_saved:
            staged = None
            with self._on_all_ranks(target):
                saver = self._open_saver()
                if saver is not None:
                    saver.check()  # raise an earlier failure before anything is written
                    accelerate_folder.check_new(self._accelerator, target, saver)
            with self._on_all_ranks(target):  # not above: ranks that stage together wait for each other
                if saver is not None:
                    staging = accelerate_folder.stage(self._accelerator, target, saver, self._writers)
                    staged = unless_saved.enter_context(staging)
            folder = Path(self._from_main(str(staged.path) if staged is not None else ""))
            with self._on_all_ranks(target):
                if not os.path.isdir(folder):
                    raise lazyckpt.SaveError(f"{folder} of the main process is not seen here", path=target)
                save_state = functools.partial(self._own("save_state"), str(folder), safe_serialization, **kwargs)
                with self._host.collecting(folder) as handed_over:
                    accelerate_folder.write(self._accelerator, folder, staged, save_state)
                if staged is None and on_several_nodes(self._accelerator):
                    accelerate_folder.sync(folder)  # the main process syncs the files that its own node has cached
            if self._writers is not None and staged is not None:
                write_together(staged, self._from_all(staged.names))
            with self._on_all_ranks(target):
                if staged is not None and saver is not None:
                    handed_over.add_to(staged)
                    self.last_save = staged.save()
                    if self._accelerator.is_main_process:
                        accelerate_folder.prune(self._accelerator, target, saver)
                    if not self.last_save.in_training:
                        self.wait()
        return target

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """``accelerate.Accelerator.load_state``, after all saves of this process's Accelerators are durable.

        Large files but those of safetensors are verified, and each byte is read by one rank.

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
                accelerate_folder.finish(Path(input_dir).expanduser())
        lazyckpt.wait_captured()  # other Savers may still be copying tensors that this overwrites
        with loading_together(accelerate.checkpointing, self._knobs.get("rank_timeout_s")):
            self._own("load_state")(input_dir, *args, **kwargs)
        if self._saver is not None and (loaded := accelerate_folder.loaded_from(self._accelerator, input_dir)):
            self._saver.resumed(*loaded)

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
        engines_left(self._accelerator, self._host)
        self._close_saver()

    # between the ranks

    @contextlib.contextmanager
    def _on_all_ranks(self, path: Path) -> Iterator[None]:
        """A context that ends on all ranks together, and raises on all if it failed on one."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        told = self._from_all(f"{type(failure).__name__}: {failure}" if failure is not None else None)
        if failure is not None:
            raise failure
        for rank, what in enumerate(told):
            if what is not None:
                if self._on_all:
                    self.wait()  # usually raises: a save fails on all ranks, but they learn of it one by one
                raise lazyckpt.SaveError(f"rank {rank}: {what}", path=path)

    def _from_all(self, value: Any) -> list[Any]:
        values = [value] * self._accelerator.num_processes
        group = self._open_group()
        if group is not None:
            torch.distributed.all_gather_object(values, value, group=group)
        return values

    def _from_main(self, value: str) -> str:
        values = [value]
        group = self._open_group()
        if group is not None:
            torch.distributed.broadcast_object_list(values, src=0, group=group)
        return values[0]
