"""FSDP2: its modules show whole parameters from forward until backward, so they still do after an evaluation."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a part of a module, even if its parameters are whole just now."""
    return bool(_parts(module))


def reshard(module: torch.nn.Module) -> None:
    """Puts the sharded parameters back, which the optimizer has. No collective; the next forward gathers the whole
    ones again."""
    for part in _parts(module):
        torch.nn.Module.state_dict(
            part
        )  # its hooks reshard even if a forward has raised, where part.reshard() does not


def _parts(module: torch.nn.Module) -> list[Any]:
    kind = getattr(
        sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None
    )  # without the import, no such module exists
    return [part for part in module.modules() if isinstance(part, kind)] if kind is not None else []
