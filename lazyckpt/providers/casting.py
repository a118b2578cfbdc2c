"""Saves floating-point tensors in another dtype, for copies of a model that are published.

float32 in host memory becomes bfloat16 in the engine, while it is copied: as lazily as everything else, without a
second copy in memory. A stand-in takes the tensor's place until the state is pickled: a tensor of the new dtype, whose
memory is never touched. All other floating-point tensors are converted at once, in host memory: the GPU has no room for
a second copy of a model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from lazyckpt.errors import ConfigError
from lazyckpt.providers.base import StorageTable, TensorViews
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.ranges import to_host


class Casting:
    """The stand-ins of one state, kept from save to save."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises ConfigError for a dtype that is not floating."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype={dtype!r}: expected a floating-point dtype of torch")
        self._dtype = dtype
        # By the identity of the live storage: the storage of its stand-in, which has half of its size.
        self._stand_ins: dict[int, torch.UntypedStorage] = {}
        self._live: dict[int, torch.UntypedStorage] = {}  # of the present save, by the identity of the stand-in

    def converted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state in the new dtype; call ``put_back`` with the storages that it was pickled to."""
        kept, self._stand_ins, self._live = self._stand_ins, {}, {}
        done: dict[Any, torch.Tensor] = {}
        result = OrderedDict((name, self._convert(value, kept, done)) for name, value in state.items())
        if (versions := getattr(state, "_metadata", None)) is not None:
            vars(result)["_metadata"] = versions  # load_state_dict() reads it
        return result

    def _convert(self, value: Any, kept: dict[int, torch.UntypedStorage], done: dict[Any, torch.Tensor]) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype is self._dtype:
            return value
        if not (self._dtype is torch.bfloat16 and _is_whole_float32(value)):
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
                return value.detach().cpu().to(self._dtype)
            # Tied weights stay one tensor.
            view = value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_neg()
            place = value.untyped_storage()._cdata, *view
            if place not in done:
                done[place] = to_host(value.detach()).to(self._dtype)
            return done[place]
        live = value.untyped_storage()
        stand_in = kept.get(live._cdata)
        if stand_in is None or 2 * stand_in.nbytes() != live.nbytes():
            stand_in = self._stand_ins.get(live._cdata) or torch.UntypedStorage(live.nbytes() // 2)
        self._stand_ins[live._cdata] = stand_in
        self._live[stand_in._cdata] = live
        return torch.empty(0, dtype=self._dtype).set_(stand_in, 0, value.shape, value.stride())

    def put_back(self, views: TensorViews) -> None:
        """Puts the live storages into the places of their stand-ins, and drops its references."""
        live, self._live = self._live, {}
        for at, identity in enumerate(views.identities):
            if (storage := live.pop(identity, None)) is not None:
                views.storages[at] = storage
                views.identities[at] = storage._cdata
                views.to_bfloat16.add(storage._cdata)
        assert not live, "a stand-in was copied"


def _is_whole_float32(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all of a storage in host memory, in order."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
    )


class CastModuleProvider(ModuleProvider):
    """A module that is saved in another dtype, and restored from it."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module, casts=True)
        self.save_dtype = dtype
        self._casting = Casting(dtype)

    def opcodes(self, table: StorageTable) -> bytes:
        state = self.state()
        table.views.tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        opcodes = self.opcodes_of(self._casting.converted(state), table)
        self._casting.put_back(table.views)
        return opcodes
