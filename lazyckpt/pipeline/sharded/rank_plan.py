"""The plan of the file that one rank writes: its share of a state that many ranks hold."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lazyckpt.formats.distcp import Place
from lazyckpt.formats.inventory import Item, Shard, kind_of
from lazyckpt.formats.program import Extent
from lazyckpt.pipeline.plan import ArchiveCache, FilePlan, archive_of
from lazyckpt.pipeline.sharded.shard_plan import Looked, ShardCache, ShardPlan, look_at
from lazyckpt.providers.base import StorageTable, TensorViews
from lazyckpt.providers.composite import UnpicklableError
from lazyckpt.providers.global_state import Leaves, Path, chunk_of, is_dtensor, is_dtensor_type, is_simple, name_of
from lazyckpt.providers.restorable import UnrestorableError, refuse_unreadable
from lazyckpt.providers.sharded import ShardedTensorError
from lazyckpt.providers.torch_pickler import dump
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

    facts: Any = None  # of all leaves: which of them this rank writes, and where they lie in the whole tensors
    looks: Any = None  # of the tensors that it writes: their parts here
    leaves: list[tuple[Path, Shard | None]] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)  # places among all leaves
    shards: list[int] = field(default_factory=list)  # those of ``tensors`` that are DTensors
    objects: list[int] = field(default_factory=list)  # places among all leaves, of those that are no tensors
    names: list[str] = field(default_factory=list)  # of ``tensors`` and then of ``objects``

    def tensors_in(self, values: list[Any]) -> list[torch.Tensor]:
        """The parts that this rank holds of the tensors that it writes."""
        found = list(map(values.__getitem__, self.tensors))
        for at in self.shards:
            found[at] = found[at]._local_tensor
        return found


class Written(NamedTuple):
    """What one rank writes of a state."""

    leaves: list[tuple[Path, Shard | None]]
    items: list[tuple[str, torch.Tensor | bytes]]
    looked: Looked  # at the tensors among the items


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

    def written(self, leaves: Mapping[Path, Any], is_mine: Callable[[Path, Shard | None], bool]) -> Written:
        """The leaves that this rank writes. ``is_mine``: of leaves that are no DTensors."""
        values = list(leaves.values())
        facts = list(leaves), *_facts_of(values), self.elsewhere
        share = self._share if self._share.facts == facts else None
        if share is not None:
            tensors = share.tensors_in(values)
            looked = look_at(tensors)
        if share is None or _looks_of(tensors, looked) != share.looks:
            share = _share(leaves, is_mine, facts)
            tensors = share.tensors_in(values)
            looked = look_at(tensors)
            share.looks = _looks_of(tensors, looked)
            self._share = share
        contents: list[torch.Tensor | bytes] = [*tensors, *self._archives_of(share, values)]
        return Written(share.leaves, list(zip(share.names, contents, strict=True)), looked)

    def _archives_of(self, share: _Share, values: list[Any]) -> list[bytes]:
        names = share.names[len(share.tensors) :]
        return [self._frozen(name, values[at]) for name, at in zip(names, share.objects, strict=True)]

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


def _looks_of(tensors: list[torch.Tensor], looked: Looked) -> Any:
    """What the parts of tensors are described by."""
    return [_look(tensor) for tensor in tensors] if looked is None else looked[0]


def _look(tensor: torch.Tensor) -> Any:
    """None: it is an object, for torch.save."""
    return None if tensor.is_nested or tensor.layout is not torch.strided else (tensor.dtype, tensor.shape)


def _share(leaves: Mapping[Path, Any], is_mine: Callable[[Path, Shard | None], bool], facts: Any) -> _Share:
    shards = {path: chunk_of(value) for path, value in leaves.items() if is_dtensor(value)}
    held = [Held(name_of(p), c.local.nbytes, c.group, c.replica, c.replicas) for p, c in shards.items()]
    mine = dict(zip(shards, writes(held), strict=True))
    share = _Share(facts)
    names: list[str] = []
    objects: list[str] = []  # their names
    for place, (path, value) in enumerate(leaves.items()):
        chunk, shard = shards.get(path), None
        if chunk is not None:
            if not mine[path] or not (chunk.local.numel() or 0 in chunk.size):
                continue
            share.shards.append(len(share.tensors))
            shard = _shard(chunk.local, chunk.size, chunk.offsets)
        else:
            if type(value) in _TENSORS and _look(value) is not None:
                shard = _shard(value, value.shape, (0,) * value.dim())
            if not is_mine(path, shard):
                continue
        share.leaves.append((path, shard))
        (share.objects if shard is None else share.tensors).append(place)
        (objects if shard is None else names).append(name_of(path))
    share.names = names + objects
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
        written = self._cache.written(self._state.leaves(), self._is_mine)
        self._file.leaves, self._file.own = written.leaves, self._state.own
        self._plan = ShardPlan(written.items, self._cache.shards, self._stamp, look=lambda _: written.looked)
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
