"""Many ranks that hold one state, as with DistributedDataParallel: a checkpoint of one file, back into all of them.

The ranks are gloo processes on this machine. All arms of a table take turns in every round, in shuffled order, and read
the same file, whose bytes each one must leave in the parameters and the optimizer of every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.disk import RAW, timed
from benchmarks.floor import CHUNK_BYTES, Floor
from benchmarks.paired import ArmFailed, Progress, interleaved, ratios, spread
from benchmarks.pictures import Picture
from benchmarks.ranks.member import Member, run_ranks
from benchmarks.report import Table
from benchmarks.restore import drop_caches
from benchmarks.settings import Settings

TENSORS = 100
SAVED = "checkpoints"


@dataclass(frozen=True)
class Task:
    directory: Path  # empty, and the same for all ranks
    state_bytes: int
    pairs: int


@dataclass(frozen=True)
class Load:
    seconds: float  # of the slowest rank
    read_bytes: int  # of all ranks, from the disk


@dataclass(frozen=True)
class Loads:
    cache: str
    how: str  # it was treated before each load
    nbytes: int  # of the file
    samples: dict[str, list[Load]]
    failures: dict[str, str]


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    task = Task(settings.directory, settings.state_bytes, settings.pairs)
    for loads in run_ranks(_load, settings.ranks, task, progress):
        yield _table(loads, settings)


class Replica:
    def __init__(self, state_bytes: int) -> None:
        torch.manual_seed(1)
        sizes = [state_bytes // 3 // TENSORS // 4] * TENSORS  # with both moments of AdamW
        self.model = torch.nn.ParameterList(torch.randn(size) for size in sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        states = self.optimizer.state_dict()["state"].values()
        return [p.detach() for p in self.model] + [tensor for state in states for tensor in state.values()]

    def load(self, file: Path, *, mmap: bool) -> None:
        saved = torch.load(file, mmap=mmap)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def forget(self) -> None:
        """Overwrites the state. After torch.load(mmap) the optimizer views the file, whose pages stay cached."""
        with torch.no_grad():
            for parameter in self.model:
                parameter.zero_()
        for state in self.optimizer.state.values():
            for name, tensor in state.items():
                state[name] = torch.empty_like(tensor).zero_()

    def touch(self) -> None:
        """Reads a byte of each page: torch.load(mmap) leaves the optimizer's state in the file until it is used."""
        for tensor in self.tensors():
            tensor.reshape(-1).view(torch.uint8)[::4096].any()

    def digest(self) -> int:
        digest = 0
        for tensor in self.tensors():
            digest = zlib.crc32(memoryview(tensor.numpy().reshape(-1).view("u1")), digest)
        return digest


def _load(member: Member, task: Task) -> list[Loads]:
    import lazyckpt

    with ExitStack() as stack:
        floor = stack.enter_context(Floor(4 * CHUNK_BYTES, copy_threads=0))
        replica = Replica(task.state_bytes)
        together = stack.enter_context(lazyckpt.Checkpointer(task.directory / SAVED, writers="all"))
        alone = stack.enter_context(lazyckpt.Checkpointer(task.directory / SAVED, read_only=True))
        for checkpointer in (together, alone):
            checkpointer.track(model=replica.model, optimizer=replica.optimizer)
        member.tell("lazyckpt saves")
        file = together.save(1).result() / "state.pt"
        nbytes = file.stat().st_size
        raw = task.directory / f"raw-{member.rank}"
        floor.raw_write(raw, nbytes // member.size)
        arms: dict[str, Callable[[], object]] = {
            "lazyckpt restore, together": together.restore,
            "lazyckpt restore, each alone": alone.restore,
            "torch.load on each": partial(replica.load, file, mmap=False),
            "torch.load(mmap) on each": partial(replica.load, file, mmap=True),
            "torch.load on rank 0, broadcasts": partial(_broadcast, member, replica, file),
        }
        checked = {name: partial(_checked, member, replica, replica.digest(), read) for name, read in arms.items()}
        checked[RAW] = partial(_timed, member, lambda: floor.raw_read(raw))
        found = []
        for cache, prepare in (("a cold", drop_caches), ("a warm", lambda: "every arm has read its file before")):
            how = partial(_prepared, member, replica, prepare)
            member.tell(f"{cache} cache")
            samples, failures = interleaved(checked, task.pairs, member.tell, prepare=how)
            found.append(Loads(cache, how(), nbytes, samples, failures))
        return found


def _broadcast(member: Member, replica: Replica, file: Path) -> None:
    if member.rank == 0:
        replica.load(file, mmap=False)
    for tensor in replica.tensors():
        dist.broadcast(tensor, 0)


def _checked(member: Member, replica: Replica, digest: int, read: Callable[[], object]) -> Load:
    def complete() -> None:
        read()
        replica.touch()

    load = _timed(member, complete)
    if any(found != digest for found in member.gather(replica.digest())):
        raise ArmFailed("the state is not the one that was saved")
    return load


def _timed(member: Member, read: Callable[[], object]) -> Load:
    def seconds() -> float:
        with timed() as elapsed:
            read()
        return elapsed[0]

    before = _read_bytes()
    found = member.gather(member.together(seconds))
    return Load(max(found), sum(member.gather(_read_bytes() - before)))


def _read_bytes() -> int:
    """What this process has had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _prepared(member: Member, replica: Replica, prepare: Callable[[], str]) -> str:
    replica.forget()
    member.barrier()
    return member.gather(prepare() if member.rank == 0 else "")[0]


def _table(loads: Loads, settings: Settings) -> Table:
    title = f"{settings.ranks} ranks restore one state of {loads.nbytes / 1e9:.2f} GB from {loads.cache} page cache"
    table = Table(title, ["arm", "s", "GB/s", "of raw", "read, of the file"], picture=Picture("", "GB/s"))
    assert table.picture is not None
    raw = [load.seconds for load in loads.samples[RAW]]
    for name, samples in loads.samples.items():
        if name in loads.failures:
            table.missing(name, loads.failures[name])
            continue
        seconds = [load.seconds for load in samples]
        rates = [loads.nbytes / s / 1e9 for s in seconds]
        share = [load.read_bytes / loads.nbytes for load in samples]
        table.add(
            name,
            spread(seconds),
            spread(rates),
            f"{spread([100 * r for r in ratios(raw, seconds)], 0)} %",
            spread(share),
        )
        table.picture.add("", name, rates)
    table.notes += [
        f"{settings.pairs} rounds; until the last rank has touched all of it. Before each: {loads.how}.",
        "The raw loop reads as many bytes, an equal part on each rank. Read: from the disk, by all ranks together.",
    ]
    return table
