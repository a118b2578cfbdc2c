"""The plan of one rank's part of ``state.pt``."""

from __future__ import annotations

import json
from array import array
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from lazyckpt.errors import ConfigError
from lazyckpt.formats.program import Extent
from lazyckpt.pipeline.plan import ARCHIVE_NAME, ArchiveCache, StatePlan
from lazyckpt.pipeline.replicated.share import Laid, Split, laid_out, writers_of
from lazyckpt.providers.base import Parts, TensorViews
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.global_state import is_own
from lazyckpt.providers.pickles import pickle_of
from lazyckpt.ranks.group import RankGroup
from lazyckpt.ranks.rank_claims import machine


class Program(NamedTuple):
    """One rank's part of one file, once it is laid out."""

    split: Split
    writer: int | None  # the number of this rank among the writers
    nbytes: int = 0  # rank 0: of the whole file
    directory: Extent | None = None  # rank 0: with the checksums of all storages


class ReplicaCache:
    """Facts that successive saves of one rank share. Holds no tensor."""

    def __init__(self, setting: str | int, rank: int, nodes: Sequence[str]) -> None:
        """``setting``: ``Config.writers``; ``nodes``: that of each rank."""
        self.rank = rank
        self.archive = ArchiveCache()
        self.own = ArchiveCache()  # of the file with this rank's own state
        self.of_rank_0: list[list[Any]] = []  # those of rank 0 and their bytes, as far as it told
        self.told = ""  # rank 0: the identity of the last split that all ranks know
        self.setting = setting
        self._nodes = nodes
        self._split: Split | None = None

    @classmethod
    def meet(cls, group: RankGroup, setting: str | int) -> ReplicaCache:
        """Every rank calls it, once. Raises ConfigError, on all ranks, if they have other settings."""
        told = [json.loads(each) for each in group.exchange("writers", json.dumps([setting, machine()]).encode())]
        for rank, (other, _) in enumerate(told):
            if other != told[0][0]:
                raise ConfigError(
                    f"rank 0 has writers={told[0][0]!r}, rank {rank} writers={other!r}: give all the same"
                )
        return cls(setting, group.rank, [node for _, node in told])

    @property
    def split(self) -> Split:
        """Of the last file."""
        assert self._split is not None
        return self._split

    def cut(self, laid: Laid) -> bool:
        """Cuts a file. Returns False if it is cut as the one before."""
        if self._split is not None and self._split.laid == laid:
            return False
        self._split = Split(laid, ARCHIVE_NAME, writers_of(self.setting, laid.sizes[laid.shared :], self._nodes))
        return True

    def writer(self) -> int | None:
        writers = self.split.writers
        return writers.index(self.rank) if self.rank in writers else None


class SharePlan(StatePlan):
    """One rank's part of the tracked state of a Checkpointer on every rank."""

    def __init__(self, state: CompositeProvider, cache: ReplicaCache) -> None:
        super().__init__(state, cache.archive)
        self.choice = id(cache)
        self.program: Program | None = None
        self._replicas = cache

    def order(self, views: TensorViews, owned: Container[int]) -> Parts:
        own = {at for name, part in self._state.parts.items() if is_own(part) for at in self._state.added[name]}
        places, laid = laid_out(views.keys, views.sizes, list(map(owned.__contains__, views.identities)), own)
        cache = self._replicas
        if cache.cut(laid):
            cache.split.names = self._state.names_of([views.identities[at] for at in places[laid.shared :]])
        parts = cache.split.cut(cache.writer()).parts
        sizes = array("Q", (end - begin for _, begin, end in parts))
        return Parts([places[at] for at, _, _ in parts], array("Q", (begin for _, begin, _ in parts)), sizes)

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        split, writer = self._replicas.split, self._replicas.writer()
        extents = split.cut(writer).extents
        self.program = Program(split, writer)
        if writer == 0:
            tail, directory = split.tail(pickle_of(self._opcodes))
            extents = [*extents, *tail]
            self.program = Program(split, writer, tail[-1].end, directory)
        return extents, sum(extent.nbytes for extent in extents)

    def ranges(self) -> Sequence[tuple[int, int]]:
        assert self.program is not None
        split, writer, nbytes, _ = self.program
        ranges = split.ranges(writer)
        if writer == 0:
            return [*ranges[:-1], (ranges[-1][0], nbytes)]
        return ranges or [(0, 0)]

    def again(self) -> None:
        """The parts of storages that others write are not here to compare."""
        return None
