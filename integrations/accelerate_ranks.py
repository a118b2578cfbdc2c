"""Which ranks of an Accelerator save: one, or each a part; and DeepSpeed's engines, which save theirs."""

from __future__ import annotations

import contextlib
import os

from accelerate import Accelerator
from accelerate.utils import DistributedType

from lazyckpt.integrations.deepspeed_host import Host

_BY_ITSELF = ("FSDP", "MEGATRON_LM", "XLA", "TP")


def unsupported(accelerator: Accelerator) -> str | None:
    """Returns why accelerate has to save by itself; None if lazyckpt can."""
    kind = DistributedType(accelerator.distributed_type).value
    if kind in _BY_ITSELF and not accelerator.is_fsdp2:
        return f"{kind} writes its checkpoints by itself"
    if accelerator.project_configuration.save_on_each_node and on_several_nodes(accelerator):
        return "save_on_each_node is set"
    return None


def on_several_nodes(accelerator: Accelerator) -> bool:
    ranks = int(accelerator.num_processes)
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether every rank saves its shards."""
    return bool(accelerator.is_fsdp2) or has_deepspeed(accelerator)


def has_deepspeed(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def engines_joined(accelerator: Accelerator, host: Host) -> contextlib.AbstractContextManager[None]:
    """A context in which engines of DeepSpeed, those of ``accelerator`` and new ones, add their files to the folders of
    ``host``. They stay joined. Raises ConfigError for an engine that lazyckpt cannot save."""
    if not has_deepspeed(accelerator):
        return contextlib.nullcontext()
    from lazyckpt.integrations import deepspeed_trainer  # here, since it imports DeepSpeed

    return deepspeed_trainer.joined(host, accelerator._models)


def engines_left(accelerator: Accelerator, host: Host) -> None:
    """Gives the engines that have joined ``host`` their own checkpoint engines back."""
    if has_deepspeed(accelerator):
        from lazyckpt.integrations import deepspeed_trainer

        deepspeed_trainer.leave(host, accelerator._models)
