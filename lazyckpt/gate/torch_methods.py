"""Makes methods of torch that write to tensors, or free them, outside of steps wait. torch has no hook for them.

Hooks of ``load_state_dict`` exist, but only on the object itself, where they would become part of its copies and
pickles. So these functions replace the methods of the class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any

import torch

from lazyckpt.gate.gate import gate

# Methods of a storage that free its memory. A reference to the storage does not help: the memory is freed at once, and
# a thread that reads it may crash the process. Sharded training resizes; share_memory(), and sending a tensor to
# another process, move the memory.
_GIVE_MEMORY_BACK = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


def gate_methods() -> None:
    """Puts the gate in front of these methods, for the rest of the process."""
    for name in _GIVE_MEMORY_BACK:
        setattr(torch.UntypedStorage, name, _behind_copy(getattr(torch.UntypedStorage, name)))
    for kind, name, known in (
        (torch.nn.Module, "_load_from_state_dict", gate.modules),  # torch calls it for each part
        (torch.optim.Optimizer, "load_state_dict", gate.steps),
    ):
        setattr(kind, name, _behind_copies(getattr(kind, name), known))


def _behind_copy(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait_and_call(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        gate.wait_for_storage(storage)
        return method(storage, *args, **kwargs)

    return wait_and_call


def _behind_copies(load: Callable[..., Any], known: Container[Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def wait_and_load(self: Any, *args: Any, **kwargs: Any) -> Any:  # torch passes self= by name, too
        try:
            is_known = self in known
        except Exception:  # the object has no working hash
            is_known = False
        if is_known:
            gate.wait_all()
        return load(self, *args, **kwargs)

    return wait_and_load
