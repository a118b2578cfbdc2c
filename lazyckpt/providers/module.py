"""The provider of a module, and the differences allowed between a checkpoint and a module."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lazyckpt import _engine, private_names
from lazyckpt.errors import RestoreError
from lazyckpt.providers.base import Landing, StorageTable
from lazyckpt.providers.objects import StatefulProvider, describe, matches, unfillable
from lazyckpt.providers.rename import suggestion
from lazyckpt.providers.restorable import UnrestorableError


class ModuleProvider(StatefulProvider):
    """A module: parameters and buffers are read straight into the live ones."""

    def __init__(self, module: torch.nn.Module, *, casts: bool = False) -> None:
        """``casts``: takes floating-point tensors of another dtype, too."""
        super().__init__(module)
        self._casts = casts
        self._accepted_keys: list[Any] | None = None  # that load_state_dict() takes
        self._accepted_facts: Any = None  # that state_dict() has told beside them

    def opcodes(self, table: StorageTable) -> bytes:
        live = _engine.live_state(self.obj)
        if live is not None and list(live) == self._accepted_keys and vars(live) == self._accepted_facts:
            skeleton = self._skeletons[None]
            if (opcodes := skeleton.opcodes_of_plain(live, table, detached=True)) is not None:
                return opcodes
        return super().opcodes(table)

    def refuse_untakable(self, state: Any) -> None:
        if not isinstance(state, Mapping) or (found := list(state)) == self._accepted_keys:
            return
        if keys := self._unclaimed(state):
            others = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            raise UnrestorableError(keys[0], f"{_refusal_of(state[keys[0]])}{others}. {_TRACK_WHAT_TRAINS}")
        self._accepted_keys, self._accepted_facts = found, dict(vars(state)) if type(state) is OrderedDict else None

    def landings(self, saved: Any) -> list[Landing]:
        plain = _plain_state(self.obj)
        live = self.obj.state_dict() if plain is None else plain
        if type(saved) is type(live) and not isinstance(live, Mapping):
            return []  # a state of its own kind, which load_state_dict understands
        compare(saved, live, casts=self._casts)
        if plain is None and (keys := self._unclaimed(live)):
            raise RestoreError("\n".join(f"{key}: {_refusal_of(saved[key])}" for key in keys))
        own = self._own_storages() if plain is None else None
        return [
            Landing(saved[name], tensor)
            for name, tensor in live.items()
            if _views(tensor, own)
            and (plain is not None or unfillable(tensor) is None)
            and not (self._casts and saved[name].dtype is not tensor.dtype)
        ]

    def _own_storages(self) -> set[int]:
        return {
            t.untyped_storage()._cdata
            for tensors in (self.obj.parameters(), self.obj.buffers())
            for t in map(_local, tensors)
            if not is_lazy(t) and type(t.data) is torch.Tensor and t.layout is torch.strided
        }

    def _unclaimed(self, state: Any) -> list[str]:
        """The keys of ``state`` that ``load_state_dict`` would refuse: unexpected ones, unless their tensors are
        parameters or buffers under other names, which ``restore()`` reads in place, and tensors that nothing can fill.
        Not those that a module may take by code of its own."""
        if _has_own([self.obj], ["load_state_dict"]) or not isinstance(state, Mapping):
            return []
        unfilled = {key for key, value in state.items() if unfillable(value) is not None}
        others = (state.keys() - _claimed(self.obj)) | unfilled
        keys = [key for key in others if isinstance(key, str) and not _has_custom_loader(self.obj, key)]
        if keys:
            own = self._own_storages()
            keys = [key for key in keys if key in unfilled or not _views(state[key], own)]
        return sorted(keys)

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        if not isinstance(saved, Mapping):
            self.load_state(saved)
            return
        if len(landed) > 0 and all(id(t) in landed for t in saved.values()) and not _has_load_hooks(self.obj):
            return
        state: Any = saved
        for name, tensor in saved.items():
            state[name] = landed.get(id(tensor), tensor)
        self.load_state(state)


_TRACK_WHAT_TRAINS = (
    "Track only what trains: an object whose state_dict() returns it and whose load_state_dict() takes it back. For "
    "QLoRA these are get_peft_model_state_dict and set_peft_model_state_dict of PEFT"
)


def _refusal_of(value: Any) -> str:
    why = unfillable(value) or "no parameter, buffer or extra state"
    return f"is in state_dict(), but load_state_dict() would refuse it: it is {why}"


def _local(tensor: Any) -> Any:
    """The tensor that holds the memory of this rank: the local one of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _views(tensor: Any, storages: set[int] | None) -> bool:
    """Whether the tensor is plain and, unless ``storages`` is None, views one of them."""
    tensor = _local(tensor)
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and (storages is None or tensor.untyped_storage()._cdata in storages)
    )


_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_SAVE_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks")
_SAVE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state", "named_modules")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
# Batch norm's own loader only adds a counter that checkpoints of torch < 0.4.1 lack.
_LOAD_OF_NORMS = private_names.find("torch.nn.modules.batchnorm._NormBase._load_from_state_dict")


def _plain_state(module: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """What ``state_dict()`` returns, in half the time; None if it may run code that is not torch's. Its tensors are the
    parameters and buffers themselves, no copies, and ``load_state_dict()`` takes all of them."""
    parts = list(module.named_modules(remove_duplicate=False))
    if _has_own([part for _, part in parts], _SAVE_METHODS, _SAVE_HOOKS):
        return None
    entries = dict(_entries(parts))
    if not _PLAIN.issuperset(map(type, entries.values())):
        return None
    state = {key: tensor.detach() for key, tensor in entries.items()}
    return None if any(unfillable(tensor) is not None for tensor in state.values()) else state


def _entries(parts: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and the persistent buffers of named modules, under their keys."""
    for path, part in parts:
        prefix = f"{path}." if path else ""
        passing = part._non_persistent_buffers_set
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in passing:
                yield prefix + name, buffer


def _claimed(module: torch.nn.Module) -> set[str]:
    """The keys that torch's own ``load_state_dict`` of ``module`` takes."""
    parts = list(module.named_modules(remove_duplicate=False))
    extra = [path for path, part in parts if _has_own([part], ["set_extra_state"])]
    return {key for key, _ in _entries(parts)}.union(f"{path}._extra_state".removeprefix(".") for path in extra)


def _has_own(modules: Sequence[torch.nn.Module], methods: Sequence[str], hooks: Sequence[str] = ()) -> bool:
    """Whether one of ``modules`` has one of ``methods`` that is not torch's, or one of ``hooks``."""
    return (
        any(
            getattr(kind, method) not in (getattr(torch.nn.Module, method), _LOAD_OF_NORMS)
            for kind in set(map(type, modules))
            for method in methods
        )
        or any(not vars(module).keys().isdisjoint(methods) for module in modules)
        or any(getattr(module, name) for module in modules for name in hooks)
    )


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` does more than to copy tensors into tensors of the same names."""
    inside = list(module.modules())
    return _has_own([module], ["load_state_dict"]) or _has_own(
        inside, ["set_extra_state", "_load_from_state_dict"], _LOAD_HOOKS
    )


def _has_own_loader(module: torch.nn.Module) -> bool:
    """Whether ``module`` reads its part of a state dict by other code than torch's."""
    return _has_own([module], ["_load_from_state_dict"], _LOAD_HOOKS)


def _has_custom_loader(module: torch.nn.Module, key: str) -> bool:
    """Whether a module on the way from ``module`` down to ``key`` may take the key by code of its own."""
    part: torch.nn.Module | None = module
    for word in key.split("."):
        if part is None or _has_own_loader(part):
            return part is not None
        part = part._modules.get(word)
    return False


def compare(saved: Any, live: Mapping[str, Any], *, casts: bool = False) -> None:
    """Raises RestoreError that tells every entry of a state dict that is missing, unexpected or of another
    shape. ``casts``: another floating-point dtype is no difference."""
    if not isinstance(saved, Mapping):
        raise RestoreError(f"expected a state dict, found {describe(saved)}")
    if suggestion(saved, live) is not None:
        raise RestoreError(
            f"the names differ by a prefix alone: {next(iter(saved))} in the checkpoint, {next(iter(live))} in the "
            "model"
        )
    missing = [f"{name}: not in the checkpoint" for name in live if name not in saved]
    unexpected = [f"{name}: in the checkpoint, but not in the model" for name in saved if name not in live]
    others = [
        name
        for name, value in live.items()
        if name in saved
        and isinstance(value, torch.Tensor)
        and not is_lazy(value)  # takes its shape from the checkpoint
        and not matches(saved[name], value)
        and not (casts and differ_in_dtype(saved[name], value))
    ]
    castable = [name for name in others if differ_in_dtype(saved[name], live[name])]
    reshaped = [name for name in others if name not in castable]
    problems = missing + unexpected
    problems += [
        f"{name}: {describe(saved[name])} in the checkpoint, {describe(live[name])} in the model" for name in reshaped
    ]
    for dtypes, count in Counter((saved[name].dtype, live[name].dtype) for name in castable).items():
        was, now = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        problems.append(f"{count} of {len(live)} entries are {was} in the checkpoint and {now} in the model")
    if problems:
        raise RestoreError("\n".join(problems))


def differ_in_dtype(saved: Any, live: Any) -> bool:
    """Whether two tensors differ in a dtype alone that ``copy_`` converts: from a float to a float."""
    return (
        isinstance(saved, torch.Tensor)
        and isinstance(live, torch.Tensor)
        and saved.is_floating_point()
        and live.is_floating_point()
        and saved.layout is live.layout is torch.strided
        and not saved.is_nested
        and not live.is_nested
        and saved.dtype is not live.dtype
        and saved.shape == live.shape
    )
