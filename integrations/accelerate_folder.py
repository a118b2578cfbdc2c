"""The folder of one ``save_state``: its name, where it is staged, how accelerate writes it, and which older ones go.

Each function takes the Accelerator; accelerate.py calls them in this order, with the votes of the ranks in between.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.accelerator
from accelerate import Accelerator, checkpointing
from accelerate.utils import clean_state_dict_for_safetensors

import lazyckpt
from lazyckpt.integrations.accelerate_ranks import is_sharded
from lazyckpt.integrations.fsdp2 import shards_into
from lazyckpt.integrations.redirect import safetensors_into
from lazyckpt.integrations.replicas import is_large
from lazyckpt.storage import folders, hidden, in_place

_CHECKPOINT = re.compile(r"checkpoint_(\d+)")


def target_of(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path:
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        return Path(project.project_dir) / "checkpoints" / f"checkpoint_{project.iteration}"
    if output_dir is None:
        raise lazyckpt.ConfigError("save_state: give an output_dir, or use automatic_checkpoint_naming")
    return Path(output_dir)


def check_new(accelerator: Accelerator, target: Path, saver: lazyckpt.Saver) -> None:
    """Raises ValueError, as accelerate does, if a folder with an automatic name exists."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming and os.path.exists(target):
        saver.wait()  # total_limit may be about to remove it; accelerate removes at once
        if os.path.exists(target):
            what = "exists already; set accelerator.project_configuration.iteration to what comes after it"
            raise ValueError(f"{target} {what}")


def stage(
    accelerator: Accelerator, target: Path, saver: lazyckpt.Saver, writers: str | int | None
) -> lazyckpt.StagedFolder:
    """Stages ``target`` where no script looks for the newest folder."""
    for model in accelerator._models:
        saver.watch(model)
    # Not in checkpoints/: load_state() takes the highest number there, and fails on a name without one.
    root, parent = Path(accelerator.project_dir or target.parent).resolve(), target.parent.resolve()
    inside = hidden.place(root if root in parent.parents else parent)
    together = is_sharded(accelerator) or writers is not None
    return saver.stage(target.absolute(), inside=inside, all_ranks=together, writers=writers)


def write(
    accelerator: Accelerator, folder: Path, staged: lazyckpt.StagedFolder | None, save_state: Callable[[], Any]
) -> None:
    """Calls accelerate's own ``save_state`` for ``folder``, and redirects what it writes into ``staged``. A rank that
    only writes parts of files has the large ones in ``staged``, too, under the names of the main process."""
    main, sharded = (staged if which else None for which in (accelerator.is_main_process, accelerator.is_fsdp2))
    replica = staged if main is None and not is_sharded(accelerator) else None
    accelerates_own = checkpointing.save
    hooks = accelerator._save_model_state_pre_hook.values()
    namespaces = [hook.__globals__ for hook in hooks if hasattr(hook, "__globals__")]

    def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
        if not Path(f).is_relative_to(folder):
            accelerates_own(obj, f, save_on_each_node=save_on_each_node, safe_serialization=safe_serialization)
            return
        add = redirected.add if redirected is not None else None
        if replica is not None and is_large(obj):
            add = replica.add
        if add is not None:
            obj = clean_state_dict_for_safetensors(obj) if safe_serialization else obj
            add(str(Path(f).relative_to(folder)), obj, {"format": "pt"} if safe_serialization else None)

    project = accelerator.project_configuration
    automatic = project.automatic_checkpoint_naming
    project.automatic_checkpoint_naming = False  # or it would choose the folder
    checkpointing.save = save
    try:
        with (
            shards_into(sharded, folder, accelerate.accelerator),
            safetensors_into(main, folder, *namespaces) as redirected,
        ):
            save_state()
    finally:
        checkpointing.save = accelerates_own
        project.automatic_checkpoint_naming = automatic


def prune(accelerator: Accelerator, target: Path, saver: lazyckpt.Saver) -> None:
    """Removes the lowest numbers above ``total_limit``, once the new checkpoint is durable."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return
    folder = target.parent
    names = {entry.name for entry in folder.iterdir()} | {h.path.name for h in saver.pending()}
    old = sorted((int(m[1]), name) for name in names - {target.name} if (m := _CHECKPOINT.fullmatch(name)))
    for _, name in old[: max(len(old) + 1 - max(project.total_limit, 1), 0)]:
        saver.remove(folder / name)


def finish(folder: Path) -> None:
    """Finishes the publication of ``folder`` if a crash cut it off. Raises ReadError or LoadError."""
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


def loaded_from(accelerator: Accelerator, given: str | os.PathLike[str] | None) -> tuple[Path, int | None] | None:
    """The folder that ``load_state`` has read, and the number in its name; None if it was a link or is gone."""
    if given is not None:
        folder = Path(given).expanduser().absolute()
    else:
        root = Path(accelerator.project_dir or ".").absolute() / "checkpoints"
        numbered = {int(m[1]): path for path in root.glob("*") if (m := _CHECKPOINT.fullmatch(path.name))}
        if not numbered:
            return None
        folder = numbered[max(numbered)]
    if folder.is_symlink() or not folder.is_dir():
        return None
    named = _CHECKPOINT.fullmatch(folder.name)
    return folder, None if named is None else int(named[1])


def sync(folder: Path) -> None:
    """Syncs all files that are in ``folder`` now, on the node of this rank."""
    for parent, _, names in os.walk(folder):
        for name in (*names, ""):
            with contextlib.suppress(FileNotFoundError):  # other ranks are at work here, too
                folders.sync_path(Path(parent, name))
