"""Providers for the state of a training loop: modules, optimizers, schedulers, loaders, RNGs, plain containers.

Most of this file is about restoring: ``landings`` compares a checkpoint with the live state and says what does not fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lazyckpt.errors import ConfigError, RestoreError
from lazyckpt.providers.base import Landing, StorageTable
from lazyckpt.providers.data_loader import TrackedLoader
from lazyckpt.providers.names import suggestion
from lazyckpt.providers.objects import StateProvider, TensorProvider, describe, matches
from lazyckpt.providers.restorable import UnrestorableError
from lazyckpt.providers.rng import capture_rng, check_rng, restore_rng


def provider_for(name: str, obj: Any) -> StateProvider:
    """Returns the provider of a tracked object. Raises ConfigError for an object without a known kind of state."""
    if isinstance(obj, StateProvider):
        return obj
    if isinstance(obj, torch.nn.Module):
        return ModuleProvider(obj)
    if isinstance(obj, torch.optim.Optimizer):
        return OptimizerProvider(obj)
    if isinstance(obj, TrackedLoader):
        return LoaderProvider(obj)
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
        self.obj = obj

    def state(self) -> Any:
        return self.obj.state_dict()

    def load_state(self, state: Any) -> None:
        self.obj.load_state_dict(state)


class LoaderProvider(StatefulProvider):
    """A loader that ``track_loader`` wrapped."""

    def landings(self, saved: Any) -> list[Landing]:
        self.obj.check(saved)
        return []


class ModuleProvider(StatefulProvider):
    """A module: parameters and buffers are read straight into the live ones."""

    def __init__(self, module: torch.nn.Module, *, casts: bool = False) -> None:
        """``casts``: takes floating-point tensors of another dtype, too."""
        super().__init__(module)
        self._casts = casts

    def refuse_unrestorable(self, parts: dict[Any, Any], table: StorageTable) -> None:
        super().refuse_unrestorable(parts, table)
        skeleton, state = self._skeletons[None], parts[None]
        if not isinstance(state, Mapping) or (found := list(state)) == skeleton.accepted_keys:
            return
        if keys := self._unclaimed(state):
            others = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            raise UnrestorableError(keys[0], f"{_refusal_of(state[keys[0]])}{others}. {_TRACK_WHAT_TRAINS}")
        skeleton.accepted_keys = found

    def landings(self, saved: Any) -> list[Landing]:
        live = self.obj.state_dict()
        compare(saved, live, casts=self._casts)
        if keys := self._unclaimed(live):
            raise RestoreError("\n".join(f"{key}: {_refusal_of(saved[key])}" for key in keys))
        own = self._own_storages()
        return [
            Landing(saved[name], tensor)
            for name, tensor in live.items()
            if _views(tensor, own) and not (self._casts and saved[name].dtype is not tensor.dtype)
        ]

    def _own_storages(self) -> set[int]:
        return {
            t.untyped_storage()._cdata
            for tensors in (self.obj.parameters(), self.obj.buffers())
            for t in tensors
            if not is_lazy(t) and type(t.data) is torch.Tensor and t.layout is torch.strided and t.device.type != "meta"
        }

    def _unclaimed(self, state: Any) -> list[str]:
        """The keys of ``state`` that ``load_state_dict`` would call unexpected, unless their tensors are parameters or
        buffers under other names, which ``restore()`` reads in place, or a module may take them by code of its own."""
        if _loads_by_itself(self.obj, "load_state_dict") or not isinstance(state, Mapping):
            return []
        others = state.keys() - _claimed(self.obj)
        others |= {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.is_nested}
        keys = [key for key in others if isinstance(key, str) and not _has_custom_loader(self.obj, key)]
        if keys:
            own = self._own_storages()
            keys = [key for key in keys if not _views(state[key], own)]
        return sorted(keys)

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        if len(landed) > 0 and all(id(t) in landed for t in saved.values()) and not _has_load_hooks(self.obj):
            return
        for name, tensor in saved.items():
            saved[name] = landed.get(id(tensor), tensor)
        self.load_state(saved)


_TRACK_WHAT_TRAINS = (
    "Track only what trains: an object whose state_dict() returns it and whose load_state_dict() takes it back. For "
    "QLoRA these are get_peft_model_state_dict and set_peft_model_state_dict of PEFT"
)


def _refusal_of(value: Any) -> str:
    is_nested = isinstance(value, torch.Tensor) and value.is_nested
    why = "a nested tensor" if is_nested else "no parameter, buffer or extra state"
    return f"is in state_dict(), but load_state_dict() would refuse it: it is {why}"


def _views(tensor: Any, storages: set[int]) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.untyped_storage()._cdata in storages
    )


def _claimed(module: torch.nn.Module) -> set[str]:
    """The keys that torch's own ``load_state_dict`` of ``module`` takes."""
    keys = set()
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        passing = part._non_persistent_buffers_set
        saved = {name: value for name, value in part._buffers.items() if name not in passing}
        keys |= {f"{prefix}{name}" for name, value in (*part._parameters.items(), *saved.items()) if value is not None}
        if _loads_by_itself(part, "set_extra_state"):
            keys.add(f"{prefix}_extra_state")
    return keys


def _loads_by_itself(module: torch.nn.Module, method: str) -> bool:
    """Whether ``module`` has a ``method`` that is not torch's."""
    return method in vars(module) or getattr(type(module), method) is not getattr(torch.nn.Module, method)


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` does more than to copy tensors into tensors of the same names."""
    own = (_loads_by_itself(part, "set_extra_state") or _has_own_loader(part) for part in module.modules())
    return _loads_by_itself(module, "load_state_dict") or any(own)


def _has_own_loader(module: torch.nn.Module) -> bool:
    """Whether ``module`` reads its part of a state dict by other code than torch's."""
    # Batch norm's own loader only adds a counter that checkpoints of torch < 0.4.1 lack.
    usual = torch.nn.Module._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict
    return bool(
        module._load_state_dict_post_hooks
        or module._load_state_dict_pre_hooks
        or "_load_from_state_dict" in vars(module)
        or type(module)._load_from_state_dict not in usual
    )


def _has_custom_loader(module: torch.nn.Module, key: str) -> bool:
    """Whether a module on the way from ``module`` down to ``key`` may take the key by code of its own."""
    part: torch.nn.Module | None = module
    for word in key.split("."):
        if part is None or _has_own_loader(part):
            return part is not None
        part = part._modules.get(word)
    return False


class OptimizerProvider(StatefulProvider):
    """An optimizer: state that it has already is read in place, state that it lacks is allocated by the reader."""

    values_are_apart = True  # a learning rate that moves must not cost the moments their pickle

    def landings(self, saved: Any) -> list[Landing]:
        live = self.obj.state_dict()
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
            parameters |= dict(zip(saved_group["params"], self.obj.param_groups[number]["params"], strict=False))
        landings = []
        known = _PARAMETER_LIKE if _steps_as_torch(self.obj) else frozenset()
        for index, state in saved["state"].items():
            if not isinstance(state, dict) or index not in parameters:
                continue  # state of its own kind, which load_state_dict understands
            here = live["state"].get(index, {})
            for key, tensor in state.items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                if key in here and matches(here[key], tensor):
                    landings.append(Landing(tensor, here[key]))
                elif key in known and tensor.dim() > 0 and tensor.shape != parameters[index].shape:
                    problems.append(
                        f"state[{index}][{key!r}]: {describe(tensor)} in the checkpoint, but the parameter is "
                        f"{describe(parameters[index])}"
                    )
        if not problems and (why := self._refusal(saved)) is not None:
            problems.append(f"load_state_dict() would refuse it, as of an optimizer of another class: {why}")
        if problems:
            raise RestoreError("\n".join(problems))
        return landings

    def _refusal(self, saved: Any) -> str | None:
        """Why ``load_state_dict`` of torch's own classes would raise, as found on an optimizer that holds no data.

        None for other classes, and where code of the user's may change the state first."""
        kind: Any = type(self.obj)
        prepared = self.obj._optimizer_load_state_dict_pre_hooks or "load_state_dict" in vars(self.obj)
        if not f"{kind.__module__}.".startswith("torch.optim.") or prepared:
            return None
        empty = torch.empty(0, device="meta")
        groups = [{**g, "params": [torch.empty(0, device="meta") for _ in g["params"]]} for g in self.obj.param_groups]
        states = {
            key: {name: empty if isinstance(value, torch.Tensor) else value for name, value in state.items()}
            if isinstance(state, dict)
            else state
            for key, state in saved["state"].items()
        }
        trial = kind.__new__(kind)
        try:
            trial.__setstate__({"defaults": dict(self.obj.defaults), "state": {}, "param_groups": groups})
            trial.load_state_dict({**saved, "state": states})
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        except RuntimeError:
            pass  # a tensor without data was asked for its value, which says nothing about the real one
        return None

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        for state in saved["state"].values() if _is_of_torch(saved) else ():
            if isinstance(state, dict):
                for key, tensor in state.items():
                    state[key] = landed.get(id(tensor), tensor)
        self.load_state(saved)


def _steps_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` is that of an optimizer of torch, here or in the one that Accelerate has wrapped. Others keep
    tensors of another shape under the same names: GaLore's moments are of a low rank."""
    inner: Any = optimizer
    if type(optimizer).__module__ == "accelerate.optimizer":
        inner = inner.optimizer
    # A wrapper that torch puts around an inherited step has the module of what it wraps.
    return str(getattr(type(inner).step, "__module__", "")).startswith("torch.optim.")


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
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "exp_inf", "ax", "sum", "prev"),
    )
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
        live = dict(_items(self._container))
        return [
            Landing(value, live[key].detach())
            for key, value in _items(saved)
            if isinstance(value, torch.Tensor) and key in live and matches(value, live[key])
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


class RngProvider(StateProvider):
    """The global random number generators."""

    def state(self) -> Any:
        return capture_rng()

    def landings(self, saved: Any) -> list[Landing]:
        check_rng(saved)
        return []

    def load_state(self, state: Any) -> None:
        restore_rng(state)


_MAX_NAMES = 3  # in a proposal


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


def compare(saved: Any, live: Mapping[str, Any], *, casts: bool = False) -> None:
    """Raises RestoreError that tells every entry of a state dict that is missing, unexpected or of another shape, and
    the argument of ``restore()`` that helps. ``casts``: another floating-point dtype is no difference."""
    if not isinstance(saved, Mapping):
        raise RestoreError(f"expected a state dict, found {describe(saved)}")
    if (rename := suggestion(saved, live)) is not None:
        raise RestoreError(
            f"the names differ by a prefix alone ({next(iter(saved))} in the checkpoint, {next(iter(live))} in the "
            f"model): restore(rename={rename})"
        )
    missing = [f"{name}: not in the checkpoint" for name in live if name not in saved]
    unexpected = [f"{name}: in the checkpoint, but not in the model" for name in saved if name not in live]
    others = [
        name
        for name, value in live.items()
        if name in saved
        and isinstance(value, torch.Tensor)
        and not is_lazy(value)  # takes its shape from what is loaded
        and not matches(saved[name], value)
        and not (casts and _differ_in_dtype(saved[name], value))
    ]
    castable = [name for name in others if _differ_in_dtype(saved[name], live[name])]
    reshaped = [name for name in others if name not in castable]
    problems = missing + unexpected
    problems += [
        f"{name}: {describe(saved[name])} in the checkpoint, {describe(live[name])} in the model" for name in reshaped
    ]
    for dtypes, count in Counter((saved[name].dtype, live[name].dtype) for name in castable).items():
        was, now = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        problems.append(f"{count} of {len(live)} entries are {was} in the checkpoint and {now} in the model")
    if castable:
        problems.append("restore(cast=True) converts the dtype")
    if reshaped:
        names = ", ".join(f'"{name}": None' for name in reshaped[:_MAX_NAMES]) + ", …" * (len(reshaped) > _MAX_NAMES)
        problems.append(f"restore(rename={{{names}}}, strict=False) leaves out what has another shape")
    elif missing or unexpected:
        problems.append("restore(strict=False) takes over the entries that both have")
    if problems:
        raise RestoreError("\n".join(problems))


def _differ_in_dtype(saved: Any, live: Any) -> bool:
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
