"""The provider of an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from lazyckpt.errors import RestoreError
from lazyckpt.providers.base import Landing
from lazyckpt.providers.objects import StatefulProvider, describe, matches


class OptimizerProvider(StatefulProvider):
    """An optimizer: state that it has already is read in place, state that it lacks is allocated by the reader."""

    values_are_apart = True  # a learning rate that moves must not cost the moments their pickle

    def landings(self, saved: Any) -> list[Landing]:
        live = self.obj.state_dict()
        if not is_as_torchs(self.obj, live):
            return []  # a state of its own kind, which load_state_dict understands
        if not has_torch_layout(saved):
            raise RestoreError(f"not the state of an optimizer: {describe(saved)}")
        problems = []
        parameters_here = groups_of(self.obj)
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
            parameters |= dict(zip(saved_group["params"], parameters_here[number]["params"], strict=False))
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
        """Returns why ``load_state_dict`` of torch's own classes would raise, as found on an optimizer without data.

        None for other classes, and where code of the user's may change the state first."""
        kind: Any = type(self.obj)
        if not f"{kind.__module__}.".startswith("torch.optim."):
            return None
        # Not even of torch's classes does every object have the attributes that Optimizer.__init__ gives it.
        if "load_state_dict" in vars(self.obj) or getattr(self.obj, "_optimizer_load_state_dict_pre_hooks", None):
            return None
        empty = torch.empty(0, device="meta")
        groups = [{**g, "params": [torch.empty(0, device="meta") for _ in g["params"]]} for g in self.obj.param_groups]
        states = {}
        tried = set()
        for key, state in saved["state"].items():
            if isinstance(state, dict):
                state = {name: empty if isinstance(value, torch.Tensor) else value for name, value in state.items()}
                if all(value is empty for value in state.values()):
                    if (names := tuple(state)) in tried:
                        continue  # without data, it equals one that was tried
                    tried.add(names)
            states[key] = state
        trial = kind.__new__(kind)
        try:
            trial.__setstate__(
                {"defaults": dict(getattr(self.obj, "defaults", {})), "state": {}, "param_groups": groups}
            )
            trial.load_state_dict({**saved, "state": states})
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        except RuntimeError:
            pass  # a tensor without data was asked for its value, which says nothing about the real one
        return None

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        for state in saved["state"].values() if has_torch_layout(saved) else ():
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
    # A wrapper that torch puts around an inherited step has the module of the wrapped function.
    return str(getattr(type(inner).step, "__module__", "")).startswith("torch.optim.")


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer; none if it does not show them, as a wrapper that never ran
    ``Optimizer.__init__`` may not."""
    groups = getattr(optimizer, "param_groups", None)
    return groups if isinstance(groups, list) else []


def is_as_torchs(optimizer: Any, state: Any) -> bool:
    """Whether ``state``, that of ``optimizer``, is laid out as torch's and numbers the parameters that it shows."""
    return has_torch_layout(state) and [len(group["params"]) for group in state["param_groups"]] == [
        len(group["params"]) for group in groups_of(optimizer)
    ]


def has_torch_layout(state: Any) -> bool:
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
