"""Names of tensors on the way in: renames them, and recognizes the prefixes that wrappers add."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lazyckpt.errors import ConfigError

Rename = Mapping[str, "str | None"] | Callable[[str], "str | None"]
"""Prefixes and their replacements, or a function from old to new names. None as a new name leaves the entry out."""

# Words that DistributedDataParallel, torch.compile, FSDP1 and activation checkpointing put into parameter names.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_MAX_PREFIXES = 8  # to try
_MAX_WORDS = 32  # of wrappers between names, to tell one by one


def checked(rename: Any) -> Rename:
    """Returns ``rename``. Raises ConfigError if it is neither a mapping of prefixes nor a function."""
    if callable(rename):
        # The function is called twice for a name, before and after the read, and must return the same name.
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


@dataclass(frozen=True)
class WithoutWord:
    """A ``rename`` that takes a word out of names. Prints as Python source."""

    word: str
    left_out: tuple[str, ...] = ()

    def __call__(self, name: str) -> str | None:
        return None if name in self.left_out else name.replace(self.word, "")

    def __str__(self) -> str:
        source = f'name.replace("{self.word}", "")'
        out = ", ".join(map(json.dumps, self.left_out))
        return f"lambda name: None if name in [{out}] else {source}" if out else f"lambda name: {source}"


def suggestion(saved: Collection[str], live: Collection[str]) -> Rename | None:
    """The ``rename`` that makes the saved names exactly the live ones; None if no prefix explains them."""
    found = likeliest(saved, live)
    return found if found is not None and set(renamed(saved, found).values()) == set(live) else None


def likeliest(saved: Collection[str], live: Collection[str]) -> Rename | None:
    """The ``rename`` that makes most of the saved names live ones; None if there are as many without it.

    Recognizes one common prefix, on either side, and the words that wrappers put between names."""
    if set(saved) == set(live) or not saved or not live:
        return None
    there = set(live)
    choices: list[Rename] = [rename for prefix in _prefixes(saved, live) for rename in ({prefix: ""}, {"": prefix})]
    choices += map(WithoutWord, _WRAPPERS)
    choices += [{plain: name for name, plain in _wrapped(live)}, dict(_wrapped(saved))]
    best, most = None, len(there.intersection(saved))
    for choice in choices:
        if isinstance(choice, Mapping) and len(choice) > _MAX_WORDS:
            continue
        try:
            found = len(there.intersection(renamed(saved, choice).values()))
        except ConfigError:  # two names become one
            continue
        if found > most:
            best, most = choice, found
    return best


def _wrapped(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The beginnings of names up to their last word of a wrapper, and the same without such words."""
    for name in names:
        if end := max(name.rfind(word) + len(word) if word in name else 0 for word in _WRAPPERS):
            plain = name[:end]
            for word in sorted(_WRAPPERS, key=len, reverse=True):  # one is the end of others
                plain = plain.replace(word, "")
            yield name[:end], plain


def _prefixes(saved: Collection[str], live: Collection[str]) -> list[str]:
    """The wrappers' prefixes, and those by which a saved name is longer than a live one, or shorter."""
    found = [*_WRAPPERS, *(a + b for a in _WRAPPERS for b in _WRAPPERS if a != b)]
    for longer, shorter in ((saved, live), (live, saved)):
        tail = max(shorter, key=len)
        found += islice((name[: -len(tail)] for name in longer if name.endswith(f".{tail}")), _MAX_PREFIXES)
    return list(dict.fromkeys(found))
