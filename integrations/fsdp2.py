"""Sends the sharded state that accelerate writes under FSDP2 into a staged folder of all ranks.

Accelerate's ``save_state`` and the Trainer of transformers call ``save_fsdp_model`` and ``save_fsdp_optimizer``. Each
of them writes a folder of torch.distributed.checkpoint, from a copy in host memory (``offload_to_cpu``), while training
waits. Here they hand over the live state instead, and all of it is one snapshot. ``use_dcp=False`` and a
``state_dict_type`` other than SHARDED_STATE_DICT stay accelerate's: it writes at once, into the staged folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import lazyckpt
from lazyckpt import private_names

with private_names.needed("accelerate"):
    private_names.check("torch.distributed.checkpoint")
    from accelerate.utils import fsdp_utils
    from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

_SHARDED = "SHARDED_STATE_DICT"


def is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextlib.contextmanager
def shards_into(
    staged: lazyckpt.StagedFolder | None, root: str | os.PathLike[str], module: ModuleType
) -> Iterator[None]:
    """A context in which the two functions of ``module`` add the state that they would write under ``root`` to
    ``staged``, on every rank; None changes nothing."""
    if staged is None:
        yield
        return
    replaced = {name: vars(module)[name] for name in ("save_fsdp_model", "save_fsdp_optimizer")}
    add = functools.partial(_add, staged, root)
    try:
        vars(module)["save_fsdp_model"] = functools.partial(_model, replaced["save_fsdp_model"], add)
        vars(module)["save_fsdp_optimizer"] = functools.partial(_optimizer, replaced["save_fsdp_optimizer"], add)
        yield
    finally:
        vars(module).update(replaced)


def _add(staged: lazyckpt.StagedFolder, root: str | os.PathLike[str], folder: str, state: dict[str, Any]) -> None:
    staged.add_shards(os.path.relpath(folder, root), state)


def _model(
    own: Callable[..., None],
    add: Callable[[str, dict[str, Any]], None],
    plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    if not _is_ours(plugin, use_dcp):
        own(plugin, accelerator, model, output_dir, model_index, adapter_only=adapter_only, **_unless_dcp(use_dcp))
        return
    os.makedirs(output_dir, exist_ok=True)  # where other files follow
    state = fsdp_utils._get_model_state_dict(model, adapter_only=adapter_only, sd_options=_live(plugin))
    add(os.path.join(output_dir, f"{FSDP_MODEL_NAME}_{model_index}"), {"model": state})


def _optimizer(
    own: Callable[..., None],
    add: Callable[[str, dict[str, Any]], None],
    plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    if not _is_ours(plugin, use_dcp):
        own(plugin, accelerator, optimizer, model, output_dir, optimizer_index, **_unless_dcp(use_dcp))
        return
    state = get_optimizer_state_dict(model, optimizer, options=_live(plugin))
    add(os.path.join(output_dir, f"{OPTIMIZER_NAME}_{optimizer_index}"), {"optimizer": state})


def _is_ours(plugin: Any, use_dcp: bool) -> bool:
    return use_dcp and plugin.fsdp_version == 2 and plugin.state_dict_type.name == _SHARDED


def _live(plugin: Any) -> Any:
    """Accelerate's options, but for the copy to host memory."""
    return dataclasses.replace(fsdp_utils._prepare_sd_options(plugin), cpu_offload=False)


def _unless_dcp(use_dcp: bool) -> dict[str, bool]:
    return {} if use_dcp else {"use_dcp": False}  # older versions have no such argument
