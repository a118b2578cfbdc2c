"""On every rank: checkpoints of all engines, and the time to load them into live state; with other ranks, too."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.tensor import DTensor

from benchmarks.arms import ArmKind
from benchmarks.disk import RAW, timed
from benchmarks.floor import CHUNK_BYTES, Floor
from benchmarks.paired import ArmFailed, interleaved
from benchmarks.ranks.arms import ARMS, make
from benchmarks.ranks.member import Member
from benchmarks.ranks.phases import Phases
from benchmarks.ranks.sharded import ShardedTraining
from benchmarks.ranks.task import Task
from benchmarks.restore import drop_caches
from benchmarks.workload import named_tensors

LOADABLE = ("lazyckpt", "lazyckpt-dcp", "dcp")
FOLDER = "loads"
STEP = 1


@dataclass(frozen=True)
class Saved:
    """What the checkpoints hold."""

    nbytes: int
    digest: int
    failures: dict[str, str]  # why an engine has none


@dataclass(frozen=True)
class Loads:
    """Seconds of the slowest rank, by arm and round; and why arms are missing."""

    seconds: dict[str, list[float]]
    failures: dict[str, str]
    cache: str  # how the page cache was treated before each load


def save(member: Member, task: Task) -> Saved:
    """Leaves a checkpoint of each engine that can load one, and as many raw bytes."""
    training, directory = _training(member, task), task.directory / FOLDER
    directory.mkdir(exist_ok=True)
    own_bytes = sum(t.nbytes for t in training.tensors().values())
    failures = {}
    for name in (name for name in task.arms if name in LOADABLE):
        member.tell(f"{name} saves")
        try:
            member.together(partial(_save, ARMS[name], training, directory))
        except ArmFailed as failed:
            failures[name] = str(failed)
    with Floor(2 * CHUNK_BYTES, copy_threads=0) as floor:
        floor.raw_write(directory / f"raw-{member.rank}", own_bytes)
    return Saved(sum(member.gather(own_bytes)), _digest(training), failures)


def _save(kind: ArmKind, training: ShardedTraining, directory: Path) -> None:
    with closing(make(kind, training, directory)) as arm:
        arm.save(STEP)
        arm.drain()


def load(member: Member, task: Task, saved: Saved) -> Loads:
    """Loads what `save` left, from a cold page cache if the ranks may empty it."""
    training, directory = _training(member, task), task.directory / FOLDER
    files = sorted(directory.glob("raw-*"))[member.rank :: member.size]

    def seconds(read: Callable[[], object]) -> float:
        def measured() -> float:
            with timed() as elapsed:
                read()
            return elapsed[0]

        return max(member.gather(member.together(measured)))

    def into_state(read: Callable[[], object]) -> float:
        for tensor in training.tensors().values():
            tensor.zero_()
        slowest = seconds(read)
        if any(digest != saved.digest for digest in member.gather(_digest(training))):
            raise ArmFailed("the state is not the one that was saved")
        return slowest

    with ExitStack() as stack:
        floor = stack.enter_context(Floor(2 * CHUNK_BYTES, copy_threads=0))
        arms = {RAW: partial(seconds, lambda: [floor.raw_read(file) for file in files])}
        missing = {}
        for name, saved_by, read in _readers(training, directory, stack):
            if saved_by not in task.arms:
                continue
            if saved_by in saved.failures:
                missing[name] = f"nothing was saved: {saved.failures[saved_by]}"
            else:
                arms[name] = partial(into_state, read)
        times, failures = interleaved(arms, task.pairs, member.tell, prepare=partial(_drop_caches, member))
    return Loads(times, missing | failures, _drop_caches(member))


def _readers(
    training: ShardedTraining, directory: Path, stack: ExitStack
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """The name of an arm, whose checkpoint it reads, and how."""

    @cache
    def checkpointer() -> Any:
        import lazyckpt

        one = stack.enter_context(lazyckpt.Checkpointer(directory / "lazyckpt"))
        one.track(model=training.model, optimizer=training.optimizer)
        return one

    def lazy_reader() -> None:
        from lazyckpt.integrations.dcp import LazyStorageReader

        reader = LazyStorageReader(_folder(directory / "lazyckpt-dcp"))
        load_state_dict(training.state(), storage_reader=reader)

    def plain(saved_by: str) -> None:
        load_state_dict(training.state(), checkpoint_id=_folder(directory / saved_by))

    yield "lazyckpt restore", "lazyckpt", lambda: checkpointer().restore()
    yield "lazyckpt-dcp, LazyStorageReader", "lazyckpt-dcp", lazy_reader
    yield "lazyckpt-dcp, dcp.load", "lazyckpt-dcp", partial(plain, "lazyckpt-dcp")
    yield "dcp, dcp.load", "dcp", partial(plain, "dcp")


def _folder(directory: Path) -> Path:
    return directory / f"step-{STEP:06d}"


def _training(member: Member, task: Task) -> ShardedTraining:
    return ShardedTraining(task.state_bytes, sequences=1, member=member, phases=Phases())


@torch.no_grad()
def _digest(training: ShardedTraining) -> int:
    """Of the whole tensors, however they are divided."""
    digest = 0
    for _, tensor in sorted(named_tensors("", training.state())):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest = zlib.crc32(memoryview(whole.contiguous().numpy().reshape(-1).view("u1")), digest)
    return digest


def _drop_caches(member: Member) -> str:
    """Of this machine, with all its ranks; returns how."""
    return member.gather(drop_caches() if member.rank == 0 else "")[0]
