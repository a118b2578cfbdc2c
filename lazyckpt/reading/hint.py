"""Finds the arguments with which ``restore()`` takes a checkpoint that does not fit as it was called.

Several differences need several arguments, and one at a time each call would fail with the next one. So the arguments
are found together, and tried on the shapes of the saved state, before the error names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lazyckpt.providers.kinds import kinds_of
from lazyckpt.providers.module import ModuleProvider, differ_in_dtype
from lazyckpt.providers.objects import StateProvider, matches
from lazyckpt.providers.optimizer import OptimizerProvider, has_torch_layout
from lazyckpt.providers.rename import WithoutWord, likeliest, renamed
from lazyckpt.providers.training import LoaderProvider
from lazyckpt.reading.fit import Fit, Fitting


def hint(fitting: Fitting, saved: Any) -> str | None:
    """The call that restores the fitting parts of ``saved``, the whole state, as Python source; None if none was
    found."""
    try:
        fit = _Search(fitting, saved).fit() if type(saved) is dict else None
        source = None if fit is None or fit == fitting.fit else _source(fit)
    except Exception:  # code of a provider, or a foreign state: the error itself names the problem
        return None
    return source if source is None or len(source) <= _MAX_LENGTH else None


_MAX_LENGTH = 2000  # of a call; a longer one would not be typed


class _Search:
    def __init__(self, fitting: Fitting, saved: dict[str, Any]) -> None:
        self._fitting = fitting
        self._saved = saved
        self._parts = dict(fitting.selected())
        self._fit = fitting.fit

    def fit(self) -> Fit | None:
        """Returns the arguments, if the checkpoint fits with them."""
        missing = self._name_parts()
        self._fit_modules()
        self._fit = replace(self._fit, strict=self._fit.strict and not missing and not self._unexpected())
        left = self._failing()
        if any(isinstance(part, LoaderProvider) for part in left.values()):
            self._fit = replace(self._fit, loader=False)
        if not all(isinstance(part, LoaderProvider) for part in left.values()):
            only = [name for name in self._parts if name not in left and name not in missing]
            modules = [name for name, part in self._parts.items() if isinstance(part, ModuleProvider)]
            if not only or (modules and not set(modules) & set(only)):
                return None  # nothing would be restored
            self._fit = replace(self._fit, only=frozenset(only))
        return self._fit if self._does(self._fit) else None

    def _source_of(self, name: str) -> str:
        return (self._fit.parts or {}).get(name, name)

    def _name_parts(self) -> list[str]:
        """Looks for parts that were saved under another name. Returns the parts that the checkpoint lacks."""
        missing = [name for name in self._parts if self._source_of(name) not in self._saved]
        taken = {self._source_of(name) for name in self._parts}
        for name in list(missing):
            found = max((self._likeness(name, key), key) for key in ("", *(self._saved.keys() - taken)))
            if found[0] > 0:
                taken.add(found[1])
                missing.remove(name)
                self._fit = replace(self._fit, parts={**(self._fit.parts or {}), name: found[1]})
        return missing

    def _likeness(self, name: str, key: str) -> float:
        """How much of a part matches the state that was saved as ``key``."""
        part, state = self._parts[name], self._saved.get(key)
        if isinstance(part, OptimizerProvider):
            kinds = kinds_of({name: part})
            return float(has_torch_layout(state) and kinds.get(name) == self._fitting.saved_kinds.get(key))
        if isinstance(part, ModuleProvider) and isinstance(state, Mapping) and state:
            live = part.obj.state_dict()
            shared = live.keys() & set(renamed(state, likeliest(state, live) or {}).values())
            return len(shared) / max(len(live), len(state))
        return 0.0

    def _fit_modules(self) -> None:
        fit = self._fit
        rename, cast, strict = fit.rename, fit.cast, fit.strict
        for name, part in self._parts.items():
            state = self._saved.get(self._source_of(name))
            if not isinstance(part, ModuleProvider) or not isinstance(state, Mapping):
                continue
            live = part.obj.state_dict()
            if fit.rename is None and (found := likeliest(state, live)) is not None:
                both = isinstance(found, dict) and isinstance(rename, dict)
                rename = {**rename, **found} if both else found  # type: ignore[dict-item]
            names = renamed(state, rename or {})
            strict = strict and set(names.values()) == live.keys()
            for old, new in names.items():
                if not isinstance(live.get(new), torch.Tensor) or is_lazy(live[new]) or matches(state[old], live[new]):
                    continue
                if differ_in_dtype(state[old], live[new]):
                    cast = True
                else:
                    rename, strict = _leaving_out(rename, old), False
        self._fit = replace(fit, rename=rename, cast=cast, strict=strict)

    def _unexpected(self) -> list[str]:
        if self._fit.only is not None:
            return []
        taken = {self._source_of(name) for name in self._parts}
        left = {self._source_of(name) for name, part in self._fitting.tracked().items() if name not in self._parts}
        return [key for key in self._saved if key not in taken and key not in left]

    def _failing(self) -> dict[str, StateProvider]:
        """The parts that do not take their state with any arguments."""
        failing = {}
        for name, part in self._parts.items():
            alone = replace(self._fit, only=frozenset([name]), strict=isinstance(part, OptimizerProvider))
            if self._source_of(name) in self._saved and not self._does(alone):
                failing[name] = part
        return failing

    def _does(self, fit: Fit) -> bool:
        trial = self._fitting.again(fit)
        try:
            trial.landings(self._saved if trial.choose is None else trial.choose(self._saved))
        except Exception:
            return False
        return True


def _leaving_out(rename: Any, name: str) -> Any:
    if isinstance(rename, WithoutWord):
        return WithoutWord(rename.word, (*rename.left_out, name))
    if callable(rename):
        raise ValueError("a function of the user's")
    return {**(rename or {}), name: None}


def _source(fit: Fit) -> str:
    spelled: dict[str, Callable[[Any], str]] = {
        "only": lambda only: json.dumps(sorted(only)),
        "strict": str,
        "parts": _spelled,
        "rename": lambda rename: str(rename) if callable(rename) else _spelled(rename),
        "cast": str,
        "loader": str,
    }
    if callable(fit.rename) and not isinstance(fit.rename, WithoutWord):
        raise ValueError("a function of the user's")
    told = [(name, getattr(fit, name)) for name in spelled if getattr(fit, name) != getattr(Fit, name)]
    return f"restore({', '.join(f'{name}={spelled[name](value)}' for name, value in told)})"


def _spelled(names: Mapping[str, str | None]) -> str:
    quoted = (f"{json.dumps(old)}: {'None' if new is None else json.dumps(new)}" for old, new in names.items())
    return f"{{{', '.join(quoted)}}}"
