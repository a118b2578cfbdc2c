"""The saves in flight of all Savers of this process. A forked child disowns them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazyckpt.pipeline.handle import SaveHandle

# In the order of the saves. The keys of a dict, since copying these is atomic.
in_flight: dict[SaveHandle, None] = {}


def _disown() -> None:
    """Fails the handles in a forked child: the threads that would finish them exist in the parent only."""
    for handle in list(in_flight):
        handle._disown()
    in_flight.clear()


os.register_at_fork(after_in_child=_disown)
