"""The plan of one rank's part of a file that several ranks write."""

from __future__ import annotations

import json
from array import array
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from lazyckpt.capture.decision import MAX_KEPT
from lazyckpt.errors import ConfigError
from lazyckpt.formats.program import Extent, ExtentBuilder, literal
from lazyckpt.pipeline.plan import ArchiveCache, FilePlan
from lazyckpt.pipeline.replicated.share import Laid, Split, writers_of
from lazyckpt.pipeline.replicated.whole import ObjectCache, WholeFile
from lazyckpt.providers.base import Parts, TensorViews
from lazyckpt.ranks.group import RankGroup
from lazyckpt.ranks.rank_claims import machine


class Program(NamedTuple):
    """One rank's part of one file, once it is laid out."""

    split: Split
    writer: int | None  # the number of this rank among the writers
    nbytes: int = 0  # rank 0: of the whole file
    sums: Extent | None = None  # rank 0: with the checksums of all storages, and as it is written first:
    no_sums: bytes = b""  # with 0 in the place of each


class Writers(NamedTuple):
    """What all ranks know of each other before they write a file together."""

    setting: str | int  # which ranks write
    rank: int  # this one
    nodes: Sequence[str]  # that of each rank
    in_flight: int  # saves at once, at most

    @classmethod
    def meet(cls, group: RankGroup, setting: str | int, in_flight: int) -> Writers:
        """Every rank calls it, once. Raises ConfigError, on all ranks, if they have other settings."""
        settings = f"writers={setting!r}, max_in_flight={in_flight}"
        told = [json.loads(each) for each in group.exchange("writers", json.dumps([settings, machine()]).encode())]
        for rank, (other, _) in enumerate(told):
            if other != told[0][0]:
                raise ConfigError(f"rank 0 has {told[0][0]}; rank {rank} has {other}. Give all the same")
        return cls(setting, group.rank, [node for _, node in told], in_flight)


class ReplicaCache:
    """Facts that successive saves of one file share on one rank. Holds no tensor."""

    def __init__(self, writers: Writers, first: int = 1) -> None:
        """``first``: the number of the first save of this file among those of all ranks."""
        self.writers = writers
        self.rank = writers.rank
        self.archive = ObjectCache()
        self.own = ArchiveCache()  # of the file with this rank's own state
        self.of_rank_0: list[list[object]] = []  # the tensors of rank 0 and their bytes, as far as it told
        self.told = ""  # rank 0: the identity of the last split that all ranks know
        self.differ = False  # rank 0: whether the replicas differ, as far as it knows
        self.alone_told = False  # the last value that rank 0 has told all ranks, in a checkpoint that was committed
        self._alone_from = [(first + 1, False)]  # whether rank 0 writes alone, from which save on
        self._splits: dict[bool, Split] = {}
        self.splits = 0  # that were made

    def is_alone(self, ordinal: int) -> bool:
        """Whether rank 0 writes a save alone, by its number among those of all ranks."""
        return next((alone for first, alone in reversed(self._alone_from) if ordinal >= first), True)

    def told_alone(self, ordinal: int, alone: bool) -> None:
        """Notes what rank 0 has told in a checkpoint that is committed. It holds from a save on that no rank begins
        before it has settled this one."""
        self.alone_told = alone
        self._alone_from = [*self._alone_from[-2:], (ordinal + self.writers.in_flight, alone)]

    def turn(self, ordinal: int) -> int:
        """The number by which the ranks change with whom they compare. It has at most ``MAX_KEPT`` values in a row of
        saves, since save() takes longer after a change to one that it does not know."""
        turns = max(len(self.writers.nodes) - 1, 1)
        each = -(-turns // (MAX_KEPT - 1))  # saves
        return ordinal // each % turns

    def split(self, alone: bool) -> Split:
        """Of the last such file."""
        return self._splits[alone]

    def cut(self, laid: Laid, whole: WholeFile, alone: bool) -> bool:
        """Cuts a file. Returns False if it is cut as the one before."""
        if alone in self._splits and self._splits[alone].laid == laid:
            return False
        writers = writers_of(self.writers.setting, laid.sizes[laid.shared :], self.writers.nodes)
        self.splits += 1
        self._splits[alone] = Split(laid, whole.form(laid), writers, alone=alone)
        return True


class SharePlan(FilePlan):
    """One rank's part of a file."""

    any_order = True

    def __init__(self, whole: WholeFile, cache: ReplicaCache, ordinal: int) -> None:
        """``ordinal``: the number of the save among those of all ranks."""
        self.program: Program | None = None
        self.gathered: TensorViews | None = None  # until it is laid out
        self.turn = cache.turn(ordinal)
        self.places: list[int] = []  # of the gathered storages in the order of the file, if it was asked for
        self._whole = whole
        self._ordinal = ordinal
        self._replicas = cache
        self._alone = True

    def gather(self) -> TensorViews:
        self._alone = self._replicas.is_alone(self._ordinal)
        self.gathered = self._whole.gather()
        self.choice = id(self._replicas), self._replicas.splits, self._alone, self._whole.choice
        return self.gathered

    @property
    def split(self) -> Split:
        return self._replicas.split(self._alone)

    @property
    def rank(self) -> int:
        return self._replicas.rank

    def _writer(self) -> int | None:
        writers = self.split.writers
        return writers.index(self.rank) if self.rank in writers else None

    def order(self, views: TensorViews, owned: Container[int]) -> Parts:
        places, laid = self._whole.ordered(views, list(map(owned.__contains__, views.identities)))
        self.places = places
        if self._replicas.cut(laid, self._whole, self._alone):
            with_owner = [at for at, has_one in enumerate(laid.owned) if has_one]
            names = self._whole.names_of(views.take([places[at] for at in with_owner]))
            self.split.names = dict(zip(with_owner, names, strict=True))
        return _parts(self.split.cut(self._writer()).parts, places)

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        split, writer = self.split, self._writer()
        extents = split.cut(writer).extents
        self.program = Program(split, writer)
        if writer == 0:
            before, sums, behind = self._whole.rest(split.form)
            no_sums = split.without_checksums(sums)
            extents = [*extents, *before, literal(sums.offset, no_sums), *behind]
            self.program = Program(split, writer, max(extent.end for extent in extents), sums, no_sums)
        return extents, sum(extent.nbytes for extent in extents)

    def ranges(self) -> Sequence[tuple[int, int]]:
        assert self.program is not None
        split, writer, nbytes, *_ = self.program
        ranges = split.ranges(writer)
        if writer == 0:  # also writes before and behind the storages
            inner = [edge for one in ranges for edge in one][1:-1]
            edges = [0, *inner, nbytes]
            return list(zip(edges[::2], edges[1::2], strict=True))
        return ranges or [(0, 0)]

    def again(self) -> None:
        """The parts of storages that others write are not here to compare."""
        return None

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return self._whole.name_of(storage)


class ComparedPlan(FilePlan):
    """What this rank compares with another one's copy: it is copied for the checksums, and not written."""

    any_order = True
    is_written = False

    def __init__(self, share: SharePlan) -> None:
        self._share = share
        self.parts = 0  # of storages, once it is laid out

    def gather(self) -> TensorViews:
        assert self._share.gathered is not None
        self.choice = self._share.choice, self._share.turn
        return self._share.gathered

    def order(self, views: TensorViews, owned: Container[int]) -> Parts:
        compared = self._share.split.compared(self._share.rank, self._share.turn)
        return _parts(compared, self._share.places)

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        self._share.gathered = None
        self.parts = len(views)
        builder = ExtentBuilder()
        builder.sources(views.sizes)
        return [builder.build(0)], 0  # it takes no room in the staging buffer

    def again(self) -> None:
        """As ``SharePlan``."""
        return None

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return self._share.name_of(storage)


def _parts(parts: list[tuple[int, int, int]], places: list[int]) -> Parts:
    sizes = array("Q", (end - begin for _, begin, end in parts))
    return Parts([places[at] for at, _, _ in parts], array("Q", (begin for _, begin, _ in parts)), sizes)
