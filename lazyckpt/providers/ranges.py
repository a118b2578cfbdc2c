"""The bytes of a storage that one tensor takes: of a shard, what this rank holds."""

from __future__ import annotations

import torch

from lazyckpt.errors import ConfigError
from lazyckpt.providers.pickles import PLAIN_DTYPES


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill numel x itemsize bytes of memory without overlap."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def in_front(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor if it fills the first bytes of its storage, ``tensor.nbytes`` of them, and a copy in host
    memory if not.

    An uneven shard of FSDP2 does: its storage is padded to the size of the largest shard. Returns None if the tensor is
    not made of plain bytes (sparse, quantized, of a subclass). Raises ConfigError if it has no data.
    """
    if tensor.is_meta:
        raise ConfigError("it is on the meta device, so it has no data")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_nested or tensor.dtype not in PLAIN_DTYPES:
        return None
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.cpu().resolve_conj().resolve_neg()
    if tensor.storage_offset() or not is_dense(tensor):
        tensor = tensor.to("cpu", copy=True)
    if (held := tensor.untyped_storage().nbytes()) < tensor.nbytes:
        raise ConfigError(
            f"it needs {tensor.nbytes} bytes, but its storage has {held}: it was resized, or sharded training has "
            "freed it; give it its memory back before the save"
        )
    return tensor
