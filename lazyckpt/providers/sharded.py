"""Refuses distributed tensors of which this process holds only a shard, where one process writes a file by itself.

Of a tensor that is sharded over several ranks, the file would hold one shard: it would look whole, and every rank would
load the same shard. A Checkpointer on every rank writes DTensors into a folder instead (global_state.py).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lazyckpt.errors import ConfigError
from lazyckpt.providers.naming import tensors_in

_INSTEAD = (
    "Track DTensors in a Checkpointer on every rank, or use torch.distributed.checkpoint, or save the state that "
    "get_model_state_dict and get_optimizer_state_dict of torch.distributed.checkpoint.state_dict gather with "
    "StateDictOptions(full_state_dict=True)"
)


class ShardedTensorError(ConfigError):
    """A tensor of the state is sharded over several ranks; ``name`` is its path in the state."""

    def __init__(self, what: str, name: str = "") -> None:
        self.what = what
        self.name = name
        super().__init__(
            f"cannot save {name or 'this tensor'}: it is {what}, and this rank holds only a part. {_INSTEAD}"
        )

    def inside(self, name: str) -> ShardedTensorError:
        """Returns the same error for the state that holds this one as ``name``."""
        return type(self)(self.what, f"{name}.{self.name}" if self.name else f"a tensor in {name}")


def refuse_part(tensor: torch.Tensor, root: Any) -> None:
    """Raises ShardedTensorError, with the path to ``tensor`` in ``root``, if this process holds only a part of it."""
    what = _part(tensor)
    if what is not None:
        paths = (path for path, found in tensors_in(root, "", attributes=True) if found is tensor)
        raise ShardedTensorError(what, next(paths, ""))


def refuse_sharded_tensors(obj: Any, name: str) -> None:
    """Raises ShardedTensorError for a ShardedTensor in a module, an optimizer, or a container: torch's old kind, whose
    shards a Checkpointer does not write.

    Skips the search unless this process belongs to a group: there are tens of thousands of tensors.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for path, tensor in tensors_in(obj, name):
            if not hasattr(tensor, "_spec") and (what := _part(tensor)) is not None:
                raise ShardedTensorError(what, path)


def _part(tensor: torch.Tensor) -> str | None:
    """Describes ``tensor`` if it is distributed and not whole in this process; otherwise returns None."""
    for module, name in (
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
    ):
        kind = getattr(sys.modules.get(module), name, None)  # without the import, no tensor of the class exists
        if kind is None or not isinstance(tensor, kind):
            continue
        if name == "ShardedTensor":
            shards = len(tensor.metadata().shards_metadata)
            return f"a ShardedTensor of {shards} shards" if len(tensor.local_shards()) < shards else None
        mesh = tensor.device_mesh
        # On a dimension of the mesh that has one rank, every placement is whole.
        if any(size > 1 and not how.is_replicate() for size, how in zip(mesh.shape, tensor.placements, strict=True)):
            return f"a DTensor with placements {tensor.placements} on a mesh of {mesh.size()} ranks"
    return None


_PARTIAL = (
    "ZeroRedundancyOptimizer",  # of torch
    "DistributedFusedAdam",  # of Apex
    "DistributedFusedLAMB",
    "DistributedOptimizer",  # of Megatron
)


def refuse_partial(provider: object, name: str) -> None:
    """Raises ConfigError for an optimizer of which each rank has another part, though its parameters are the same."""
    kinds = {base.__name__ for base in type(getattr(provider, "obj", None)).__mro__}
    for kind in kinds.intersection(_PARTIAL):
        raise ConfigError(
            f"track: {name!r} is a {kind}, which has another part of the state on each rank; with writers=… all ranks "
            "hold the same state. Use FSDP2, or collect the state on rank 0 and save it there, without writers"
        )
