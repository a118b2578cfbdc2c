"""Chooses the state that ``restore()`` takes from a checkpoint: which parts, under which names, in which dtype."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lazyckpt.errors import ConfigError, RestoreError
from lazyckpt.providers.base import Landing
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.global_state import by_number, parameter_names
from lazyckpt.providers.kinds import other_kinds, refuse_other_kinds
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.optimizer import OptimizerProvider, has_torch_layout
from lazyckpt.providers.rename import Rename, checked, rename_state, renamed, suggestion
from lazyckpt.providers.training import LoaderProvider
from lazyckpt.reading.restored import Restored
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.stores.store import AnyPath
from lazyckpt.warn import warn

_MAX_NAMES = 2  # of the entries of a part, in a message
_LOADER_KEYS = {"yielded", "start", "now"}  # of every version


@dataclass(frozen=True)
class Fit:
    """The arguments of ``restore()`` that choose state; checked by ``of``."""

    only: frozenset[str] | None = None
    strict: bool = True
    parts: Mapping[str, str] | None = None  # names in the checkpoint, by names of tracked state
    rename: Rename | None = None
    cast: bool = False
    loader: bool = True

    def told(self) -> list[str]:
        """The arguments that are not the default, as text. A function has no text by which ranks could compare it."""
        only = None if self.only is None else sorted(self.only, key=str)
        rename = "a function" if callable(self.rename) else self.rename
        arguments = {"only": only, "strict": self.strict, "parts": self.parts, "rename": rename, "cast": self.cast}
        arguments["loader"] = self.loader
        return [f"{name}={value}" for name, value in arguments.items() if value != getattr(Fit, name)]

    @classmethod
    def of(
        cls,
        tracked: CompositeProvider,
        *,
        only: Any = None,
        strict: bool = True,
        parts: Any = None,
        rename: Any = None,
        cast: bool = False,
        loader: bool = True,
    ) -> Fit:
        """Raises ConfigError for invalid arguments."""
        if isinstance(only, str):
            only = [only]
        if only is not None:
            try:
                only = frozenset(only)
            except TypeError:
                raise ConfigError(f'restore: only={only!r}: expected names, such as ["model"]') from None
            if not only:
                raise ConfigError("restore: only=[] restores nothing")
            if unknown := sorted(only - tracked.parts.keys(), key=str):
                there = ", ".join(tracked.parts)
                raise ConfigError(f"restore: only={unknown[0]!r}: nothing of that name is tracked; there is: {there}")
            if not loader and all(isinstance(tracked.parts[name], LoaderProvider) for name in only):
                raise ConfigError("restore: only a loader, and loader=False, restores nothing")
        if parts is not None:
            _check_parts(parts, tracked)
        return cls(only, strict, parts, None if rename is None else checked(rename), cast, loader)


def _check_parts(parts: Any, tracked: CompositeProvider) -> None:
    """Raises ConfigError if these are no names of parts in a checkpoint by names of tracked state."""
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in (*parts, *parts.values())):
        raise ConfigError(f'restore: parts={parts!r}: expected tracked names with saved ones, {{"net": "model"}}')
    if unknown := [name for name in parts if name not in tracked.parts]:
        there = ", ".join(tracked.parts)
        raise ConfigError(f"restore: parts: nothing is tracked as {unknown[0]!r}; there is: {there}")


class Fitting:
    """Cuts the state of one checkpoint down to what fits into the tracked state."""

    def __init__(self, tracked: CompositeProvider, fit: Fit, checkpoint: Checkpoint) -> None:
        """Raises ConfigError if two parts would take the same saved part."""
        self.provider = tracked  # of the parts that are restored
        self._tracked = tracked
        self._fit = fit
        self._checkpoint = checkpoint
        self._left: frozenset[str] = frozenset()
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self.sources = {name: (fit.parts or {}).get(name, name) for name in self.selected()}
        """The names in the checkpoint, by names of the tracked state that is to be restored."""
        for name, source in self.sources.items():
            if twice := [other for other in self.sources if self.sources[other] == source and other != name]:
                raise ConfigError(
                    f"restore: parts: {name!r} and {twice[0]!r} would both take {source!r}; leave one out with only=[…]"
                )
        self._kinds = self._as_tracked(checkpoint.kinds)
        self.saved: Any = None  # all of it, once ``choose`` or ``landings`` was called
        self.by_name = False
        """Whether the state of optimizers is by the names of parameters, as in a sharded folder, and not by number."""

    @property
    def fit(self) -> Fit:
        return self._fit

    @property
    def saved_kinds(self) -> Mapping[str, str]:
        return self._checkpoint.kinds

    def tracked(self) -> Mapping[str, StateProvider]:
        return self._tracked.parts

    def again(self, fit: Fit) -> Fitting:
        """The same state with other arguments."""
        other = Fitting(self._tracked, fit, self._checkpoint)
        other._left, other.by_name = self._left, self.by_name
        return other

    def landings(self, tree: Any) -> list[Landing]:
        """Checks the part that ``choose`` has chosen, see ``CompositeProvider.landings``. Raises RestoreError, too, if
        tracked state is of another class than when it was saved."""
        if self.saved is None:
            self.saved = tree
        if self._fit.strict:
            refuse_other_kinds(self._kinds, self.selected())
        return self.provider.landings(tree)

    def leave(self, names: Iterable[str]) -> None:
        """Leaves these parts as they are, even if the checkpoint has them. Call it before ``choose``."""
        self._left = frozenset(names)

    @property
    def choose(self) -> Callable[[Any], Any] | None:
        """The function that chooses from the saved state; None if all of it is taken unchanged."""
        return None if self._fit == Fit() and not self._left and not self.by_name else self._choose

    def selected(self) -> dict[str, StateProvider]:
        """The tracked state that is to be restored."""
        fit = self._fit
        return {
            name: part
            for name, part in self._tracked.parts.items()
            if (fit.only is None or name in fit.only)
            and (fit.loader or not isinstance(part, LoaderProvider))
            and name not in self._left
        }

    def _as_tracked(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The saved state by the names of the tracked state that takes it."""
        taken = {source: name for name, source in self.sources.items()}
        # If tracked state takes another part, nothing takes the saved part of its own name.
        return {taken.get(key, f"{key} as it was saved" if key in self.sources else key): saved[key] for key in saved}

    def restored(self) -> Restored:
        """Describes the restored state; call it after the restore. Warns of state that another class has saved."""
        if differing := other_kinds(self._kinds, self.provider.parts):
            warn(
                f"restored the state of another class: {', '.join(differing)}; training may fail or go wrong; "
                "leave it out with restore(only=[…])"
            )
        step, path, parts = self._checkpoint.step, self._checkpoint.path, tuple(self.provider.parts)
        return Restored(step, path, parts, tuple(self._missing), tuple(self._unexpected))

    def _choose(self, saved: Any) -> Any:
        """Returns the part of ``saved`` that is restored. ``provider.landings`` finds entries that do not fit. Raises
        ConfigError for an invalid ``rename``."""
        fit, tracked = self._fit, self._tracked.parts
        self.provider = CompositeProvider()
        self.provider.parts = parts = self.selected()
        self.saved = saved
        if type(saved) is not dict:
            return saved
        saved = self._as_tracked(saved)
        others = [name for name in saved if name not in tracked] if fit.only is None else []
        if not fit.loader:
            others = [name for name in others if not _is_position(saved[name])]
        if not fit.strict:
            self._missing = [name for name in parts if name not in saved]
            self._unexpected, others = others, []
            self.provider.parts = parts = {name: part for name, part in parts.items() if name in saved}
        chosen = {name: state for name, state in saved.items() if name in parts or name in others}
        if not fit.strict:
            self._refuse_to_take_no_weights(saved)
        for name, part in parts.items():
            if isinstance(part, ModuleProvider) and isinstance(chosen.get(name), dict):
                chosen[name] = self._fit_module(name, chosen[name], part.obj)
                parts[name] = ModuleProvider(part.obj, casts=True) if fit.cast else part
        for name, part in parts.items() if self.by_name else ():
            if isinstance(part, OptimizerProvider) and has_torch_layout(chosen.get(name)):
                sources = {self.sources.get(one, one): its for one, its in tracked.items()}
                chosen[name] = by_number(chosen[name], part.obj, parameter_names(sources))
        return chosen

    def _refuse_to_take_no_weights(self, saved: dict[str, Any]) -> None:
        """Raises RestoreError, which lists both sides, if there are modules to be restored and the checkpoint has
        nothing of any of them."""
        modules = {name: part.obj for name, part in self.selected().items() if isinstance(part, ModuleProvider)}
        live: dict[str, Any] = {name: module.state_dict() for name, module in modules.items()}
        if not any(self._takes(saved[name], live[name]) for name in live if name in saved) and any(live.values()):
            here = [f"{name} ({_entries(state)})" for name, state in live.items()]
            there = [f"{name} ({_entries(state)})" for name, state in saved.items()]
            raise RestoreError(
                f"the checkpoint has no weights for the tracked state: tracked is {', '.join(here)}; "
                f"the checkpoint has {', '.join(there)}"
            )

    def _takes(self, saved: Any, live: Any) -> bool:
        """Whether a module with the state ``live`` takes something of ``saved``."""
        if not isinstance(saved, dict) or not isinstance(live, Mapping) or not live:
            return True  # which its provider judges
        names = saved if self._fit.rename is None else renamed(saved, self._fit.rename).values()
        return not live.keys().isdisjoint(names) or suggestion(saved, live) is not None

    def _fit_module(self, name: str, state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
        if self._fit.strict and self._fit.rename is None:
            return state
        state = rename_state(state, self._fit.rename or {})  # a new one
        if self._fit.strict:
            return state
        live = module.state_dict()
        if suggestion(state, live) is not None:
            return state  # nothing fits, and the error says why
        unexpected = [key for key in state if key not in live]
        self._missing += [f"{name}.{key}" for key in live if key not in state]
        self._unexpected += [f"{name}.{key}" for key in unexpected]
        for key in unexpected:
            del state[key]
        for key, value in live.items():
            state.setdefault(key, value)  # load_state_dict() then copies it onto itself
        return state


def misfit(path: AnyPath, error: Exception, hint: str | None = None) -> RestoreError:
    """The error for a checkpoint that does not fit. ``error``: that of a provider. ``hint``: a call that would
    succeed."""
    expected = isinstance(error, RestoreError)
    lines = textwrap.indent(str(error) if expected else f"{type(error).__name__}: {error}", "  ")
    told = "" if hint is None else f"\n  {hint} takes what fits"
    return RestoreError(f"{path} does not fit the tracked state; nothing was restored:\n{lines}{told}")


def hand_over(
    provider: CompositeProvider | StateProvider, saved: Any, landed: dict[int, torch.Tensor], path: AnyPath
) -> None:
    """Gives the tracked objects their state, once it is read."""
    try:
        provider.load(saved, landed)
    except RestoreError as error:
        what = f"{path} was not restored, the tracked state is undefined now: {error}"
        raise RestoreError(what) from error.__cause__ or error


def _entries(state: Any) -> str:
    """A few names of the entries of a state, for a message."""
    if not isinstance(state, Mapping):
        return type(state).__name__
    names = list(map(str, state))
    return ", ".join(names[:_MAX_NAMES]) + ", …" * (len(names) > _MAX_NAMES) if names else "nothing"


def _is_position(state: Any) -> bool:
    """Whether this is the state of a tracked loader."""
    return isinstance(state, dict) and state.keys() >= _LOADER_KEYS
