"""One module for each framework, which imports only that framework. This file holds the code that all of them share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import lazyckpt
from lazyckpt.warn import warn


def announce(saver: lazyckpt.Saver, find: Callable[[], Iterable[Any]]) -> None:
    """Announces the modules and optimizers that ``find`` returns to ``Saver.expect``. Never raises: without the
    announcement the first save allocates its buffer itself."""
    with contextlib.suppress(Exception):
        saver.expect(*find())


class StartsAnew:
    """An object whose copies, pickled ones too, lack the attributes that ``_start_anew`` sets, and set them again."""

    def _start_anew(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        fresh = object.__new__(type(self))
        fresh._start_anew()
        return {name: value for name, value in vars(self).items() if name not in vars(fresh)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start_anew()
        vars(self).update(state)


def wrap(owner: type, name: str, find: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts the decorated ``function(found, original, self, …)`` in front of the method ``name`` of ``owner``.

    ``found`` is what ``find(self, …)`` returns for the arguments of the call; for None the original method runs
    alone. ``original`` is the method, bound to ``self``.
    """

    def install(function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = find(self, *args, *kwargs.values())
            if found is None:
                return original(self, *args, **kwargs)
            return function(found, functools.partial(original, self), self, *args, **kwargs)

        setattr(owner, name, method)
        return function

    return install


def close_and_warn(saver: lazyckpt.Saver) -> None:
    """Closes at the end of a Saver's owner or of the program, where nothing can catch an error."""
    try:
        saver.close()
    except lazyckpt.SaveError as error:
        warn(str(error))
