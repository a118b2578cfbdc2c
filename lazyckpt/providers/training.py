"""The provider for each kind of tracked object; here those of loaders, RNGs and plain containers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data

from lazyckpt.errors import ConfigError, RestoreError
from lazyckpt.providers.base import Landing, StorageTable
from lazyckpt.providers.data_loader import TrackedLoader
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.objects import StatefulProvider, StateProvider, TensorProvider, describe, matches, unfillable
from lazyckpt.providers.optimizer import OptimizerProvider
from lazyckpt.providers.rng import KeptMemory, capture_rng, check_rng, restore_rng

_LOADERS = (TrackedLoader, *(getattr(torch.utils.data, name) for name in ("DataLoader", "Sampler", "Dataset")))


def provider_for(name: str, obj: Any) -> StateProvider:
    """Returns the provider of a tracked object. Raises ConfigError for an object without a known kind of state."""
    if isinstance(obj, StateProvider):
        return obj
    if not isinstance(obj, torch.Tensor | dict | list):
        _refuse_signature(name, obj, "state_dict")
        _refuse_signature(name, obj, "load_state_dict", {})
    if isinstance(obj, torch.nn.Module):
        return ModuleProvider(obj)
    if isinstance(obj, torch.optim.Optimizer):
        return OptimizerProvider(obj)
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return LoaderProvider(obj) if isinstance(obj, _LOADERS) else StatefulProvider(obj)
    if isinstance(obj, torch.Tensor):
        return TensorProvider(obj)
    if type(obj) in (dict, list):
        return ContainerProvider(obj)
    raise ConfigError(
        f"track({name}=…): a {type(obj).__name__} has no state_dict()/load_state_dict(), and is no tensor, dict or "
        "list; give it these methods, or derive from lazyckpt.StateProvider"
    )


def _refuse_signature(name: str, obj: Any, method: str, *given: Any) -> None:
    """Raises ConfigError if ``obj`` has a ``method`` that cannot be called with these arguments: a save might succeed,
    and restore() would fail."""
    try:
        signature = inspect.signature(getattr(obj, method))
    except (AttributeError, TypeError, ValueError):  # there is none, or it is not written in Python
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        call = f"{type(obj).__name__}.{method}({'state' if given else ''})"
        raise ConfigError(
            f"track({name}=…): {call} cannot be called like this: {error}; derive from lazyckpt.StateProvider, whose "
            "methods call it as it needs"
        ) from None


class LoaderProvider(StatefulProvider):
    """A source of data with a state: a loader that ``track_loader`` wrapped, torchdata's StatefulDataLoader and the
    like, a sampler or a dataset. Each rank has its own."""

    def iterates(self, loader: Any) -> bool:
        return loader is self.obj or (isinstance(self.obj, TrackedLoader) and self.obj.wraps(loader))

    def landings(self, saved: Any) -> list[Landing]:
        if isinstance(self.obj, TrackedLoader):
            self.obj.check(saved)
        return []


class ContainerProvider(StateProvider):
    """A plain dict or list: restored by changing it in place, its tensors too where they fit."""

    def __init__(self, container: dict[Any, Any] | list[Any]) -> None:
        super().__init__()
        self._container = container

    def state(self) -> Any:
        return self._container

    def landings(self, saved: Any) -> list[Landing]:
        if type(saved) is not type(self._container):
            raise RestoreError(f"{describe(saved)} in the checkpoint, {describe(self._container)} tracked")
        live = dict(_items(self._container))
        return [
            Landing(value, live[key].detach())
            for key, value in _items(saved)
            if isinstance(value, torch.Tensor)
            and key in live
            and matches(value, live[key])
            and unfillable(live[key]) is None
        ]

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        merged = {k: self._container[k] if id(v) in landed else v for k, v in _items(saved)}
        self.load_state(merged if isinstance(saved, dict) else list(merged.values()))

    def load_state(self, state: Any) -> None:
        self._container.clear()
        if isinstance(self._container, dict):
            self._container.update(state)
        else:
            self._container.extend(state)


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


class RngProvider(StateProvider):
    """The global random number generators."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = KeptMemory()

    def state(self) -> Any:
        return capture_rng()

    def opcodes(self, table: StorageTable) -> bytes:
        return self.opcodes_of(self._memory.take(capture_rng()), table)

    def landings(self, saved: Any) -> list[Landing]:
        check_rng(saved)
        return []

    def load_state(self, state: Any) -> None:
        restore_rng(state)
