"""torch.distributed.checkpoint (DCP): reads the folder of a sharded checkpoint, ours or plain DCP's, in parallel."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lazyckpt import shards
from lazyckpt.errors import ConfigError
from lazyckpt.shards import METADATA, FileReader, Place
from lazyckpt.storage import paths


class LazyStorageReader(StorageReader):
    """Reads a checkpoint of ``torch.distributed.checkpoint``, ours or plain DCP's, into a state of any sharding.

        dcp.load(state, storage_reader=LazyStorageReader("runs/a/step-100"))

    Each rank reads only what it needs, in parallel, straight into its tensors where these are contiguous. Every byte
    that reaches a tensor was checked. A damaged file raises CorruptFileError, which names file and tensor, wrapped in
    DCP's CheckpointException.

    Args:
        path: The folder.
        weights_only: Refuse pickles that name more than ``torch.load(weights_only=True)`` allows. Plain DCP runs
            any code that they name.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        self.path = paths.local(path)
        self._weights_only = weights_only
        self.load_id = str(uuid.uuid4())
        self._save_id: str | None = None
        self._items: Mapping[MetadataIndex, Any] = {}
        self._stamps: shards.Stamps | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._items, self._stamps = {}, None
        if checkpoint_id is not None:
            self.path = paths.local(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # DCP gives the rank where it looks for a checkpoint that ranks committed by themselves.
        rank = kwargs.get("rank")
        path = self.path / (METADATA if rank is None else f"__{rank}{METADATA}")
        metadata: Metadata
        metadata, self._stamps = shards.read_metadata(path)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        self._save_id = metadata.storage_meta.save_id
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._items = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=_Opened(str(self.path), self._save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        mine: _Opened = plans[0].storage_data
        for rank, plan in enumerate(plans):
            theirs: _Opened = plan.storage_data
            if theirs.save_id != mine.save_id:
                raise ConfigError(f"rank {rank} loads {theirs.path}, rank 0 loads {mine.path}: all load one checkpoint")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Place]]] = {}
        for item in plan.items:
            info = self._items[item.storage_index]
            by_file.setdefault(info.relative_path, []).append((item, Place(info.offset, info.length)))
        for name, items in by_file.items():
            with FileReader(self.path / name) as file:
                self._read_file(file, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, file: FileReader, items: list[tuple[ReadItem, Place]], planner: LoadPlanner) -> None:
        if self._stamps is not None:
            self._stamps.check(file)
        objects = [(item, place) for item, place in items if item.type == LoadItemType.BYTE_IO]
        places = [(item.storage_index.fqn, place) for item, place in objects]
        contents = shards.read_items(file, places, weights_only=self._weights_only)
        for (item, _), content in zip(objects, contents, strict=True):
            planner.load_bytes(item, io.BytesIO(content))
        tensors: list[tuple[ReadItem, shards.Slice]] = []
        for item, place in items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            of, target = item.storage_index.fqn, planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                raise ConfigError(f"{of}: the planner gives {tuple(target.shape)} for {tuple(item.lengths)}")
            tensors.append((item, shards.Slice(of, place, tuple(item.storage_offsets), target)))
        shards.read_slices(file, [part for _, part in tensors])
        for item, part in tensors:
            planner.commit_tensor(item, part.target)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


@dataclasses.dataclass(frozen=True)
class _Opened:
    """The checkpoint that a rank loads."""

    path: str
    save_id: str | None  # none in a folder of a Checkpointer or an old version of torch
