"""Providers for what a training loop holds: modules, optimizers, schedulers, loaders, generators, plain containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lazyckpt.errors import ConfigError, RestoreError
from lazyckpt.providers.base import Landing, Provider
from lazyckpt.providers.objects import StateProvider, TensorProvider, describe
from lazyckpt.providers.rng import capture_rng, restore_rng


def provider_for(name: str, obj: Any) -> Provider:
    """The provider of a tracked object. Raises ConfigError for one whose state nobody can tell."""
    if isinstance(obj, Provider):
        return obj
    if isinstance(obj, torch.nn.Module):
        return ModuleProvider(obj)
    if isinstance(obj, torch.optim.Optimizer):
        return OptimizerProvider(obj)
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return StatefulProvider(obj)
    if isinstance(obj, torch.Tensor):
        return TensorProvider(obj)
    if type(obj) in (dict, list):
        return ContainerProvider(obj)
    raise ConfigError(
        f"track({name}=…): a {type(obj).__name__} has no state_dict()/load_state_dict(), and is no tensor, dict or "
        "list; give it these methods, or derive from lazyckpt.StateProvider"
    )


class StatefulProvider(StateProvider):
    """Anything with ``state_dict()`` and ``load_state_dict()``: schedulers, loaders, scalers, metrics."""

    def __init__(self, obj: Any) -> None:
        super().__init__()
        self._obj = obj

    def state(self) -> Any:
        return self._obj.state_dict()

    def load_state(self, state: Any) -> None:
        self._obj.load_state_dict(state)


class ModuleProvider(StateProvider):
    """A module: parameters and buffers are read straight into the live ones."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def state(self) -> Any:
        return self.module.state_dict()

    def landings(self, saved: Any) -> list[Landing]:
        live = self.module.state_dict()
        compare(saved, live)
        own = {
            t.untyped_storage()._cdata
            for tensors in (self.module.parameters(), self.module.buffers())
            for t in tensors
            if not is_lazy(t) and type(t.data) is torch.Tensor and t.layout is torch.strided and t.device.type != "meta"
        }
        return [
            Landing(saved[name], tensor)
            for name, tensor in live.items()
            if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata in own
        ]

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        if len(landed) > 0 and all(id(t) in landed for t in saved.values()) and not _has_load_hooks(self.module):
            return
        for name, tensor in saved.items():
            saved[name] = landed.get(id(tensor), tensor)
        self.load_state(saved)

    def load_state(self, state: Any) -> None:
        self.module.load_state_dict(state)


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` does more than to copy tensors into tensors of the same names."""
    plain = torch.nn.Module
    # Batch norm's own loader only adds a counter that checkpoints of torch < 0.4.1 lack.
    plain_loaders = plain._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict
    return type(module).load_state_dict is not plain.load_state_dict or any(
        m._load_state_dict_post_hooks
        or m._load_state_dict_pre_hooks
        or type(m).set_extra_state is not plain.set_extra_state
        or type(m)._load_from_state_dict not in plain_loaders
        for m in module.modules()
    )


class OptimizerProvider(StateProvider):
    """An optimizer: state that it has already is read in place, state that it lacks is allocated by the reader."""

    values_are_apart = True  # a learning rate that moves must not cost the moments their pickle

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def state(self) -> Any:
        return self.optimizer.state_dict()

    def landings(self, saved: Any) -> list[Landing]:
        live = self.optimizer.state_dict()
        if not _is_of_torch(live):
            return []  # a state of its own kind, which load_state_dict understands
        if not _is_of_torch(saved):
            raise RestoreError(f"not the state of an optimizer: {describe(saved)}")
        problems = []
        groups, saved_groups = live["param_groups"], saved["param_groups"]
        if len(groups) != len(saved_groups):
            problems.append(f"{len(saved_groups)} parameter groups in the checkpoint, {len(groups)} in the optimizer")
        parameters: dict[Any, torch.Tensor] = {}
        for number, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=False)):
            if len(group["params"]) != len(saved_group["params"]):
                problems.append(
                    f"parameter group {number}: {len(saved_group['params'])} parameters in the checkpoint, "
                    f"{len(group['params'])} in the optimizer"
                )
            parameters |= dict(zip(saved_group["params"], self.optimizer.param_groups[number]["params"], strict=False))
        landings = []
        # Other optimizers keep tensors of another shape under these names: GaLore's moments are of a low rank.
        known = _PARAMETER_LIKE if type(self.optimizer).__module__.startswith("torch.optim.") else frozenset()
        for index, state in saved["state"].items():
            if not isinstance(state, dict) or index not in parameters:
                continue  # state of its own kind, which load_state_dict understands
            here = live["state"].get(index, {})
            for key, tensor in state.items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                if key in here and describe(here[key]) == describe(tensor):
                    landings.append(Landing(tensor, here[key]))
                elif key in known and tensor.dim() > 0 and tensor.shape != parameters[index].shape:
                    problems.append(
                        f"state[{index}][{key!r}]: {describe(tensor)} in the checkpoint, but the parameter is "
                        f"{describe(parameters[index])}"
                    )
        if problems:
            raise RestoreError("\n".join(problems))
        return landings

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        for state in saved["state"].values() if _is_of_torch(saved) else ():
            if isinstance(state, dict):
                for key, tensor in state.items():
                    state[key] = landed.get(id(tensor), tensor)
        self.load_state(saved)

    def load_state(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def _is_of_torch(state: Any) -> bool:
    """Whether a state is laid out as that of torch's own optimizers."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and isinstance(state.get("state"), dict)
    )


# State that has its parameter's shape, in torch's own optimizers.
_PARAMETER_LIKE = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_inf",
        "ax",
        "sum",
        "prev",
    ]
)


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
        return [
            Landing(value, self._container[key].detach())
            for key, value in _items(saved)
            if isinstance(value, torch.Tensor) and self._fits(key, value)
        ]

    def _fits(self, key: Any, value: torch.Tensor) -> bool:
        live = dict(_items(self._container)).get(key)
        return isinstance(live, torch.Tensor) and describe(live) == describe(value)

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        merged = {k: self._container[k] if id(v) in landed else v for k, v in _items(saved)}
        self.load_state(merged if isinstance(saved, dict) else list(merged.values()))

    def load_state(self, state: Any) -> None:
        self._container.clear()
        if isinstance(self._container, dict):
            self._container.update(state)
        else:
            self._container.extend(state)


class RngProvider(StateProvider):
    """The global random number generators."""

    def state(self) -> Any:
        return capture_rng()

    def load_state(self, state: Any) -> None:
        restore_rng(state)


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


def compare(saved: Any, live: Mapping[str, Any]) -> None:
    """Raises RestoreError that lists every entry of a state dict that is missing, unexpected or of another shape."""
    if not isinstance(saved, Mapping):
        raise RestoreError(f"expected a state dict, found {describe(saved)}")
    problems = [f"{name}: not in the checkpoint" for name in live if name not in saved]
    problems += [f"{name}: in the checkpoint, but not in the model" for name in saved if name not in live]
    problems += [
        f"{name}: {describe(saved[name])} in the checkpoint, {describe(value)} in the model"
        for name, value in live.items()
        if name in saved
        and isinstance(value, torch.Tensor)
        and not is_lazy(value)  # takes its shape from what is loaded
        and describe(saved[name]) != describe(value)
    ]
    if problems:
        raise RestoreError("\n".join(problems))
