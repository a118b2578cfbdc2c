"""One module for each framework, which needs only that one; ``redirect`` is for those that write with safetensors."""

from __future__ import annotations

import sys
from typing import Any


def lightning_callbacks() -> list[Any]:
    """The entry point that Lightning calls whenever a Trainer is made, whatever the Trainer is for.

    Who has not imported ``lazyckpt.integrations.lightning`` has no LazyCheckpointIO, and gets nothing.
    """
    if "lazyckpt.integrations.lightning" not in sys.modules:
        return []
    from lazyckpt.integrations.lightning import LazyCheckpointCallback

    return [LazyCheckpointCallback()]
