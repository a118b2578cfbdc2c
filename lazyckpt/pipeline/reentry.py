"""Refuses calls that would wait for the call that they interrupt.

A signal handler or the user's ``state_dict()`` may run in the middle of ``save()``, on the same thread. That save makes
no progress until it returns: the state is half gathered, and the save may hold the whole staging buffer. So a thread
inside ``save()`` or ``restore()`` gets a ConfigError from any further call to any Saver. A second thread gets one if it
calls the same Saver meanwhile.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lazyckpt.errors import ConfigError
from lazyckpt.gate.gate import gate

_Method = TypeVar("_Method", bound=Callable[..., Any])

_inside: dict[int, str] = {}  # thread → the call that it is inside of


def refuse(call: str) -> None:
    """Raises ConfigError if this thread is inside a call of lazyckpt that ``call`` might wait for."""
    outer = _inside.get(threading.get_ident())
    if outer is None and gate.is_held():
        outer = "the gate"
    if outer is not None:
        raise ConfigError(
            f"{call} was called inside {outer}, by a signal handler, a hook or a state_dict(): a wait without end. "
            "Set a flag there and save in the training loop; lazyckpt.commit_on commits what was saved at a signal"
        )


def other_thread(call: str) -> ConfigError:
    return ConfigError(f"{call}: another thread is inside save() or restore() of this; call from one thread at a time")


def alone(call: str) -> Callable[[_Method], _Method]:
    """Decorates a method that must not run inside another decorated one on this thread, nor while another thread runs
    one of the same Saver. All objects that use one Launcher share ``_callers``; "inside" is the thread in a call."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            refuse(call)
            me = threading.get_ident()
            callers = self._callers
            try:
                _inside[me] = call
                if callers.setdefault("inside", me) != me:
                    raise other_thread(call)
                return method(self, *args, **kwargs)
            finally:
                # Calls no Python function: Ctrl-C could come before its first line.
                if "inside" in callers and callers["inside"] == me:
                    del callers["inside"]
                _inside.pop(me, None)

        return cast(_Method, run)

    return decorate


def _forget_others() -> None:
    """In a forked child, where this thread is the only one."""
    for thread in _inside.keys() - {threading.get_ident()}:
        del _inside[thread]


os.register_at_fork(after_in_child=_forget_others)
