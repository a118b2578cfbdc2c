"""Some ranks read, each a share of the bytes, and all of them get everything.

Every rank reads its share in rounds: while the bytes of one round go to the others, it reads those of the next. A rank
that cannot read takes part to the end, and sends the worthless bytes in its memory; the caller tells all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from lazyckpt.config import MIB
from lazyckpt.ranks.broadcast import Undelivered
from lazyckpt.ranks.lookout import Lookout
from lazyckpt.stores.calls import CancelScope, awaited

LEAST_BYTES = 16 * MIB  # for each rank that reads: with less, another reader saves no time
ROUND_BYTES = 32 * MIB  # of one rank
Item = TypeVar("Item")


class Way(Protocol):
    """How bytes come to the other ranks: ``Broadcasts`` or ``SharedMemory``."""

    lookout: Lookout

    def start(self, root: int, tensors: Iterable[torch.Tensor]) -> None: ...
    def finish(self) -> None: ...


def readers_of(nbytes: int, ranks: int) -> list[int]:
    """Which of so many ranks read: as many as have 16 MiB each, evenly from all, and so from all nodes. Empty if not
    even one has: then every rank reads for itself."""
    count = min(nbytes // LEAST_BYTES, ranks)
    return [ranks * k // count for k in range(count)]


def rounds_of(nbytes: int, readers: int) -> int:
    """How many rounds so many readers of equal shares need."""
    return -(-nbytes // (readers * ROUND_BYTES))


def relay(
    way: Way,
    rank: int,
    shares: Mapping[int, Sequence[Sequence[Item]]],
    read: Callable[[Sequence[Item]], None],
    place: Callable[[Item], torch.Tensor],
) -> BaseException | None:
    """Reads this rank's share, and fills the places of all items. Returns why it could not read; None also if the
    others are lost, which the next exchange says.

    ``shares``: what each reader reads, by rank: the items of each round, of as many rounds on all."""
    failure: BaseException | None = None
    rounds = max(map(len, shares.values()))
    mine = shares.get(rank, [[]] * rounds)
    try:
        with ThreadPoolExecutor(1, "lazyckpt-read") as thread, CancelScope() as scope:
            reading = thread.submit(scope.run, read, mine[0])
            for number in range(rounds):
                failure = failure or awaited(reading).exception()
                if number + 1 < rounds and failure is None:
                    reading = thread.submit(scope.run, read, mine[number + 1])
                for root, share in shares.items():
                    way.start(root, map(place, share[number]))
            way.finish()
    except Undelivered:
        pass  # the next exchange fails, on all ranks
    except BaseException as error:
        way.lookout.leave(error)
        raise
    return failure
