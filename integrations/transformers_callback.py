"""``LazyCheckpointCallback``: saves the checkpoints of one Trainer, and waits for them where training must wait.

transformers.py wraps the methods of the Trainer that call ``save``, ``wait`` and ``close``.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers.trainer
from accelerate.utils import broadcast_object_list, gather_object
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

import lazyckpt
from lazyckpt import settings
from lazyckpt.config import Settings, check_writers, spells_out
from lazyckpt.integrations import StartsAnew, announce
from lazyckpt.integrations.deepspeed_host import Host
from lazyckpt.integrations.fsdp2 import is_sharded, shards_into
from lazyckpt.integrations.loads import loading_together
from lazyckpt.integrations.replicas import write_together
from lazyckpt.integrations.transformers_mirrors import fetched
from lazyckpt.integrations.transformers_on_save import sync_written, who_needs_files
from lazyckpt.integrations.transformers_save import Save
from lazyckpt.integrations.transformers_staging import (
    add_replicas,
    is_just_in_time,
    is_supported,
    staging_folder,
    tidy,
    writing_into,
)
from lazyckpt.stores.urls import is_url
from lazyckpt.warn import warn, warn_once

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LazyCheckpointCallback(StartsAnew, TrainerCallback):
    """Makes its Trainer save lazily.

    Keyword arguments are the fields of ``Config``, except ``keep_last`` and ``keep_every``: retention is
    ``TrainingArguments.save_total_limit``. Raises ConfigError for an invalid one.

    ``writers`` is for DistributedDataParallel, and chooses the ranks that write weights and optimizer together, as that
    of a Checkpointer does: "all", one of each "node", so many, or "auto". None and "rank0": rank 0 writes alone.

    With DeepSpeed, these arguments are used, and not those under "lazyckpt" in its JSON. Raises ConfigError if
    lazyckpt cannot save the engine that ``train()`` makes.

    A checkpoint that fails in the background raises its SaveError when the next one is saved, or at the end of
    ``train()``; with ``on_error="warn"`` it is a warning. The Trainer's loggers (``report_to``, ``on_log``) get, with
    the next training loss, ``checkpoint/step``, ``checkpoint/blocked_ms`` (how long training waited for it) and
    ``checkpoint/durable_s`` (from the beginning of the save until it was durable).

    With ``mirrors``, the folders go there, too (docs/mirrors.md), and ``resume_from_checkpoint=True`` takes the newest
    checkpoint of ``output_dir`` and of all mirrors. It may also be a URL.

    ``on_save`` of other callbacks runs at its time, on every process. Before it the Trainer waits until the checkpoint
    is durable, unless every callback with an ``on_save`` of its own has ``needs_checkpoint_files = False``.
    """

    @spells_out(Settings)
    def __init__(
        self, *, writers: Literal["auto", "all", "node", "rank0"] | int | None = None, **knobs: Unpack[Settings]
    ) -> None:
        check_writers(writers)
        self._writers = None if writers == "rank0" else writers
        self._config = settings.config_of(type(self), knobs, "the Trainer counts its checkpoints; use save_total_limit")
        self._knobs = knobs
        self._start_anew()

    def _start_anew(self) -> None:
        self.newest: lazyckpt.SaveHandle | None = None  # of the save that began last
        self._saver: lazyckpt.Saver | None = None
        self._saves: list[Save] = []  # not announced yet, oldest first
        self._saving: Trainer | None = None
        self._host: Host | None = None  # of DeepSpeed's engines
        self._inside: Path | None = None  # where folders are staged
        self._metrics: dict[str, float] = {}  # not logged yet
        self._written: str | None = None  # the folder that callbacks may have written into
        self._failed_step: int | None = None  # of the save that on_save would follow
        self._awaited: lazyckpt.SaveHandle | None = None  # of the folder that callbacks may write into
        self._resumed_from: str | None = None  # not told to the Saver yet

    # What the Trainer calls

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **objects: Any) -> None:
        sharded = is_sharded(objects["model"])
        if sharded and self._writers is not None:
            raise lazyckpt.ConfigError(
                f"writers={self._writers!r} is for DistributedDataParallel; under FSDP2 each rank writes its shards"
            )
        if args.should_save or sharded or (self._writers is not None and args.world_size > 1):
            saver = self._open(objects["model"])  # now: it has to see the optimizer's steps
            # An engine of DeepSpeed has announced its own.
            if args.save_strategy != SaveStrategy.NO and not args.save_only_model and self._host is None:
                announce(saver, lambda: [objects["model"], objects["optimizer"]])
        if args.should_save:
            tidy(staging_folder(args))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._sync_written()
        self._announce()

    # What the wrapped methods call

    def save(self, trainer: Any, trial: Any, write: Callable[[], None]) -> None:
        """Calls ``write``, a ``_save_checkpoint``, with a staged folder, and saves that folder."""
        if self._saving is trainer or not is_supported(trainer):
            write()
            return
        begin = time.perf_counter()
        self._failed_step = None
        self._sync_written()
        self._announce()
        state = trainer.state
        target = os.path.join(trainer._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        together = self._writers is not None and trainer.args.world_size > 1 and not sharded
        on_all = sharded or together
        with self._on_all_ranks(target, on_all):
            if self._saver is not None:
                self._saver.check()  # raises an earlier failure before any work
        trainer.accelerator.wait_for_everyone()  # every rank has made its sentinel
        blocking = False
        if trainer.args.should_save:
            blocking = is_just_in_time(Path(target))
            self._inside = staging_folder(trainer.args)
        if on_all:
            (blocking,) = broadcast_object_list([blocking])
        with contextlib.ExitStack() as stack:
            staged = None
            with self._on_all_ranks(target, on_all):
                if trainer.args.should_save or on_all:
                    staging = self._open(trainer.model).stage(
                        Path(target).absolute(),
                        inside=staging_folder(trainer.args),
                        step=state.global_step,
                        all_ranks=on_all,
                        writers=self._writers if together else None,
                    )
                    staged = stack.enter_context(staging)
            handed_over = self._write(trainer, staged, target, write)
            if together and staged is not None:
                with self._on_all_ranks(target, True):
                    if not trainer.args.should_save:
                        add_replicas(trainer, staged)
                write_together(staged, gather_object([staged.names]))
            handle = None
            with self._on_all_ranks(target, True):
                if staged is not None:
                    if handed_over is not None:
                        handed_over.add_to(staged)
                    # The mirrors get what callbacks add, too.
                    handle = self.newest = staged.save(blocking=blocking, hold_back=True)
        blocked_s = time.perf_counter() - begin
        if trainer.args.should_save and handle is not None:
            self._saves.append(Save(trainer, copy.copy(state), target, handle, blocked_s))
        if blocking:
            self._announce()
        if names := gather_object(who_needs_files(trainer.callback_handler, trainer.args)):
            self._await_folder(trainer, target, handle, names)

    def engines(self, trainer: Trainer) -> contextlib.AbstractContextManager[None]:
        """A context in which DeepSpeed's engines of ``trainer``, if it has or makes some, add their files to its
        folders. Raises ConfigError as ``deepspeed.enable`` does."""
        if not trainer.is_deepspeed_enabled or not is_supported(trainer):
            return contextlib.nullcontext()
        from lazyckpt.integrations import deepspeed_trainer  # here, since it imports DeepSpeed

        deepspeed_trainer.check_writers(self._writers)
        self._host = Host(lambda: self._open(trainer.model), lambda: self._saver)
        return deepspeed_trainer.joined(self._host, [trainer.model_wrapped])

    def fetched(self, trainer: Trainer, resume: Any) -> Any:
        """The ``resume_from_checkpoint`` to use, which may have been copied from a mirror first. Every rank calls it.
        Raises LoadError."""
        if is_url(resume) or (resume is True and self._config.mirrors):
            places = resume if is_url(resume) else self._config.mirrors
            return fetched(trainer.args, places, self._on_all_ranks)
        return resume

    def resumed(self, path: str) -> None:
        """Notes that training goes on from this folder."""
        self._resumed_from = path

    def loading(self, trainer: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which ``torch.load`` loads large files with lazyckpt, if all ranks load the same ones."""
        if not is_supported(trainer) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return contextlib.nullcontext()
        return loading_together(torch, self._config.rank_timeout_s)

    def wait(self) -> None:
        """Waits until every checkpoint is durable and announced. Raises the first SaveError that was not raised yet."""
        if self._saver is not None:
            try:
                self._saver.wait()
            finally:
                self._announce()

    def close(self) -> None:
        """Waits, also for removals, and stops the threads. The next save starts new ones."""
        if self._saver is None:
            return
        try:
            with self._saver:
                self._sync_written()
                self.wait()
        finally:
            self._saver = None
            self._saves.clear()
            if self._inside is not None:
                tidy(self._inside)

    # The parts

    def _await_folder(self, trainer: Any, target: str, handle: lazyckpt.SaveHandle | None, names: list[str]) -> None:
        """Waits until a checkpoint is durable, and pushed, and the replaced one is removed."""
        if trainer.args.should_save:
            methods = ", ".join(dict.fromkeys(names))
            warn_once(
                f"training waits until each checkpoint is durable, since {methods} may read or write its files. If it "
                "does not, set needs_checkpoint_files = False in that class, and saves overlap with training"
            )
        self._awaited = handle
        with self._on_all_ranks(target, True):
            self.wait()
            if self._saver is not None:
                self._saver.wait()  # for the removals that were announced
        # Not handle.exception(), which would mark the error as reported.
        failed = handle is not None and Future.exception(handle) is not None
        (failed,) = broadcast_object_list([failed])
        if failed:
            self._failed_step = trainer.state.global_step
        else:
            self._written = target

    def _sync_written(self) -> None:
        folder, self._written = self._written, None
        awaited, self._awaited = self._awaited, None
        if awaited is not None and self._saver is not None:
            self._saver.mirror(awaited)
        if folder is None:
            return
        try:
            sync_written(folder)
        except OSError as error:
            what = f"what a callback wrote in on_save is not durable: {error.strerror} ({error.errno})"
            failure = lazyckpt.SaveError(what, path=folder)
            if self._saver is None or self._saver.config.on_error == "raise":
                raise failure from error
            warn(str(failure))

    @contextlib.contextmanager
    def _on_all_ranks(self, target: str, sharded: bool) -> Iterator[None]:
        """A context that raises on all ranks if it fails on one, and they save together."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if sharded and any(gather_object([failure is not None])) and failure is None:
            if self._saver is not None:
                self._saver.wait()  # usually raises: a save fails on all ranks, but they learn of it one by one
            raise lazyckpt.SaveError("another rank says why", path=target)
        if failure is not None:
            raise failure

    def _open(self, model: Any) -> lazyckpt.Saver:
        if self._saver is None:
            self._saver = lazyckpt.Saver(**self._knobs)
        if self._resumed_from is not None:
            path, self._resumed_from = self._resumed_from, None
            step = path.rpartition("-")[2]
            self._saver.resumed(path, int(step) if step.isdecimal() else None)
        self._saver.watch(model)
        return self._saver

    def _write(self, trainer: Any, staged: lazyckpt.StagedFolder | None, target: str, write: Callable[[], None]) -> Any:
        """Redirects ``write`` into the staged folder, which rank 0 has, and under FSDP2 and DeepSpeed every rank.
        Returns what DeepSpeed has handed over (deepspeed_host.py), or None."""
        state = trainer.state
        main, sharded = (staged if which else None for which in (trainer.args.should_save, trainer.is_fsdp_enabled))
        (folder,) = broadcast_object_list([staged and str(staged.path)])
        written = os.path.join(folder, os.path.basename(target))
        # _save_checkpoint would do this if it did not look in the staged folder.
        best = os.path.join(os.path.dirname(target), f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if os.path.isdir(best):
            state.best_model_checkpoint = best
        self._saving = trainer
        try:
            # A rank that does not see the folder is on another node: its files stay there.
            with (
                writing_into(folder, main, trainer) if os.path.isdir(folder) else contextlib.nullcontext(),
                shards_into(sharded, written, transformers.trainer),
                self._host.collecting(written) if self._host is not None else contextlib.nullcontext() as handed_over,
            ):
                write()
        finally:
            self._saving = None
        trainer.accelerator.wait_for_everyone()  # every rank has written its part
        if main is not None:
            if state.best_model_checkpoint == written:
                state.best_model_checkpoint = target
                state.save_to_json(os.path.join(written, TRAINER_STATE_NAME))
            for entry in list(Path(written).iterdir()):
                entry.rename(main.path / entry.name)
            os.rmdir(written)
        # Only rank 0 knows of pending folders, and all ranks will load the best one.
        (state.best_model_checkpoint,) = broadcast_object_list([state.best_model_checkpoint])
        return handed_over

    def _announce(self) -> None:
        """Announces the checkpoints that have become durable."""
        while self._saves and self._saves[0].handle.done():
            save = self._saves.pop(0)
            # Not handle.exception(), which would mark the error as reported.
            if Future.exception(save.handle) is None:
                self._metrics = save.metrics()
                save.push()
                if self._saver is not None:
                    self._saver.keep_mirrored(save.best())
                    if save.handle is not self._awaited:
                        self._saver.mirror(save.handle)
                    for old in save.outdated(self._saves):
                        self._saver.remove(old)
