"""What one file of a save holds: state → storages (providers/), storages → layout (formats/).

A plan is kept from save to save, and with it what stays the same: the pickle without its storages, the layout.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from lazyckpt.errors import ConfigError
from lazyckpt.formats import safetensors, torch_zip
from lazyckpt.formats.program import Extent
from lazyckpt.providers.base import Bytes, Provider, StorageTable, TensorView, TensorViews
from lazyckpt.providers.composite import UnpicklableError
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.pickles import pickle_of
from lazyckpt.providers.restorable import UnrestorableError
from lazyckpt.providers.sharded import refuse_part

ARCHIVE_NAME = "archive"  # the folder inside the zip, as torch.save names it for a buffer


class FilePlan(ABC):
    """One file of every save."""

    any_order: bool  # whether the storages may be laid out in another order than gather() gives

    @abstractmethod
    def gather(self) -> TensorViews:
        """The storages of the state as it is now; everything else of it is frozen when this returns.

        Raises whatever pickle raises, and ConfigError for what the format cannot hold.
        """

    @abstractmethod
    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        """The program that writes them, source i being view i, and the size of the file in bytes."""


class ZipPlan(FilePlan):
    """The archive that ``torch.save`` would write."""

    any_order = True

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._fresh_keys = map(str, itertools.count())
        self._opcodes = b""
        self._layout: tuple[tuple[list[str], list[int]], torch_zip.Layout] | None = None

    def gather(self) -> TensorViews:
        table = StorageTable(self._fresh_keys)
        self._opcodes = b"".join(s.data for s in self._provider.segments(table) if isinstance(s, Bytes))
        return table.views

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        facts = views.keys, views.sizes
        if self._layout is None or self._layout[0] != facts:
            self._layout = facts, torch_zip.Layout(ARCHIVE_NAME, *facts)
        layout = self._layout[1]
        tail = layout.finish(torch_zip.small_records(pickle_of(self._opcodes)))
        return [*layout.head, tail], layout.head_end + tail.nbytes


class ObjectProvider(StateProvider):
    """An object that is given anew for every save, and that its user loads by other ways than ``restore()``."""

    is_restored = False

    def __init__(self, obj: Any) -> None:
        super().__init__()
        self.obj = obj

    def state(self) -> Any:
        return self.obj

    def load_state(self, state: Any) -> None:
        self.obj = state


class SafetensorsPlan(FilePlan):
    """A dict of tensors."""

    any_order = False

    def __init__(self, tensors: Any, metadata: Mapping[str, str] | None = None) -> None:
        self._tensors = tensors
        self._metadata = metadata
        self._shapes: list[tuple[int, ...]] = []

    def gather(self) -> TensorViews:
        tensors = self._tensors
        named = isinstance(tensors, dict) and all(
            isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in tensors.items()
        )
        if not named:
            raise ConfigError("a .safetensors file takes a dict of names to tensors")
        owner: dict[int, str] = {}
        views = TensorViews()
        self._shapes = []
        # Sorted as the format's own library does, so that every tensor is aligned to its dtype.
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            refuse_part(tensor, tensors)
            if tensor.layout is not torch.strided or tensor.is_meta:
                raise ConfigError(f"{name!r} is not a dense tensor with data")
            if (needed := _bytes_spanned(tensor)) > tensor.untyped_storage().nbytes():
                raise ConfigError(
                    f"{name!r} needs {needed} bytes, but its storage has {tensor.untyped_storage().nbytes()}: it was "
                    "resized, or sharded training has freed it; give it its memory back before the save"
                )
            pointer = tensor.untyped_storage().data_ptr()
            if pointer and pointer in owner:
                raise ConfigError(
                    f"{owner[pointer]!r} and {name!r} share memory, which safetensors cannot express; clone one of "
                    "them, or use a name that does not end in .safetensors"
                )
            owner[pointer] = name
            # A view of a larger storage is written as what it shows.
            dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
            if dense.untyped_storage().nbytes() != dense.nbytes:
                dense = dense.clone()
            views.append(TensorView(name, dense.untyped_storage(), dense.nbytes, dense.dtype))
            self._shapes.append(tuple(dense.shape))
        return views

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        try:
            layout = safetensors.Layout(views.keys, views.dtypes, self._shapes, self._metadata)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return [layout.data, layout.header], layout.header_bytes + sum(views.sizes)


def _bytes_spanned(tensor: torch.Tensor) -> int:
    """How many bytes a storage must have for this tensor to lie in it."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.itemsize)


def plan_for(name: str, obj: Any, metadata: Mapping[str, str] | None = None) -> FilePlan:
    """The plan of a file of this name that is to hold ``obj``."""
    return SafetensorsPlan(obj, metadata) if name.endswith(".safetensors") else ZipPlan(ObjectProvider(obj))


def unsavable(error: Exception) -> str:
    """Why a plan could not gather or lay out, in words."""
    if isinstance(error, UnpicklableError | UnrestorableError | ConfigError):
        return str(error)
    return f"cannot be pickled: {type(error).__name__}: {error}"
