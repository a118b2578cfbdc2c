"""Names of tensors on the way in: renames them, and recognizes the prefixes that wrappers add."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from lazyckpt.errors import ConfigError

Rename = Mapping[str, "str | None"] | Callable[[str], "str | None"]
"""Prefixes and what replaces them, or a function from old to new names. None as a new name leaves the entry out."""

# What DistributedDataParallel, torch.compile, FSDP1 and activation checkpointing put into the names of parameters.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_MAX_PREFIXES = 8  # to try


def checked(rename: Any) -> Rename:
    """Returns ``rename``. Raises ConfigError if it is neither a mapping of prefixes nor a function."""
    if callable(rename):
        # A name is asked for twice: to choose what is read, and for what was read. It must be the same name.
        return functools.lru_cache(maxsize=None)(rename)
    if not isinstance(rename, Mapping):
        raise ConfigError(f"rename={rename!r}: expected prefixes with their replacements, or a function of a name")
    for old, new in rename.items():
        if not isinstance(old, str) or not (new is None or isinstance(new, str)):
            raise ConfigError(f"rename: {old!r}: {new!r}: expected a prefix and what replaces it, or None")
    return rename


def renamed(names: Iterable[str], rename: Rename) -> dict[str, str]:
    """Maps each name that stays to its new name.

    Of several prefixes that fit, the longest is replaced. Raises ConfigError if two names become the same one, or if
    ``rename`` returns something else than a name or None.
    """
    prefixes = [] if callable(rename) else sorted(rename.items(), key=lambda item: len(item[0]), reverse=True)

    def new_name(name: str) -> str | None:
        if callable(rename):
            return rename(name)
        for old, new in prefixes:
            if name.startswith(old):
                return None if new is None else new + name[len(old) :]
        return name

    result: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        new = new_name(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigError(f"rename: {name!r} becomes {new!r}: expected a name, or None to leave it out")
        if new in taken:
            raise ConfigError(f"rename: both {taken[new]!r} and {name!r} become {new!r}")
        taken[new] = name
        result[name] = new
    return result


def rename_state(state: Mapping[str, Any], rename: Rename) -> OrderedDict[str, Any]:
    """Returns a module's state dict under other names, with the versions of its modules. Raises ConfigError."""
    names = renamed(state, rename)
    result = OrderedDict((new, state[old]) for old, new in names.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        modules = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in names.items()}
        result._metadata = OrderedDict((modules.get(path, path), value) for path, value in versions.items())  # type: ignore[attr-defined]
    return result


def suggestion(saved: Collection[str], live: Collection[str]) -> str | None:
    """The ``rename`` that makes the saved names the live ones, as Python source; None if no prefix explains them.

    Recognizes one common prefix, on either side, and the words that wrappers put between names.
    """
    if set(saved) == set(live) or not saved or not live:
        return None
    for prefix in _prefixes(saved, live):
        if set(saved) == {prefix + name for name in live}:
            return f'{{"{prefix}": ""}}'
        if {prefix + name for name in saved} == set(live):
            return f'{{"": "{prefix}"}}'
    for word in _WRAPPERS:
        if {name.replace(word, "") for name in saved} == set(live):
            return f'lambda name: name.replace("{word}", "")'
    return None


def _prefixes(saved: Collection[str], live: Collection[str]) -> list[str]:
    """The wrappers' prefixes, and those by which a saved name is longer than a live one, or shorter."""
    found = [*_WRAPPERS, *(a + b for a in _WRAPPERS for b in _WRAPPERS if a != b)]
    for longer, shorter in ((saved, live), (live, saved)):
        tail = max(shorter, key=len)
        found += islice((name[: -len(tail)] for name in longer if name.endswith(f".{tail}")), _MAX_PREFIXES)
    return list(dict.fromkeys(found))
