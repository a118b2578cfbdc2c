"""What rank 0 tells the other ranks about its work behind the saves, and whether a rank is lost.

Nothing here waits for a rank, and a topic is one key whose value rank 0 replaces. Any thread may call.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazyckpt.ranks.pulse import Pulse, Watch
from lazyckpt.ranks.rounds import Point
from lazyckpt.ranks.store import Client

_MET = Point("exchange", 1)  # all ranks that know each other have reached it


class Board:
    """Of one job. ``keys`` is its prefix. All methods raise StoreLost."""

    def __init__(self, client: Client, keys: str, pulse: Pulse) -> None:
        self._client, self._keys, self._pulse = client, f"{keys}/board", pulse

    def tell(self, topic: str, value: bytes) -> None:
        """Rank 0: replaces what it has told about a topic."""
        self._client.set(f"{self._keys}/{topic}", value)

    def told(self, topic: str) -> bytes | None:
        """What rank 0 has told last; None if nothing."""
        return self._client.look(f"{self._keys}/{topic}")

    def watch(self, rank: int) -> Watch:
        """Finds out whether a rank is lost. It may take as long as it needs while it lives."""
        return Watch(self._pulse, rank, _MET)


@dataclass(frozen=True)
class SharedSave:
    """A save of several ranks, as one of them knows it."""

    board: Board
    rank: int
    name: str  # the same on all ranks, and of no other save
