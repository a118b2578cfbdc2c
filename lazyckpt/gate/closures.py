"""Decides whether the gate may wait behind an optimizer's closure, so that forward and backward overlap with the copy.

It may if ``step`` runs the closure before anything could write to parameters: if its code proves that
(closure_proof.py), or if the user vouches for the class with ``closure_first``. Every other step waits before its
closure.
"""

from __future__ import annotations

import contextlib
import weakref
from types import CodeType, FunctionType
from typing import Any, TypeVar

from lazyckpt.gate.closure_proof import prove
from lazyckpt.gate.proof import Proof
from lazyckpt.gate.step_layers import without_hooks, without_layers

_Class = TypeVar("_Class", bound=type[Any])

_vouched: weakref.WeakKeyDictionary[type[Any], Any] = weakref.WeakKeyDictionary()  # with the step at that time
_MAX_PROOFS = 256
# By function, code, class and ``by_name``; with whether the proof succeeded.
_proofs: dict[tuple[FunctionType, CodeType, type[Any], bool], tuple[Proof, bool]] = {}


def closure_first(optimizer: _Class) -> _Class:
    """Vouch that a class of optimizers runs its closure before it writes to parameters; also a class decorator.

    ``step(closure)`` then waits for pending copies behind the closure, so that forward and backward overlap with them.
    lazyckpt proves this by itself for a ``step`` that begins as those of ``torch.optim`` do, and for one that is
    inherited. It holds for subclasses that do not override ``step``, and until the ``step`` of the class is replaced.

    Raises TypeError unless it is given a class with a ``step``.
    """
    if not isinstance(optimizer, type) or not hasattr(optimizer, "step"):
        raise TypeError(f"closure_first() takes a class with a step(), not {optimizer!r}")
    _vouched[optimizer] = without_hooks(optimizer.step)
    return optimizer


def runs_closure_first(step: Any, optimizer: Any, *, by_name: bool) -> bool:
    """Whether ``step`` surely calls its closure, the second argument or the one named ``closure``, before anything
    could write to parameters. Never raises."""
    kind = type(optimizer)
    if any(_vouched.get(cls) is step for cls in kind.__mro__):
        return True
    with contextlib.suppress(Exception):
        function = without_layers(step, kind)
        if function is None:
            return False
        key = function, function.__code__, kind, by_name
        known = _proofs.get(key)
        if known is None or not known[0].holds(optimizer):  # the facts of the proof have changed
            while len(_proofs) >= _MAX_PROOFS:
                _proofs.pop(next(iter(_proofs)))
            known = _proofs[key] = prove(function, kind, by_name=by_name)
        proof, succeeded = known
        return succeeded and proof.holds(optimizer)
    return False
