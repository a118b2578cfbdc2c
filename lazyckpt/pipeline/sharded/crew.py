"""The ranks that save and restore one sharded state together, as one of them sees them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lazyckpt.pipeline.sharded.inventories import Inventories, Shared
from lazyckpt.pipeline.sharded.rank_plan import RankCache
from lazyckpt.pipeline.sharded.save_numbers import SaveNumbers
from lazyckpt.providers.global_state import NameCache
from lazyckpt.ranks.group import RankGroup
from lazyckpt.ranks.team import ALONE, GroupTeam, Team, has_ranks
from lazyckpt.warn import warn


class Crew:
    """This rank's place in its group, and the data that its successive saves share.

    Every rank saves the same steps in the same order. Only ``join``, ``meet`` and ``close`` communicate, and
    ``give_up_refused`` after a save that was refused; a checkpoint's votes go over the background threads (ranks/)."""

    def __init__(self, group: RankGroup | None) -> None:
        """``group``: None if this process is the only rank."""
        self.group = group
        self.rank = 0 if group is None else group.rank
        self.team: Team = ALONE if group is None else GroupTeam(group)
        self.numbers = SaveNumbers(group)
        self.inventories = Inventories()
        self.caches: dict[str, RankCache] = {}  # by the name of the folder of torch.distributed.checkpoint
        self.names = NameCache()
        self.shared: Shared = {}  # rank 0: of the save before
        self._refused: tuple[Path, int, str] | None = None  # the last call of ``save`` with invalid arguments

    @classmethod
    def join(cls, directory: Path, *, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> Crew:
        """Waits for the other ranks, and warns if they do not come soon. Raises ConfigError, which names the ranks, if
        they do not all see one folder, and RankError if one does not come. ``waiting`` is called meanwhile, and may
        raise."""
        return cls(RankGroup.join(directory, timeout_s=timeout_s, waiting=waiting) if has_ranks() else None)

    def refused(self, path: Path, step: int, why: str) -> None:
        """Notes that the arguments of a save were refused, before anything was counted. The caller may correct them and
        save this step. If it goes on to another one instead, the other ranks learn then that this one was given up."""
        self.give_up_refused(step)
        self._refused = path, step, why

    def give_up_refused(self, step: int) -> None:
        """Tells the other ranks of a save that was refused, unless ``step`` repeats it."""
        refused, self._refused = self._refused, None
        if self.group is not None and refused is not None and refused[1] != step:
            path, given_up, why = refused
            self.group.ballot(self.numbers.next(), given_up, "", path).refuse(why)

    def meet(self) -> Team:
        """Waits until all ranks restore. Their next saves have one number again, whatever calls each has made."""
        self.numbers.meet()
        return self.team

    def close(self) -> None:
        if self.group is not None:
            self.group.close()


def rank_here() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def warn_if_alone() -> None:
    """Warns if a launcher has started several ranks, and they do not know each other."""
    import torch.distributed as dist

    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1" and dist.is_available() and not dist.is_initialized():
        warn(
            f"WORLD_SIZE is {ranks}, but torch.distributed is not initialized, so every rank saves for itself: if they "
            "have one folder, each replaces the checkpoints of the others. Call torch.distributed.init_process_group() "
            "before the first save()"
        )
