"""Makes objects whose tensors have memory that is never touched; their bytes are in another file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lazyckpt.conversion.inert import InertObject, InertStorage, InertTensor
from lazyckpt.conversion.stream import Origin
from lazyckpt.errors import ConfigError, CorruptFileError
from lazyckpt.formats.dtypes import Dtype
from lazyckpt.reading.sharded.slices import in_order
from lazyckpt.stores.store import AnyPath


class Hollow:
    """Turns inert objects into real ones with tensors of untouched memory, which costs nothing.

    ``origins`` tells for each storage, by its ``_cdata``, where its bytes are; ``saved`` holds every storage used.
    """

    def __init__(self, file: Path, dtype: torch.dtype | None = None, *, dense: bool = False) -> None:
        """``dtype`` is what floating-point tensors become. With ``dense`` each tensor fills its storage, in order."""
        self._file = file
        self._dtype = dtype
        self._dense_only = dense
        self.nbytes = 0  # of all storages that were made
        self._apart: dict[Any, torch.Tensor] = {}  # those that have storages of their own
        self.origins: dict[int, Origin] = {}
        self.saved: dict[tuple[AnyPath, str], InertStorage] = {}
        self._storages: dict[tuple[AnyPath, str], torch.UntypedStorage] = {}
        self._made: dict[int, Any] = {}

    def tensors(self, obj: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Makes a dict of dense tensors, each with its own storage, and maps further names of a tensor to its first.

        Raises ConfigError for anything but named tensors, and for tensors that share a part of their memory."""
        self.check_named(obj, "safetensors")
        owner: dict[tuple[AnyPath, str], str] = {}
        made: dict[str, torch.Tensor] = {}
        ties = {}
        for name, value in obj.items():
            record = value.storage.record
            place = value.storage.file, record.name
            if record.nbytes and place in owner:
                if _shows(value) == _shows(obj[owner[place]]):
                    ties[name] = owner[place]
                    continue
                raise ConfigError(
                    f"{self._file}: {owner[place]!r} and {name!r} show parts of the same memory, which safetensors "
                    "cannot express; make a .pt file instead"
                )
            owner[place] = name
            made[name] = self._tensor(value, name)
        return made, ties

    def check_named(self, obj: Any, target: str) -> None:
        """Raises ConfigError unless ``obj`` is a dict of tensors, which is all that ``target`` can hold."""
        if not isinstance(obj, Mapping):
            raise ConfigError(f"{self._file}: {target} holds a dict of tensors, this is {_kind(obj)}")
        for name, value in obj.items():
            if not isinstance(name, str) or not isinstance(value, InertTensor) or value.storage is None:
                what = f"{name!r} is {_kind(value)}" if isinstance(name, str) else f"{name!r} is not a name"
                parts = [str(k) for k, v in obj.items() if isinstance(v, Mapping)]
                hint = f"; give a part of it as key: {', '.join(parts[:10])}" if parts else ""
                raise ConfigError(f"{self._file}: {target} holds named tensors and nothing else: {what}{hint}")

    def whole(self, obj: Any, name: str = "") -> Any:
        """Makes an object of plain values and tensors, with its ties. Raises ConfigError for anything else."""
        if (known := self._made.get(id(obj))) is not None:
            return known
        if isinstance(obj, InertTensor) and obj.storage is not None:
            tensor = self._made[id(obj)] = self._tensor(obj, name)
            return tensor
        if isinstance(obj, Dtype) and (dtype := getattr(torch, obj.name, None)) is not None:
            return dtype
        if isinstance(obj, InertTensor | InertStorage | InertObject | Dtype):
            raise ConfigError(
                f"{self._file}: {name or 'it'} is {_kind(obj)}; only tensors and plain values are converted. A key "
                "selects a part"
            )
        if not isinstance(obj, Mapping | list | tuple | set | frozenset):
            return obj
        if isinstance(obj, tuple | set | frozenset):  # which cannot hold themselves
            made: Any = type(obj)(self.whole(item, f"{name}.{i}") for i, item in enumerate(obj))
            self._made[id(obj)] = made
            return made
        made = self._made[id(obj)] = type(obj)()
        if isinstance(obj, list):
            made.extend(self.whole(item, f"{name}.{i}") for i, item in enumerate(obj))
        else:
            for key, value in obj.items():
                made[self.whole(key, f"{name}: a key")] = self.whole(value, f"{name}.{key}".removeprefix("."))
        return made

    def _tensor(self, tensor: InertTensor, name: str) -> torch.Tensor:
        assert tensor.storage is not None
        dtype = getattr(torch, tensor.dtype, None)
        if tensor.kind or not isinstance(dtype, torch.dtype):
            raise ConfigError(f"{self._file}: {name!r} is {_kind(tensor)}, which is not converted")
        record = tensor.storage.record
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        if 0 not in tensor.shape and (tensor.offset + last + 1) * dtype.itemsize > record.nbytes:
            raise CorruptFileError(f"record {record.name}: too short for a tensor that views it", path=self._file)
        place = tensor.storage.file, record.name
        self.saved[place] = tensor.storage
        target = dtype if self._dtype is None or not dtype.is_floating_point else self._dtype
        nbytes = math.prod(tensor.shape) * dtype.itemsize
        fills = nbytes == record.nbytes and in_order(tensor.shape, tensor.stride)
        if target is not dtype or (self._dense_only and not fills):
            if (made := self._apart.get((place, _shows(tensor)))) is None:
                made = self._apart[place, _shows(tensor)] = self._dense(tensor, dtype, target)
            return made
        storage = self._storages.get(place)
        if storage is None:
            self.nbytes += record.nbytes
            storage = self._storages[place] = torch.UntypedStorage(record.nbytes)
            self.origins[storage._cdata] = Origin(tensor.storage)
        return torch.empty(0, dtype=dtype).set_(storage, tensor.offset, tensor.shape, tensor.stride)

    def _dense(self, tensor: InertTensor, dtype: torch.dtype, target: torch.dtype) -> torch.Tensor:
        """A tensor of its own storage, whose bytes are made from what ``tensor`` shows of its record."""
        assert tensor.storage is not None
        made = torch.empty(tensor.shape, dtype=target)
        view = (dtype, tensor.offset, tensor.shape, tensor.stride)
        self.nbytes += made.nbytes
        storage = made.untyped_storage()
        self.origins[storage._cdata] = Origin(tensor.storage, view, target)
        return made


def _shows(tensor: InertTensor) -> tuple[Any, ...]:
    """What a tensor shows of its storage."""
    return tensor.dtype, tensor.offset, tensor.shape, tensor.stride, tensor.kind


def _kind(value: Any) -> str:
    """Names the type of a value, with an article."""
    if isinstance(value, InertTensor):
        return f"a tensor {value.kind}" if value.kind else f"a tensor of {value.dtype}"
    name = value.global_name if isinstance(value, InertObject) else type(value).__name__
    return "a storage" if isinstance(value, InertStorage) else f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}"
