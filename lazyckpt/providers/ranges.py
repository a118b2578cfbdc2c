"""The bytes of a storage that one tensor takes; for a shard, this rank's part."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lazyckpt.errors import ConfigError
from lazyckpt.providers.plain_tensors import PLAIN_DTYPES


def bytes_spanned(tensor: torch.Tensor) -> int:
    """The bytes from the first element of a strided tensor to the end of its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.itemsize)


def overlaps(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Finds strided tensors whose bytes overlap those of another one: its name, by theirs. The tensors that are not
    found do not overlap each other."""
    found: dict[str, str] = {}
    furthest, end = "", 0
    begins = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}
    for name, begin in sorted(begins.items(), key=lambda item: item[1]):
        if begin < end:
            found[name] = furthest
        if (its_end := begin + bytes_spanned(tensors[name])) > end:
            furthest, end = name, its_end
    return found


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


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a strided tensor as it is, or a copy of it in host memory if it is elsewhere.

    No kernel runs on its device and no memory is taken there: ``tensor.cpu()`` would first straighten a view there. The
    copy takes all bytes between the first and the last element."""
    return tensor if tensor.is_cpu else span_copied(tensor)


def span_copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a strided tensor with a storage of its own in host memory. Calls wait for the device."""
    if tensor.is_conj():
        return span_copied(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(span_copied(torch._neg_view(tensor)))
    span = tensor.as_strided((bytes_spanned(tensor) // tensor.itemsize,), (1,))
    return span.to("cpu", copy=True).as_strided(tensor.shape, tensor.stride(), 0)


def in_front(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor if it fills the first bytes of its storage, ``tensor.nbytes`` of them, and a copy in host
    memory if not.

    An uneven shard of FSDP2 is such a tensor: its storage is padded to the size of the largest shard. Returns None if
    the tensor is not made of plain bytes (sparse, quantized, of a subclass). Raises ConfigError if it has no data.
    """
    if tensor.is_meta:
        raise ConfigError("it is on the meta device, so it has no data")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_nested or tensor.dtype not in PLAIN_DTYPES:
        return None
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = to_host(tensor).resolve_conj().resolve_neg()
    if tensor.storage_offset() or not is_dense(tensor):
        tensor = to_host(tensor).clone()
    if (held := tensor.untyped_storage().nbytes()) < tensor.nbytes:
        raise ConfigError(
            f"it needs {tensor.nbytes} bytes, but its storage has {held}: it was resized, or sharded training has "
            "freed it; give it its memory back before the save"
        )
    return tensor
