"""torch.distributed.checkpoint (DCP): writes the folder of a sharded checkpoint lazily and durably. Plain DCP reads
what this writes; ``LazyStorageReader`` reads both (dcp_reader.py).

DCP plans on every rank, gathers the plans, and scatters each rank's part; then it gathers the results and
calls ``finish`` on the coordinator. These steps are the commit:

    1. plan       every rank refuses a folder that holds anything; the coordinator stages one under a temporary name,
                  and the scattered plans carry that name
    2. write      every rank writes its files into it, and syncs them
    3. finish     only if no rank failed: the coordinator writes ``.metadata``, syncs it and the folder, renames the
                  folder, and syncs the folder above

A rank that fails or dies leaves no folder under the final name, and does not touch what that name had.

``async_save`` calls ``stage`` inside the training loop, long before there is a plan. So a rank captures the tensors
that it is sure to write: all shards that it alone holds. Of tensors that several ranks hold, it captures those that it
wrote last time; the first time, it copies all of them. It tells the coordinator, which gives such a tensor to a rank
that has it.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import threading
import uuid
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import lazyckpt
from lazyckpt import private_names
from lazyckpt.errors import ConfigError, save_error
from lazyckpt.formats.inventory import sealed
from lazyckpt.gate import hooks
from lazyckpt.shards import METADATA, Place, write_shard
from lazyckpt.storage import folders, paths, removal
from lazyckpt.storage.commit import Staging

with private_names.needed("torch.distributed.checkpoint"):
    from lazyckpt.integrations.dcp_planner import AsBefore, Offer, balanced, digest, form_digests, refuse_other_forms
    from lazyckpt.integrations.dcp_planner import LazySavePlanner as LazySavePlanner
    from lazyckpt.integrations.dcp_reader import LazyStorageReader as LazyStorageReader
    from lazyckpt.integrations.dcp_staging import Staged, file_name, name_of

hooks.install()  # the first save is lazy if an optimizer has stepped before


class LazyStorageWriter(StorageWriter, AsyncStager):
    """Writes one checkpoint of ``torch.distributed.checkpoint``: lazily under ``async_save``, durably in any case.

        dcp.save(state, storage_writer=LazyStorageWriter("runs/a/step-100"))
        future = dcp.async_save(state, storage_writer=LazyStorageWriter("runs/a/step-200"), process_group=gloo)

    ``save`` returns when the checkpoint is durable, and the future is done when it is. ``async_save`` returns when
    everything is copied or guarded: an optimizer's next step waits for its own storages, as after ``Saver.save``. Both
    raise ConfigError, wrapped in DCP's CheckpointException, if ``path`` is more than an empty folder.

    Args:
        path: The folder, on a file system that all ranks share. Its parent is made.
        saver: Captures for ``async_save``. By default, all writers of a process share one with default settings.
    """

    def __init__(self, path: str | os.PathLike[str], *, saver: lazyckpt.Saver | None = None) -> None:
        self.path = paths.local(path)
        if saver is not None and not isinstance(saver, lazyckpt.Saver):
            raise ConfigError(f"saver={saver!r}: expected a lazyckpt.Saver")
        self._saver = saver
        self.save_id = str(uuid.uuid4())
        self._staged: Staged | None = None
        self._folder: _NewFolder | None = None  # on the coordinator

    # AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Snapshots the tensors and freezes everything else. Raises SaveError, and ConfigError for a state that it
        cannot freeze or if the save before has not written yet."""
        if self._staged is not None and self._staged.is_wanted():
            raise ConfigError(f"{self.path}: this writer is still saving; wait for the future, or make another writer")
        try:
            if not self.path.parent.is_dir():  # its name is synced by prepare_global_plan, too: it takes milliseconds
                folders.make_folder(self.path.parent)
        except OSError as error:
            raise save_error(error, path=self.path) from error
        self._staged = Staged(state_dict, self.path, self._saver)
        return self._staged.state

    def synchronize_staging(self) -> None:
        """Does nothing: ``stage`` has guarded everything."""

    def close(self) -> None:
        """Gives up a save that was staged and that torch has not begun to write."""
        if self._staged is not None:
            self._staged.abandon("the writer was closed")

    # StorageWriter

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = paths.local(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        self._hear()
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # DCP gives rank and use_collectives only to a parameter of this name; older versions give neither.
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False is not supported: every rank would commit for itself")
        self._hear()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if _is_taken(self.path):
            raise ConfigError(
                f"{self.path} exists. A checkpoint replaces nothing but an empty folder: a rank that died could leave "
                "a mixture of two; remove it first, or choose another name"
            )
        if not getattr(plan, "usable", True):  # torch 2.7 and newer
            raise ConfigError("enable_plan_caching is not supported; LazySavePlanner keeps the plan of a run")
        missing: frozenset[str] = frozenset()
        if self._staged is not None:
            missing = self._staged.missing()
            self._staged.compare({item.index.fqn for item in plan.items})
        held = b"".join(digest(item.index) for item in plan.items if item.index.fqn not in missing)
        forms = b"".join(map(form_digests, plan.items))
        items = [] if isinstance(plan.planner_data, AsBefore) else plan.items
        return dataclasses.replace(plan, items=items, storage_data=Offer(self.path.name, held, forms))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._discard()
        for rank, plan in enumerate(plans):
            if (name := plan.storage_data.folder) != self.path.name:
                raise ConfigError(f"rank {rank} saves {name}, the coordinator saves {self.path}: all save one folder")
        refuse_other_forms(plans)
        try:
            folders.make_folder(self.path.parent)
            removal.sweep(self.path.parent)
            self._folder = _NewFolder(self.path)
        except OSError as error:
            raise save_error(error, path=self.path) from error
        order = _Order(self._folder.staging.path.name)
        return [dataclasses.replace(plan, storage_data=order) for plan in balanced(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        staged, self._staged = self._staged, None
        try:
            results = self._write(plan, planner, staged)
        except BaseException as error:
            if staged is not None and staged.capture is not None:
                staged.abandon(f"another part failed: {error}")
                staged.capture.wait()  # the coordinator removes the folder soon
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._folder is not None
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):  # torch 2.7 and newer
            metadata.version = filesystem.CURRENT_DCP_VERSION
        written = {info.relative_path for info in metadata.storage_data.values()}
        try:
            self._folder.publish(sealed(pickle.dumps(metadata)), written)
        except OSError as error:
            raise save_error(error, path=self.path) from error
        finally:
            self._discard()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LazyStorageWriter cannot be copied or pickled, since it belongs to one process")

    # steps of these calls

    def _hear(self) -> None:
        """Notes that torch has begun the staged save, on a thread of its own."""
        if self._staged is not None:
            self._staged.thread = threading.current_thread()

    def _discard(self) -> None:
        """Removes the remains of an earlier save of this writer, if it failed."""
        if self._folder is not None:
            self._folder.discard()
            self._folder = None

    def _write(self, plan: SavePlan, planner: SavePlanner, staged: Staged | None) -> list[WriteResult]:
        order = plan.storage_data
        assert isinstance(order, _Order)
        folder = self.path.parent / order.folder
        if not folder.is_dir():
            raise ConfigError(
                f"this rank does not see {folder}, which the coordinator has made: the checkpoint needs a folder on a "
                "file system that all ranks share"
            )
        values: dict[MetadataIndex, torch.Tensor | bytes] = {}
        for item in plan.items:
            with torch.no_grad():  # then a DTensor gives its own local tensor
                data = planner.resolve_data(item)
            values[item.index] = data.getvalue() if isinstance(data, io.BytesIO) else data
        if isinstance(planner, LazySavePlanner):
            planner.release()
        captured = {} if staged is None else staged.find(values)
        capture = staged.capture if staged is not None and captured else None
        if capture is not None:
            capture.open(folder)
        results: list[WriteResult] = []
        if rest := {name_of(index): index for index in values if index not in captured}:
            file = file_name(0 if staged is None else 1)
            items = [(name, values[index]) for name, index in rest.items()]
            places = write_shard(items, folder, file, target=self.path)
            results += (_result(index, file, places[name]) for name, index in rest.items())
        if capture is not None:
            places = capture.result()
            results += (_result(index, file_name(0), places[name]) for index, name in captured.items())
        if staged is not None:
            staged.abandon("other ranks write all of it")
            staged.learn(index.fqn for index in values)
        return results


@dataclasses.dataclass(frozen=True)
class _Order:
    """The coordinator's message to a rank, with its plan."""

    folder: str  # the temporary name


class _NewFolder:
    """The staged folder of a checkpoint. It is removed with this object, unless it was published."""

    def __init__(self, target: Path) -> None:
        self.staging = Staging(target, replaces=False)
        self.discard = weakref.finalize(self, _discard, self.staging, os.getpid())

    def publish(self, metadata: bytes, written: Iterable[str]) -> None:
        """``written``: the files that are synced. Raises OSError."""
        with open(self.staging.path / METADATA, "xb") as file:
            file.write(metadata)
            file.flush()
            os.fsync(file.fileno())
        self.staging.describe(None, {*written, METADATA})
        self.staging.publish()


def _is_taken(path: Path) -> bool:
    """Whether the name has more than an empty folder, which a rename replaces."""
    try:
        return path.is_symlink() or path.is_mount() or any(path.iterdir())
    except OSError:  # no folder, or none that this process may read
        return os.path.lexists(path)


def _discard(staging: Staging, pid: int) -> None:
    if os.getpid() == pid:
        staging.discard()


def _result(index: MetadataIndex, file: str, place: Place) -> WriteResult:
    info = filesystem._StorageInfo(file, place.offset, place.nbytes)
    return WriteResult(index=index, size_in_bytes=place.nbytes, storage_data=info)
