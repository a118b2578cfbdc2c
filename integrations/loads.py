"""Loads the large files of a trainer's checkpoint with lazyckpt: verified, and each byte read by one rank."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import lazyckpt
from lazyckpt.ranks.meeting import all_ranks_at
from lazyckpt.reading import relay
from lazyckpt.reading.on_all_ranks import load_together

_ARGUMENTS = {"map_location", "weights_only"}  # those of torch.load that lazyckpt takes, too


@contextlib.contextmanager
def loading_together(namespace: Any, timeout_s: float | None) -> Iterator[None]:
    """A context in which ``namespace.load``, a ``torch.load``, loads large files on all ranks at once.

    Every rank must load the same large files, in the same order. Raises LoadError for a damaged one, and RankError if a
    rank gives no sign of life for ``timeout_s``; None is Config's."""
    timeout_s = lazyckpt.Config.rank_timeout_s if timeout_s is None else timeout_s
    original, thread = namespace.load, threading.get_ident()

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not args and kwargs.keys() <= _ARGUMENTS and _is_large(f):
            with (
                contextlib.suppress(lazyckpt.UnsupportedFormatError),  # torch may read it, or raises its own error
                all_ranks_at(f, timeout_s) as team,
            ):
                return load_together(f, kwargs.get("map_location"), kwargs.get("weights_only"), team)
        return original(f, *args, **kwargs)

    namespace.load = load
    try:
        yield
    finally:
        namespace.load = original


def _is_large(file: Any) -> bool:
    """Whether reading it together takes less time than meeting for it."""
    with contextlib.suppress(OSError):
        return isinstance(file, str | os.PathLike) and os.path.getsize(file) >= 2 * relay.LEAST_BYTES
    return False
