"""Finds the states of optimizers in two saved objects, and brings them under the same names.

``torch.optim`` numbers its parameters; a sharded checkpoint and torch's ``get_optimizer_state_dict`` name them. Where
the parameter groups list the names, in the order of the numbers, they tell which is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 4  # of an optimizer's state in a checkpoint; a hostile object may hold itself

_Groups = list[list[Any]]  # the parameters of each group


def align(a: Any, b: Any, path: str = "the whole", depth: int = 0) -> tuple[Any, Any, list[str]]:
    """Returns both objects, with names where one had numbers, and a sentence for each optimizer whose parameters are
    numbered in one of them and named in the other, if nothing tells which is which."""
    groups_a, groups_b = _groups(a), _groups(b)
    if _are_numbers(groups_a) and not _are_numbers(groups_b):
        named, why = _named(a, groups_a, groups_b)
        return named, b, [f"{path}: the parameters have numbers in A, and names in B; {why}"] if why else []
    if _are_numbers(groups_b) and not _are_numbers(groups_a):
        named, why = _named(b, groups_b, groups_a)
        return a, named, [f"{path}: the parameters have names in A, and numbers in B; {why}"] if why else []
    notes: list[str] = []
    pairs: list[tuple[Any, Any, Any]] = []
    if depth < _MAX_DEPTH and groups_a is None and isinstance(a, Mapping) and isinstance(b, Mapping):
        a, b = dict(a), dict(b)
        pairs = [(key, a[key], b[key]) for key in a if key in b]
    elif depth < _MAX_DEPTH and type(a) is type(b) is list:
        a, b = list(a), list(b)
        pairs = [(number, *both) for number, both in enumerate(zip(a, b, strict=False))]
    for key, inner_a, inner_b in pairs:
        inside = str(key) if depth == 0 else f"{path}.{key}"
        a[key], b[key], more = align(inner_a, inner_b, inside, depth + 1)
        notes += more
    return a, b, notes


def _groups(value: Any) -> _Groups | None:
    """The parameters of an optimizer's state by group; None if this is none. It has no state before its first step."""
    if not isinstance(value, Mapping) or not isinstance(value.get("param_groups"), list):
        return None
    groups: list[Any] = [isinstance(group, Mapping) and group.get("params") for group in value["param_groups"]]
    return groups if groups and all(type(params) is list for params in groups) else None


def _are_numbers(groups: _Groups | None) -> bool:
    return groups is not None and all(type(number) is int for params in groups for number in params)


def _named(state: Any, numbers: _Groups | None, names: _Groups | None) -> tuple[Any, str]:
    """``state`` by names, and "" if that is done, or why it is not."""
    if numbers is None or names is None:
        return state, "no parameter groups say which is which"
    if list(map(len, numbers)) != list(map(len, names)) or not all(type(n) is str for group in names for n in group):
        return state, "the parameter groups differ, so they do not say which is which"
    of = {
        str(number): name
        for group, others in zip(numbers, names, strict=True)
        for number, name in zip(group, others, strict=True)
    }
    told = {**state, "param_groups": list(state["param_groups"])}
    if isinstance(state.get("state"), Mapping):
        told["state"] = {of.get(str(key), key): value for key, value in state["state"].items()}
    for at, (group, others) in enumerate(zip(state["param_groups"], names, strict=True)):
        told["param_groups"][at] = {**group, "params": others}
    return told, ""
