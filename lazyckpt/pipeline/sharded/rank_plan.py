"""The plan of the file that one rank writes: its share of a state that many ranks hold."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lazyckpt.formats.distcp import Place
from lazyckpt.formats.inventory import Item, Shard, kind_of
from lazyckpt.formats.program import Extent
from lazyckpt.pipeline.plan import ArchiveCache, FilePlan, archive_of
from lazyckpt.pipeline.sharded.shard_plan import ShardCache, ShardPlan
from lazyckpt.providers.base import StorageTable, TensorViews
from lazyckpt.providers.composite import UnpicklableError
from lazyckpt.providers.global_state import Leaves, Path, chunk_of, is_dtensor, is_dtensor_type, is_simple, name_of
from lazyckpt.providers.pickles import dump
from lazyckpt.providers.restorable import UnrestorableError, refuse_unreadable
from lazyckpt.providers.sharded import ShardedTensorError
from lazyckpt.ranks.shares import Held, writes

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass
class RankFile:
    """The contents of one rank's file, once it is laid out."""

    leaves: list[tuple[Path, Shard | None]] = field(default_factory=list)
    places: Mapping[str, Place] = field(default_factory=dict)  # of the items, by name
    own: Container[str | int] = ()  # see global_state.Leaves

    def items(self) -> list[Item]:
        return [Item(path, shard, *self.places[name_of(path)]) for path, shard in self.leaves]

    def shared(self) -> dict[str, str]:
        """The names that other ranks may have whole, too, with their kinds."""
        whole = [(path, shard) for path, shard in self.leaves if shard is None or shard.is_whole]
        return {name_of(path): kind_of(shard) for path, shard in whole if path[0] not in self.own}


@dataclass
class _Share:
    """The leaves that one rank writes, as columns. Holds no tensor."""

    facts: Any = None  # the facts on which all of it depends
    leaves: list[tuple[Path, Shard | None]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # among all leaves
    shards: list[int] = field(default_factory=list)  # places in these columns, of DTensors
    objects: list[int] = field(default_factory=list)  # and of leaves that are no tensors


class RankCache:
    """Facts that successive files of one rank share. Holds no tensor of the state."""

    def __init__(self) -> None:
        self.shards = ShardCache()
        self.elsewhere: Mapping[str, str] = {}
        """The names that rank 0 writes, with their kinds, from its last note. This rank writes the leaves that rank 0
        does not have, such as another part of the model. It also writes a leaf that has another kind here, which rank 0
        then refuses."""
        self._share = _Share()
        self._objects: dict[str, tuple[bytes | None, bytes]] = {}  # pickle and archive, by name
        self._archives: defaultdict[str, ArchiveCache] = defaultdict(ArchiveCache)  # by name

    def items(
        self, leaves: Mapping[Path, Any], is_mine: Callable[[Path, Shard | None], bool]
    ) -> tuple[list[tuple[Path, Shard | None]], list[tuple[str, torch.Tensor | bytes]]]:
        """The leaves that this rank writes, and their contents by name. ``is_mine``: of leaves that are no DTensors."""
        values = list(leaves.values())
        facts = list(leaves), *_facts_of(values), self.elsewhere
        if self._share.facts != facts:
            self._share = _share(leaves, is_mine, facts)
        share = self._share
        contents = list(map(values.__getitem__, share.places))
        for at in share.shards:
            contents[at] = contents[at]._local_tensor
        for at in share.objects:
            contents[at] = self._frozen(share.names[at], contents[at])
        return share.leaves, list(zip(share.names, contents, strict=True))

    def _frozen(self, name: str, value: Any) -> bytes:
        """``value`` as ``torch.save`` writes it, now. Raises UnrestorableError if ``restore()`` could not read it, and
        UnpicklableError."""
        pickled = pickle.dumps(value) if is_simple(value) else None
        known, archive = self._objects.get(name, (None, b""))
        if pickled is not None and pickled == known:
            return archive
        try:
            if name not in self._objects and pickled is None:
                table = StorageTable(map(str, itertools.count()))
                refuse_unreadable(value, "", dump(value, table, iter(()))[0], table)
            archive = archive_of(value, self._archives[name])
        except (ShardedTensorError, UnrestorableError) as error:
            raise error.inside(name) from None
        except Exception as error:
            raise UnpicklableError(name, error) from error
        self._objects[name] = pickled, archive
        return archive


def _facts_of(values: list[Any]) -> tuple[list[type], list[Any], list[Any]]:
    """All that the parts of leaves depend on: their types, the places of DTensors, and the forms of other tensors."""
    kinds = list(map(type, values))
    sharded = {kind for kind in set(kinds) if is_dtensor_type(kind)}
    specs = [value._spec for value, kind in zip(values, kinds, strict=True) if kind in sharded]
    tensors = [_look(value) for value, kind in zip(values, kinds, strict=True) if kind in _TENSORS]
    return kinds, specs, tensors


def _look(tensor: torch.Tensor) -> Any:
    """None: it is an object, for torch.save."""
    return None if tensor.is_nested or tensor.layout is not torch.strided else (tensor.dtype, tensor.shape)


def _share(leaves: Mapping[Path, Any], is_mine: Callable[[Path, Shard | None], bool], facts: Any) -> _Share:
    shards = {path: chunk_of(value) for path, value in leaves.items() if is_dtensor(value)}
    held = [Held(name_of(p), c.local.nbytes, c.group, c.replica, c.replicas) for p, c in shards.items()]
    mine = dict(zip(shards, writes(held), strict=True))
    share = _Share(facts)
    for place, (path, value) in enumerate(leaves.items()):
        chunk, shard = shards.get(path), None
        if chunk is not None:
            if not mine[path] or not (chunk.local.numel() or 0 in chunk.size):
                continue
            share.shards.append(len(share.names))
            shard = _shard(chunk.local, chunk.size, chunk.offsets)
        else:
            if type(value) in _TENSORS and _look(value) is not None:
                shard = _shard(value, value.shape, (0,) * value.dim())
            if not is_mine(path, shard):
                continue
            if shard is None:
                share.objects.append(len(share.names))
        share.leaves.append((path, shard))
        share.names.append(name_of(path))
        share.places.append(place)
    return share


def _shard(local: torch.Tensor, size: tuple[int, ...], offsets: tuple[int, ...]) -> Shard:
    return Shard(str(local.dtype).removeprefix("torch."), tuple(size), offsets, tuple(local.shape))


class RankPlan(FilePlan):
    """A ``.distcp`` file with the share of one rank (DataStates-LLM, V; FastPersist, 4.2).

    A shard is written by one of the ranks that hold it. Every rank writes its own state, such as random states. Rank 0
    writes everything else, since it is the same everywhere, or, like the statistics of BatchNorm, one of many."""

    any_order = True

    def __init__(self, state: Leaves, rank: int, cache: RankCache, file: RankFile, stamp: bytes) -> None:
        """``file`` is filled in when the file is laid out. ``stamp``: see formats/distcp.py."""
        self._state = state
        self._rank = rank
        self._cache = cache
        self._file = file
        self._stamp = stamp
        self._plan: ShardPlan | None = None

    def gather(self) -> TensorViews:
        self._file.leaves, items = self._cache.items(self._state.leaves(), self._is_mine)
        self._file.own = self._state.own
        self._plan = ShardPlan(items, self._cache.shards, self._stamp)
        return self._plan.gather()

    def again(self) -> None:
        """The state may be collected together with other ranks."""
        return None

    def _is_mine(self, path: Path, shard: Shard | None) -> bool:
        if self._rank == 0 or path[0] in self._state.own:
            return True
        return self._cache.elsewhere.get(name_of(path)) != kind_of(shard)

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        assert self._plan is not None
        program = self._plan.lay_out(views)
        self._file.places = self._plan.places
        return program

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return None if self._plan is None else self._plan.name_of(storage)
