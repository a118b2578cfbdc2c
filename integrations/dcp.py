"""torch.distributed.checkpoint (DCP): writes the folder of a sharded checkpoint lazily and durably, and reads it in
parallel. Plain DCP reads what this writes, and this reads what plain DCP wrote.

DCP plans on every rank, gathers the plans, and scatters what each rank must write; then it gathers the results and
calls ``finish`` on the coordinator. These steps are the commit:

    1. plan       every rank refuses a folder that holds anything; the coordinator stages one under a temporary name,
                  and the scattered plans carry that name
    2. write      every rank writes its files into it, and syncs them
    3. finish     only if no rank failed: the coordinator writes ``.metadata``, syncs it and the folder, renames the
                  folder, and syncs the folder above

A rank that fails or dies leaves no folder under the final name, and what was there before is untouched.

``async_save`` calls ``stage`` inside the training loop, long before there is a plan. So a rank captures what it is sure
to write: all shards that it alone holds. Of tensors that several ranks hold, it captures those that it wrote last time;
the first time, it copies all of them. It tells the coordinator, which gives such a tensor to a rank that has it.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import math
import os
import pickle
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

import lazyckpt
from lazyckpt import shards
from lazyckpt.capture.gate import gate
from lazyckpt.collector import collector_paused
from lazyckpt.errors import ConfigError, save_error
from lazyckpt.shards import METADATA, Place, ShardCapture, ShardSaver, write_shard
from lazyckpt.storage import folders, paths, removal
from lazyckpt.storage.commit import Staging

_SUFFIX = ".distcp"
_DIGEST_BYTES = 8
_UNHEARD_S = 120.0  # after which a staged save that torch never began is given up

gate.install()  # the first save is lazy if an optimizer has stepped before


class LazyStorageWriter(StorageWriter, AsyncStager):
    """Writes one checkpoint of ``torch.distributed.checkpoint``: lazily under ``async_save``, durably in any case.

        dcp.save(state, storage_writer=LazyStorageWriter("runs/a/step-100"))
        future = dcp.async_save(state, storage_writer=LazyStorageWriter("runs/a/step-200"), process_group=gloo)

    ``save`` returns when the checkpoint is durable, and the future is done when it is. ``async_save`` returns when
    everything is copied or guarded: an optimizer's next step waits for what it owns, as after ``Saver.save``. Both
    raise ConfigError, wrapped in DCP's CheckpointException, if ``path`` is more than an empty folder.

    Args:
        path: The folder, on a file system that all ranks share. Its parent is made.
        saver: Captures for ``async_save``. By default, all writers of a process share one with default settings.
    """

    def __init__(self, path: str | os.PathLike[str], *, saver: lazyckpt.Saver | None = None) -> None:
        self.path = paths.local(path)
        self._saver = saver
        self.save_id = str(uuid.uuid4())
        self._staged: _Staged | None = None
        self._folder: _NewFolder | None = None  # on the coordinator

    # AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Snapshots the tensors and freezes everything else. Raises SaveError, and ConfigError for a state that it
        cannot freeze or if the save before has not written yet."""
        if self._staged is not None and self._staged.is_wanted():
            raise ConfigError(f"{self.path}: this writer is still saving; wait for the future, or make another writer")
        try:
            folders.make_folder(self.path.parent)
        except OSError as error:
            raise save_error(error, path=self.path) from error
        saver = self._saver or _own_saver(os.getpid())
        self._staged = _Staged(state_dict, self.path, _shared.setdefault(saver, _Shared(saver)))
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
                "a mixture of two; remove what is there first, or choose another name"
            )
        if not getattr(plan, "usable", True):  # torch 2.7 and newer
            raise ConfigError("enable_plan_caching is not supported; LazySavePlanner keeps the plan of a run")
        missing: frozenset[str] = frozenset()
        if self._staged is not None:
            missing = self._staged.missing()
            self._staged.compare({item.index.fqn for item in plan.items})
        held = b"".join(_digest(item.index) for item in plan.items if item.index.fqn not in missing)
        items = [] if isinstance(plan.planner_data, _AsBefore) else plan.items
        return dataclasses.replace(plan, items=items, storage_data=_Offer(held))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._discard()
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
            self._folder.publish(pickle.dumps(metadata), written)
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

    # what they do

    def _hear(self) -> None:
        """Notes that torch has begun the staged save, on a thread of its own."""
        if self._staged is not None:
            self._staged.thread = threading.current_thread()

    def _discard(self) -> None:
        """Removes what an earlier save of this writer left, if it failed."""
        if self._folder is not None:
            self._folder.discard()
            self._folder = None

    def _write(self, plan: SavePlan, planner: SavePlanner, staged: _Staged | None) -> list[WriteResult]:
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
        if rest := {_name_of(index): index for index in values if index not in captured}:
            file = _file_name(0 if staged is None else 1)
            items = [(name, values[index]) for name, index in rest.items()]
            places = write_shard(items, folder, file, target=self.path)
            results += (_result(index, file, places[name]) for name, index in rest.items())
        if capture is not None:
            places = capture.result()
            results += (_result(index, _file_name(0), places[name]) for index, name in captured.items())
        if staged is not None:
            staged.abandon("other ranks write all of it")
            staged.learn(index.fqn for index in values)
        return results


class LazySavePlanner(DefaultSavePlanner):
    """Plans the first save of a run, and afterwards only tells the coordinator that the plan is as before.

        planner = LazySavePlanner()  # once, on every rank
        dcp.async_save(state, storage_writer=LazyStorageWriter(path), planner=planner, process_group=gloo)

    Planning takes a good part of a second for hundreds of tensors, and more with the number of ranks. Keep one planner
    for one process group: the coordinator must be the same. What has changed on a rank is planned again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._local: SavePlan | None = None  # the plan of this rank that the coordinator got last
        self._final: SavePlan | None = None  # and what came back
        self._is_known = False  # whether the coordinator has planned with it
        self._of_ranks: list[SavePlan] = []  # on the coordinator
        self._metadata: Metadata | None = None

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        as_before = self._is_known and plan == self._local
        self._is_known, self._local = False, plan
        return dataclasses.replace(plan, planner_data=_AsBefore()) if as_before else plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        changed = [not isinstance(plan.planner_data, _AsBefore) for plan in all_plans]
        if not all(changed) and len(self._of_ranks) != len(all_plans):
            raise ConfigError("a rank keeps a plan that this coordinator does not have: one planner, one process group")
        if any(changed):
            known = all_plans if all(changed) else self._of_ranks  # also after a change of the group
            plans = [new if is_new else old for new, old, is_new in zip(all_plans, known, changed, strict=True)]
            self._of_ranks = [dataclasses.replace(plan, storage_data=None) for plan in plans]
            offers = (plan.storage_data for plan in all_plans)
            plans = [dataclasses.replace(plan, storage_data=offer) for plan, offer in zip(plans, offers, strict=True)]
            all_plans, self._metadata = super().create_global_plan(plans)
        assert self._metadata is not None
        return all_plans, dataclasses.replace(self._metadata)  # who saves adds to it

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if isinstance(new_plan.planner_data, _AsBefore):
            assert self._final is not None
            new_plan = dataclasses.replace(self._final, storage_data=new_plan.storage_data)
        self._final, self._is_known = new_plan, True
        return super().finish_plan(new_plan)

    def release(self) -> None:
        """Lets go of the state. The writer calls it when all is resolved."""
        self.state_dict = {}


class _AsBefore:
    """Takes the place of ``planner_data`` in a plan that the coordinator has."""


class LazyStorageReader(StorageReader):
    """Reads a checkpoint of ``torch.distributed.checkpoint``, ours or plain DCP's, into a state of any sharding.

        dcp.load(state, storage_reader=LazyStorageReader("runs/a/step-100"))

    Each rank reads only the bytes that it needs, in parallel, straight into its tensors where these are contiguous, and
    verifies the checksum of every tensor that it reads whole. A damaged file raises CorruptFileError, which names file
    and tensor, wrapped in DCP's CheckpointException.

    Args:
        path: The folder.
        weights_only: Refuse pickles that name more than ``torch.load(weights_only=True)`` allows. Plain DCP runs
            whatever code they name.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        self.path = paths.local(path)
        self._weights_only = weights_only
        self.load_id = str(uuid.uuid4())
        self._items: Mapping[MetadataIndex, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._items = {}
        if checkpoint_id is not None:
            self.path = paths.local(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # DCP gives the rank where it looks for a checkpoint that ranks committed by themselves.
        rank = kwargs.get("rank")
        metadata: Metadata = shards.read_metadata(self.path / (METADATA if rank is None else f"__{rank}{METADATA}"))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._items = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Place]]] = {}
        for item in plan.items:
            info = self._items[item.storage_index]
            by_file.setdefault(info.relative_path, []).append((item, Place(info.offset, info.length)))
        for name, items in by_file.items():
            tensors: list[tuple[ReadItem, shards.Part]] = []
            for item, place in items:
                of = item.storage_index.fqn
                if item.type == LoadItemType.BYTE_IO:
                    content = shards.read_item(self.path / name, place, of, weights_only=self._weights_only)
                    planner.load_bytes(item, io.BytesIO(content))
                else:
                    target = planner.resolve_tensor(item).detach()
                    if target.shape != item.lengths:
                        raise ConfigError(f"{of}: the planner gives {tuple(target.shape)} for {tuple(item.lengths)}")
                    tensors.append((item, shards.Part(of, place, tuple(item.storage_offsets), target)))
            shards.read_parts(self.path / name, [part for _, part in tensors])
            for item, part in tensors:
                planner.commit_tensor(item, part.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


@dataclasses.dataclass(frozen=True)
class _Offer:
    """What a rank can write, with its local plan to the coordinator."""

    held: bytes  # the digests of the items, one behind the other


@dataclasses.dataclass(frozen=True)
class _Order:
    """What the coordinator says with the plan of a rank."""

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


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_SIMPLE = frozenset((int, float, bool, str, type(None)))


class _Shared:
    """What the writers of one Saver share."""

    def __init__(self, saver: lazyckpt.Saver) -> None:
        self.saver = ShardSaver(saver)
        self.shares: dict[Any, frozenset[str]] = {}
        """By names and shapes of the tensors that several ranks hold: those of them that this rank wrote last time."""


_shared: weakref.WeakKeyDictionary[lazyckpt.Saver, _Shared] = weakref.WeakKeyDictionary()


@cache
def _own_saver(pid: int) -> lazyckpt.Saver:
    """The Saver of this process for writers that were given none. A forked child makes its own."""
    return lazyckpt.Saver()


class _State(dict[str, Any]):
    """A staged state, which only this process can write."""

    def __init__(self, state: dict[str, Any], refuse: Callable[[], NoReturn]) -> None:
        super().__init__(state)
        self._refuse = refuse

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()


class _Staged:
    """One staged save: from ``stage`` until ``write_data``."""

    def __init__(self, state_dict: dict[str, Any], target: Path, shared: _Shared) -> None:
        self.thread: threading.Thread | None = None  # on which torch saves, once it has begun
        self.capture: ShardCapture | None = None
        self._begun = time.monotonic()
        self._target = target
        self._shares = shared.shares
        with collector_paused():
            self._freeze(state_dict)
        if self._captured:
            self.capture = shared.saver.capture(self._captured, _file_name(0), target=target, look=self._look)

    def _freeze(self, state_dict: dict[str, Any]) -> None:
        tensors = dict(_tensors_in(state_dict, ""))
        self._common = {name for name, tensor in tensors.items() if _is_common(tensor)}
        self._signature = _ranks(), *(_form(name, tensors[name]) for name in sorted(self._common))
        self._share = self._shares.get(self._signature)  # None: unknown yet
        self._captured: list[tuple[str, torch.Tensor]] = []
        self._copied: list[torch.Tensor] = []
        self._names_match = False
        memo: dict[int, Any] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in memo:
                memo[id(tensor)] = self._stand_in(name, tensor)
        self.state = _State(_frozen(state_dict, memo), self._refuse_process)

    def _stand_in(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What the staged state has instead: the same memory, whatever ``tensor`` is given later, or a copy."""
        if type(_local(tensor)) not in _PLAIN or (self._share is None and name in self._common):
            copied = tensor.detach().clone()
            self._copied.append(_local(copied))
            return copied
        alias = _alias(tensor)
        if _takes_part(tensor) and (self._share is None or name not in self._common or name in self._share):
            self._captured.append((name, _local(alias)))
        return alias

    def missing(self) -> frozenset[str]:
        """The tensors that several ranks hold and that this one did not capture."""
        return frozenset() if self._share is None else frozenset(self._common - self._share)

    def find(self, values: Mapping[MetadataIndex, torch.Tensor | bytes]) -> dict[MetadataIndex, str]:
        """Returns the names under which tensors were captured. The others were copied.

        Raises ConfigError for a tensor that is neither: it may have changed since."""
        captured = {_memory(tensor): name for name, tensor in self._captured}
        copied = set(map(_memory, self._copied))
        found = {}
        for index, value in values.items():
            if isinstance(value, bytes):
                continue
            memory = _memory(value)
            if memory in captured:
                found[index] = captured[memory]
            elif memory not in copied:
                self._shares.pop(self._signature, None)
                raise ConfigError(
                    f"{_name_of(index)} is not in the snapshot that async_save took: the planner makes a new tensor, "
                    "or another rank has changed what it holds. The next async_save copies everything first; for such "
                    "a planner use save"
                )
        return found

    def learn(self, written: Iterable[str]) -> None:
        """Notes what this rank wrote, so that the next save captures it."""
        if self._share is None and self._names_match:
            self._shares[self._signature] = frozenset(self._common.intersection(written))

    def compare(self, planned: Iterable[str]) -> None:
        """Notes whether the planner names tensors as they are named here. If not, they are copied each time."""
        self._names_match = self._common.issubset(planned)

    def is_wanted(self) -> bool:
        """Whether torch may still write it."""
        if self.thread is not None:
            return self.thread.is_alive()
        return time.monotonic() < self._begun + _UNHEARD_S

    def _look(self) -> None:
        if not self.is_wanted():
            self.abandon("torch.distributed.checkpoint gave it up before it was written; see its error")

    def abandon(self, why: str) -> None:
        if self.capture is not None:
            self.capture.abandon(why)

    def _refuse_process(self) -> NoReturn:
        self.abandon("AsyncCheckpointerType.PROCESS is not supported")
        raise ConfigError(
            f"{self._target}: a lazy save cannot be handed to another process: use AsyncCheckpointerType.THREAD, which "
            "is torch's default, instead of PROCESS. It takes no memory of the training process either"
        )


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state, with the names that DCP gives them."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, ShardedTensor):
            raise ConfigError(f"{name} is a ShardedTensor, of FSDP 1: use torch's fully_shard, or dcp.save")
        yield name, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, child in items:
        yield from _tensors_in(child, f"{name}.{key}" if name else str(key))


def _frozen(state: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """A copy of the state with other tensors: ``memo`` has them by ``id``. Torch pickles it while training goes on."""
    frozen = {}
    for key, value in state.items():
        try:
            frozen[key] = _copied(value, memo)
        except Exception as error:  # code of a class of the user's
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"state[{key!r}] cannot be copied, so async_save cannot freeze it: {what}") from error
    return frozen


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """As ``copy.deepcopy``, which takes many times as long for nested dicts and lists."""
    if type(value) in _SIMPLE:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if type(value) in (dict, OrderedDict):
        return {key: _copied(inner, memo) for key, inner in value.items()}
    if type(value) is list:
        return [_copied(inner, memo) for inner in value]
    return copy.deepcopy(value, memo)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without gradient. ``detach`` of a DTensor takes three times as long."""
    if type(tensor) is DTensor:
        return DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=False)
    return tensor.detach()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_common(tensor: torch.Tensor) -> bool:
    """Whether several ranks may hold the same of it."""
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        replicated = [axis for axis, how in enumerate(spec.placements) if how.is_replicate()]
        return any(spec.mesh.size(axis) > 1 for axis in replicated)
    return _ranks() > 1


def _form(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """What decides which ranks hold a tensor."""
    mesh = (tensor.device_mesh.shape, tensor.placements) if isinstance(tensor, DTensor) else ()
    return name, tensor.shape, tensor.dtype, *mesh


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _takes_part(tensor: torch.Tensor) -> bool:
    """Whether this rank is on the tensor's mesh."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def _memory(tensor: torch.Tensor) -> Any:
    """What two tensors have in common that are one memory seen in one way."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return id(tensor)


def _file_name(number: int) -> str:
    return f"__{dist.get_rank() if dist.is_initialized() else 0}_{number}{_SUFFIX}"


def _name_of(index: MetadataIndex) -> str:
    return index.fqn if not index.offset or not any(index.offset) else f"{index.fqn} at {list(index.offset)}"


def _result(index: MetadataIndex, file: str, place: Place) -> WriteResult:
    info = filesystem._StorageInfo(file, place.offset, place.nbytes)
    return WriteResult(index=index, size_in_bytes=place.nbytes, storage_data=info)


# Who writes what several ranks hold


def _digest(index: MetadataIndex) -> bytes:
    offset = None if index.offset is None else tuple(index.offset)
    return hashlib.blake2b(repr((index.fqn, offset)).encode(), digest_size=_DIGEST_BYTES).digest()


def balanced(plans: list[SavePlan]) -> list[SavePlan]:
    """Moves items that several ranks can write, so that all write about the same number of bytes.

    DCP's own rule counts the size of the whole tensor for each of its shards. Each plan's ``storage_data`` is the
    rank's offer. Moves an item also to the only rank that can write it, and leaves it where it is if none can."""
    held = [_numbers(plan.storage_data.held) for plan in plans]
    planned = [_numbers(b"".join(_digest(item.index) for item in plan.items)) for plan in plans]
    numbers, counts = torch.cat(held).unique(return_counts=True)
    displaced = [mine[~torch.isin(mine, can)] for mine, can in zip(planned, held, strict=True)]
    movable = torch.cat([numbers[counts > 1], *displaced]).unique()
    holders: dict[int, list[int]] = {number: [] for number in movable.tolist()}
    for rank, can in enumerate(held):
        for number in can[torch.isin(can, movable)].tolist():
            holders[number].append(rank)
    load = [0] * len(plans)
    stay: list[list[WriteItem]] = [[] for _ in plans]
    moving: dict[int, WriteItem] = {}
    for rank, (plan, mine) in enumerate(zip(plans, planned, strict=True)):
        for item, number in zip(plan.items, mine.tolist(), strict=True):
            if holders.get(number):
                moving[number] = item
            else:
                stay[rank].append(item)
                load[rank] += _bytes_of(item)
    for number, item in sorted(moving.items(), key=lambda pair: -_bytes_of(pair[1])):
        rank = min(holders[number], key=load.__getitem__)
        stay[rank].append(item)
        load[rank] += _bytes_of(item)
    return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, stay, strict=True)]


def _numbers(digests: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(digests), dtype=torch.int64) if digests else torch.empty(0, dtype=torch.int64)


def _bytes_of(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return 1  # a pickle, of unknown size
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
