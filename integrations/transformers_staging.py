"""Stages the files of a Trainer's checkpoint in ``output_dir/_lazyckpt`` until it is durable."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import ParallelMode
from transformers.utils import WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_WEIGHTS_NAME

import lazyckpt
from lazyckpt.integrations.redirect import safetensors_into
from lazyckpt.storage import hidden, removal
from lazyckpt.warn import warn

# Inside output_dir, since it must be on the same file system. Neither resumption nor rotation looks at it, and
# push_to_hub, which uploads output_dir, leaves out what begins with "_".
STAGING = "_lazyckpt"
_RELIABLE_S = 1.0  # times that differ by less say nothing, as in transformers
_JIT_SENTINEL = "checkpoint-is-incomplete.txt"  # of transformers.trainer_jit_checkpoint
_LARGE = {OPTIMIZER_NAME, WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME}  # written by torch.save


def is_supported(trainer: Trainer) -> bool:
    """Whether one process writes the weights and the optimizer, with torch.save and safetensors, or FSDP2 or DeepSpeed
    does."""
    alone = trainer.args.world_size == 1 and trainer.args.parallel_mode is not ParallelMode.TPU
    data_parallel = trainer.args.parallel_mode is ParallelMode.DISTRIBUTED and not trainer.args.save_on_each_node
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        return False
    return (alone or data_parallel) and not trainer.is_fsdp_xla_enabled


def staging_folder(args: TrainingArguments) -> Path:
    return hidden.place(Path(str(args.output_dir)).absolute(), STAGING)


def tidy(inside: Path) -> None:
    """Removes the remains of dead runs in the staging folder, and the folder unless a live run stages in it."""
    for folder in hidden.swept_with(inside):
        try:
            removal.sweep(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            warn(f"what dead runs left in {folder} is not removed: {error}")
    hidden.remove(inside)


def oldest_first(run_dir: str) -> list[str]:
    """Returns the checkpoints in the order in which the Trainer's rotation takes them: by time, or by number where the
    file system has no reliable times."""
    found: list[tuple[float, int, str]] = []
    for path in map(str, Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        number = path.rpartition("-")[2]
        if number.isdecimal() and os.path.isdir(path):
            with contextlib.suppress(FileNotFoundError):  # removed in the background meanwhile
                found.append((os.path.getmtime(path), int(number), path))
    found.sort()
    if found and found[-1][0] - found[0][0] < _RELIABLE_S:
        found.sort(key=lambda entry: entry[1])
    return [path for _, _, path in found]


# While a checkpoint is written


@contextlib.contextmanager
def writing_into(folder: str, staged: lazyckpt.StagedFolder | None, trainer: Trainer) -> Iterator[None]:
    """A context in which the Trainer writes ``folder/checkpoint-N`` instead of ``output_dir/checkpoint-N``, and large
    objects go to ``staged``."""
    root = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
    torch_save = torch.save

    def stage_object(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        name = redirected.name(f) if redirected is not None else None
        if redirected is None or name is None or os.path.basename(name) not in _LARGE:
            torch_save(obj, f, *args, **kwargs)
        else:
            redirected.add(name, obj)

    with contextlib.ExitStack() as stack:
        redirected = stack.enter_context(safetensors_into(staged, root))
        stack.enter_context(attribute(trainer, "_get_output_dir", lambda trial: folder))
        # There is nothing to push yet, and in the staged folder nothing to rotate.
        stack.enter_context(attribute(trainer, "_push_from_checkpoint", lambda checkpoint_folder: None))
        stack.enter_context(attribute(torch, "save", stage_object))
        if trainer.is_deepspeed_enabled:
            # On a rank that does not save, no one reads them.
            lend = redirected.lend if redirected is not None else torch.Tensor.detach
            stack.enter_context(_weights_lent(trainer, lend))
        yield


@contextlib.contextmanager
def _weights_lent(trainer: Trainer, lend: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A context in which ``save_model`` writes the weights of DeepSpeed's engine, and no clones. A Trainer with a
    ``save_model`` or ``_save`` of its own, which may write to its argument, still gets clones."""
    from lazyckpt.integrations import deepspeed_state  # here, since it imports DeepSpeed

    save_model = trainer.save_model

    def with_weights(*args: Any, **kwargs: Any) -> None:
        with deepspeed_state.weights_lent(lend):
            save_model(*args, **kwargs)

    methods = ((save_model, Trainer.save_model), (trainer._save, Trainer._save))
    if all(getattr(method, "__func__", None) is own for method, own in methods):
        with attribute(trainer, "save_model", with_weights):
            yield
    else:
        yield


def add_replicas(trainer: Trainer, staged: lazyckpt.StagedFolder) -> None:
    """Adds to ``staged``, on a rank that does not save, the large files that rank 0 saves, if the Trainer's own methods
    write them. Small files go into a folder that is removed at once."""
    torch_save = torch.save

    def stage_object(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        name = redirected.name(f) if redirected is not None else None
        if redirected is not None and name is not None and os.path.basename(name) in _LARGE:
            redirected.add(name, obj)
        elif name is None:
            torch_save(obj, f, *args, **kwargs)

    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        redirected = stack.enter_context(safetensors_into(staged, root))
        stack.enter_context(attribute(torch, "save", stage_object))
        # Without safetensors, transformers 4 writes the weights at once, past torch.save as it is here.
        if type(trainer).save_model is Trainer.save_model and getattr(trainer.args, "save_safetensors", True):
            with (
                attribute(trainer, "args", _Saves(trainer.args)),
                # From transformers 5 on, save_pretrained asks the model, too.
                attribute(PreTrainedModel, "should_save_on_this_rank", lambda model, is_main_process: is_main_process),
            ):
                trainer._save(root)
        own = type(trainer)._save_optimizer_and_scheduler is Trainer._save_optimizer_and_scheduler
        if own and not trainer.args.save_only_model:
            torch.save(trainer.optimizer.state_dict(), os.path.join(root, OPTIMIZER_NAME))


class _Saves:
    """The arguments of a Trainer on a rank that saves."""

    should_save = True

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


_ABSENT = object()


@contextlib.contextmanager
def attribute(obj: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which ``obj`` has another attribute."""
    before = vars(obj).get(name, _ABSENT)
    setattr(obj, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(obj, name)
        else:
            setattr(obj, name, before)


def is_just_in_time(target: Path) -> bool:
    """Whether ``enable_jit_checkpoint`` saves: the process was told to end, so it has to be durable at once.

    The folder with its sentinel would be taken for a checkpoint if the process were killed now.
    """
    sentinel = target / _JIT_SENTINEL
    if not os.path.exists(sentinel):
        return False
    sentinel.unlink()
    with contextlib.suppress(OSError):  # not empty: the same step was saved before, and still counts
        target.rmdir()
    return True
