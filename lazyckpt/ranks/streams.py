"""Warns when several ranks restore one random state: from then on they would draw the same numbers."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from torch import distributed

from lazyckpt.ranks.rank_claims import default_store, identity
from lazyckpt.ranks.rounds import StoreLost
from lazyckpt.stores.store import AnyPath
from lazyckpt.warn import warn


def warn_if_equal(checkpoint: AnyPath) -> None:
    """Call it on each rank that has restored the random state of ``checkpoint``, which holds one for all. Warns on all
    but the first of them."""
    if (store := default_store()) is None:
        return
    with contextlib.suppress(StoreLost, OSError):
        key = hashlib.sha256(identity(Path(checkpoint)).encode()).hexdigest()
        rank = distributed.get_rank()
        if (first := int(store.claim(f"lazyckpt/streams/{key}", b"%d" % rank))) != rank:
            warn(
                f"ranks {first} and {rank} have both restored the one random state in {checkpoint}: they draw the same "
                "numbers from now on, and their dropout masks are equal. Give each rank a stream of its own after "
                "step = restore(): torch.manual_seed(step * torch.distributed.get_world_size() + "
                "torch.distributed.get_rank()), and so for random and numpy.random if you use them"
            )
