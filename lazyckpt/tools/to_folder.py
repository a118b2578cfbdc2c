"""Lays out a state as a folder of torch.distributed.checkpoint (DCP) that one process writes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lazyckpt.errors import ConfigError
from lazyckpt.formats.inventory import Item, Shard, metadata_of, sealed
from lazyckpt.pipeline.sharded.shard_plan import ShardPlan
from lazyckpt.providers.global_state import Path as StatePath
from lazyckpt.providers.global_state import name_of
from lazyckpt.reading.part import tensors_in

FILE = "__0_0.distcp"


class FolderPlan(ShardPlan):
    """The only ``.distcp`` file of a folder. Raises ConfigError for a state that DCP cannot hold."""

    def __init__(self, state: Any, source: Path) -> None:
        """``source`` is where the state is from, for messages."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"{source}: a folder holds a dict, this is a {type(state).__name__}")
        self._leaves = dict(_leaves((), state))
        super().__init__([(name_of(path), _payload(source, path, leaf)) for path, leaf in self._leaves.items()])

    def metadata(self) -> bytes:
        """The contents of ``.metadata``, once the file is laid out."""
        items = [Item(path, _shard(leaf), *self.places[name_of(path)]) for path, leaf in self._leaves.items()]
        return sealed(metadata_of({FILE: items}))


def _leaves(path: StatePath, value: Any) -> Iterator[tuple[StatePath, Any]]:
    """The leaves of a state by path, as DCP's ``flatten_state_dict`` has them: all keys are texts. Empty dicts stay."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif type(value) is list and any(isinstance(inner, torch.Tensor | Mapping | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves((*path, number), inner)
    else:
        yield path, value


def _payload(source: Path, path: StatePath, leaf: Any) -> torch.Tensor | bytes:
    if isinstance(leaf, torch.Tensor):
        return leaf
    if next(tensors_in(leaf), None) is not None:
        raise ConfigError(
            f"{source}: {name_of(path)}: a tensor inside a {type(leaf).__name__}, which DCP does not part"
        )
    out = io.BytesIO()
    torch.save(leaf, out)
    return out.getvalue()


def _shard(leaf: Any) -> Shard | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    shape = tuple(leaf.shape)
    return Shard(str(leaf.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape)
