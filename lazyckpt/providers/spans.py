"""The bytes of storages that the tensors of an object show, for pickles of a compact archive (see
``_engine.spans_of``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lazyckpt import _engine


class Span(NamedTuple):
    """Some bytes of a storage, and where one tensor lies in them."""

    begin: int
    nbytes: int
    offset: int  # of the tensor, in elements


class Spans:
    """The spans of some tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors  # as long as they live, no other storage has the identity of one of theirs
        self._found = {
            _place(tensor): Span(*span) for tensor, span in zip(tensors, _engine.spans_of(tensors), strict=True)
        }

    def of(self, tensor: torch.Tensor) -> Span:
        """The span of a tensor; all of its storage if it is none of these, such as one that a reducer has just made."""
        found = self._found.get(_place(tensor))
        return found or Span(0, tensor.untyped_storage().nbytes(), int(tensor.storage_offset()))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def whole_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor that shows all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
