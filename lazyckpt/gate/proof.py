"""The facts that a proof about an optimizer's ``step`` (closure_proof.py) rests on. It fails once one has changed."""

from __future__ import annotations

import builtins
import inspect
from types import CodeType, FunctionType
from typing import Any

# Methods of torch's Optimizer that only read; older versions have the second one.
PURE_METHODS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")


class Proof:
    """The facts of a proof: names that may be bound to something else later."""

    def __init__(self) -> None:
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._of_class: list[tuple[type[Any], str, Any]] = []
        self._codes: list[tuple[FunctionType, CodeType]] = []
        self._flags: list[str] = []

    def resolve(self, names: dict[str, Any], name: str) -> Any:
        found = names[name] if name in names else vars(builtins)[name]
        self._names.append((names, name, found))
        return found

    def of_class(self, kind: type[Any], name: str) -> Any:
        found = inspect.getattr_static(kind, name)
        self._of_class.append((kind, name, found))
        return found

    def code_of(self, function: FunctionType) -> CodeType:
        self._codes.append((function, function.__code__))
        return function.__code__

    def flag(self, name: str) -> None:
        """Notes that the code asks whether ``param_groups[0][name]`` is true, which runs no user code if all parts are
        plain."""
        self._flags.append(name)

    def holds(self, optimizer: Any) -> bool:
        own = getattr(optimizer, "__dict__", {})
        return (
            all(names.get(name, vars(builtins).get(name)) is found for names, name, found in self._names)
            and all(inspect.getattr_static(kind, name) is found for kind, name, found in self._of_class)
            and all(function.__code__ is code for function, code in self._codes)
            and own.keys().isdisjoint(PURE_METHODS)
            and all(_is_flag(optimizer, own.get("param_groups"), name) for name in self._flags)
        )


def _is_flag(optimizer: Any, groups: Any, name: str) -> bool:
    return (
        inspect.getattr_static(type(optimizer), "param_groups", None) is None
        and type(groups) is list
        and len(groups) > 0
        and type(groups[0]) is dict
        and type(groups[0].get(name)) is bool
    )
