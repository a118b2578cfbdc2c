"""The plan of the file that one rank writes: its share of a state that many ranks hold."""

from __future__ import annotations

import functools
import io
import itertools
import math
import pickle
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lazyckpt.formats.distcp import Place
from lazyckpt.formats.inventory import Item, Part
from lazyckpt.formats.program import Extent
from lazyckpt.pipeline.plan import FilePlan
from lazyckpt.pipeline.shard_plan import ShardCache, ShardPlan
from lazyckpt.providers.base import StorageTable, TensorViews
from lazyckpt.providers.global_state import Leaves, Path, chunk_of, is_dtensor, name_of
from lazyckpt.providers.pickles import dump
from lazyckpt.providers.restorable import refuse_unreadable
from lazyckpt.ranks.shares import Held, writes

_SIMPLE = (int, float, bool, str, type(None))


@dataclass
class Contents:
    """What the file of one rank holds, once it is laid out."""

    parts: list[tuple[Path, Part | None]] = field(default_factory=list)
    places: Mapping[str, Place] = field(default_factory=dict)  # of the items, by name
    own: Container[str | int] = ()  # see global_state.Leaves

    def items(self) -> list[Item]:
        return [Item(path, part, *self.places[name_of(path)]) for path, part in self.parts]

    def shared(self) -> list[str]:
        """The names that other ranks may have whole, too."""
        whole = [path for path, part in self.parts if part is None or part.is_whole]
        return [name_of(path) for path in whole if path[0] not in self.own]


class RankCache:
    """What successive files of one rank share. Holds no tensor of the state."""

    def __init__(self) -> None:
        self.shards = ShardCache()
        self.elsewhere: frozenset[str] = frozenset()
        """Names that rank 0 writes, as it has told. Until then this rank writes all that it has: rank 0 need not have
        every part of a model."""
        self._shards: tuple[Any, dict[Path, Part | None]] = None, {}  # names and placements, and what comes of them
        self._objects: dict[str, tuple[bytes | None, bytes]] = {}  # pickle and archive, by name

    def shards_of(self, leaves: Mapping[Path, Any]) -> Mapping[Path, Part | None]:
        """The part of each DTensor that this rank writes, or None."""
        shards = {path: value for path, value in leaves.items() if is_dtensor(value)}
        facts = list(shards), [value._spec for value in shards.values()]
        if self._shards[0] != facts:
            chunks = {path: chunk_of(value) for path, value in shards.items()}
            held = [Held(name_of(p), c.local.nbytes, c.group, c.replica, c.replicas) for p, c in chunks.items()]
            parts: dict[Path, Part | None] = {}
            for (path, chunk), mine in zip(chunks.items(), writes(held), strict=True):
                holds_some = chunk.local.numel() or not math.prod(chunk.size)
                parts[path] = _part(chunk.local, chunk.size, chunk.offsets) if mine and holds_some else None
            self._shards = facts, parts
        return self._shards[1]

    def frozen(self, name: str, value: Any) -> bytes:
        """``value`` as ``torch.save`` writes it, now. Raises UnrestorableError if ``restore()`` could not read it."""
        pickled = pickle.dumps(value) if _is_simple(value) else None
        known, archive = self._objects.get(name, (None, b""))
        if pickled is not None and pickled == known:
            return archive
        if name not in self._objects and pickled is None:
            table = StorageTable(map(str, itertools.count()))
            refuse_unreadable(value, "", dump(value, table, iter(()))[0], table)
        out = io.BytesIO()
        torch.save(value, out)
        self._objects[name] = pickled, out.getvalue()
        return out.getvalue()


def _is_simple(value: Any) -> bool:
    return type(value) in _SIMPLE or (type(value) in (list, tuple) and all(type(inner) in _SIMPLE for inner in value))


class RankPlan(FilePlan):
    """A ``.distcp`` file with the share of one rank (DataStates-LLM, V; FastPersist, 4.2).

    A shard is written by one of the ranks that hold it. What every rank has of its own is written by every rank, and
    everything else by rank 0, since it is the same everywhere, or, like the statistics of BatchNorm, one of many."""

    any_order = True

    def __init__(self, state: Leaves, rank: int, cache: RankCache, contents: Contents) -> None:
        """``contents`` is filled in when the file is laid out."""
        self._state = state
        self._rank = rank
        self._cache = cache
        self._contents = contents
        self._plan: ShardPlan | None = None

    def gather(self) -> TensorViews:
        share = self._share()
        self._contents.parts = [(path, part) for path, part, _ in share]
        self._contents.own = self._state.own
        self._plan = ShardPlan([(name_of(path), payload) for path, _, payload in share], self._cache.shards)
        return self._plan.gather()

    def _share(self) -> list[tuple[Path, Part | None, torch.Tensor | bytes]]:
        """Path, part and payload of each item."""
        leaves = self._state.leaves()
        parts = self._cache.shards_of(leaves)
        share: list[tuple[Path, Part | None, torch.Tensor | bytes]] = []
        for path, value in leaves.items():
            if path in parts:
                if (part := parts[path]) is not None:
                    share.append((path, part, value._local_tensor))
            elif self._is_mine(path):
                share.append(self._whole(path, value))
        return share

    def _is_mine(self, path: Path) -> bool:
        return self._rank == 0 or path[0] in self._state.own or name_of(path) not in self._cache.elsewhere

    def _whole(self, path: Path, value: Any) -> tuple[Path, Part | None, torch.Tensor | bytes]:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_nested:
            return path, _whole(value.dtype, value.shape), value
        return path, None, self._cache.frozen(name_of(path), value)

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        assert self._plan is not None
        program = self._plan.lay_out(views)
        self._contents.places = self._plan.places
        return program

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return None if self._plan is None else self._plan.name_of(storage)


@functools.lru_cache(maxsize=1 << 16)
def _whole(dtype: torch.dtype, size: torch.Size) -> Part:
    return Part(str(dtype).removeprefix("torch."), tuple(size), (0,) * len(size), tuple(size))


def _part(local: torch.Tensor, size: tuple[int, ...], offsets: tuple[int, ...]) -> Part:
    return Part(str(local.dtype).removeprefix("torch."), size, offsets, tuple(local.shape))
