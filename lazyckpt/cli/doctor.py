"""``lazyckpt doctor``: what this machine offers, and what lazyckpt will therefore do."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

import lazyckpt
from lazyckpt import _engine
from lazyckpt.capture.budget import auto_ring_bytes, available_memory_bytes
from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import columns, plain, print_json, show, size, stdout
from lazyckpt.config import Config
from lazyckpt.errors import ConfigError
from lazyckpt.storage import mounts

_IN_MEMORY = ("tmpfs", "ramfs")
_CAP_IPC_LOCK = 14


def doctor(
    directory: Annotated[Path, path_argument("[DIR]", "Where checkpoints are to go.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what this machine offers, and what lazyckpt will therefore do."""
    facts = _Facts.of(directory)
    if as_json:
        conclusions = [{"serious": serious, "text": sentence} for serious, sentence in _conclude(facts)]
        print_json({"facts": dict(_describe(facts)), "conclusions": conclusions})
        return
    console = stdout()
    console.print(Text("What there is", style="bold"))
    table = columns("", "", wrap=("",))
    for topic, fact in _describe(facts):
        table.add_row(topic, Text(plain(fact), style="yellow" if fact.startswith("no:") else ""))
    show(console, Padding(table, (0, 0, 1, 2), expand=False))
    console.print(Text("What lazyckpt will therefore do", style="bold"))
    table = columns("", "", wrap=("",))
    for serious, sentence in _conclude(facts):
        mark = Text("!", style="bold yellow") if serious else Text("·")
        table.add_row(mark, Text(plain(sentence)))
    show(console, Padding(table, (0, 0, 0, 2), expand=False))


@dataclass(frozen=True)
class _Facts:
    """What was found out. ``asked`` is the folder asked for, ``directory`` its nearest parent that exists."""

    asked: Path
    directory: Path
    writable: bool
    file_system: str
    free_bytes: int
    total_bytes: int
    available_bytes: int
    ring_bytes: int
    locks_freely: bool
    probe: dict[str, str]
    numa_nodes: int
    torch: str  # its version
    gpus: tuple[str, ...]  # that torch can use

    @staticmethod
    def of(asked: Path) -> _Facts:
        import torch  # takes seconds

        directory = asked.absolute()
        while not directory.exists():
            directory = directory.parent
        if not directory.is_dir():
            raise ConfigError(f"{directory}: not a folder")
        disk = os.statvfs(directory)
        return _Facts(
            asked=asked,
            directory=directory,
            writable=os.access(directory, os.W_OK | os.X_OK),
            file_system="{} on {}".format(*mounts.file_system(directory)),
            free_bytes=disk.f_bavail * disk.f_frsize,
            total_bytes=disk.f_blocks * disk.f_frsize,
            available_bytes=available_memory_bytes(),
            ring_bytes=auto_ring_bytes(Config.chunk_bytes),
            locks_freely=_may_lock_memory(),
            probe=_engine.probe(directory),
            numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
            torch=torch.__version__,
            gpus=tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        )

    @property
    def io_uring(self) -> bool:
        return self.probe["io_uring"] == "yes"

    @property
    def o_direct(self) -> bool:
        return self.probe["o_direct"] == "yes"

    @property
    def fuse(self) -> bool:
        return self.probe["fuse"] == "yes"

    @property
    def memlock_bytes(self) -> int | None:
        """None: no limit."""
        limit = self.probe.get("memlock_bytes", "unlimited")
        return None if limit == "unlimited" or self.locks_freely else int(limit)


def _describe(facts: _Facts) -> list[tuple[str, str]]:
    probe = facts.probe
    build = ", test build with fault injection" if _engine.FAULTS else ""
    alignment = f", alignment {probe['alignment_bytes']} bytes" if "alignment_bytes" in probe else ""
    limit = probe.get("memlock_bytes", "unlimited")
    memlock = limit if limit == "unlimited" else size(int(limit))
    where = str(facts.directory)
    if facts.directory != facts.asked.absolute():
        where += f" (the nearest folder of {facts.asked} that exists)"
    return [
        ("lazyckpt", f"{lazyckpt.__version__}, checksums by {probe['crc32']}{build}"),
        ("torch", f"{facts.torch}, Python {platform.python_version()}"),
        ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs"),
        ("folder", where),
        ("file system", facts.file_system),
        ("free space", f"{size(facts.free_bytes)} of {size(facts.total_bytes)}"),
        ("io_uring", probe["io_uring"]),
        ("O_DIRECT", probe["o_direct"] + (alignment if facts.o_direct else "")),
        ("pages", f"watched for writes: {probe['page_witness']}; copied on write: {probe['copy_on_write']}"),
        ("memory", f"{size(facts.available_bytes)} available to this process"),
        ("memlock", memlock + (", which does not bind this process" if facts.locks_freely else "")),
        ("CUDA", _cuda(facts)),
    ]


def _cuda(facts: _Facts) -> str:
    probe = facts.probe
    if facts.gpus:
        version = f"; driver of CUDA {probe['cuda_version']}" if "cuda_version" in probe else ""
        return ", ".join(facts.gpus) + version
    if probe["cuda_driver"] == "yes":
        return "no: there is a driver, but torch finds no device it can use"
    return probe["cuda_driver"]


def _conclude(facts: _Facts) -> list[tuple[bool, str]]:
    """Sentences, and whether they are bad news."""
    found: list[tuple[bool, str]] = []
    if not facts.writable:
        found.append((True, "Fail: this user may not write to the folder."))
    in_memory = facts.file_system.split()[0] in _IN_MEMORY
    if in_memory:
        found.append((True, "Write to memory: what is saved here is gone after a restart of the machine."))
    if facts.fuse:
        found.append(
            (
                False,
                "Write with a pool of threads, through the page cache: this is FUSE (or virtiofs), and direct writes "
                "with io_uring go wrong there if the server answers short. io_backend and direct_io override that.",
            )
        )
    elif facts.io_uring:
        found.append((False, "Write and read with io_uring, several requests in flight."))
    else:
        reason = facts.probe["io_uring"].removeprefix("no: ")
        found.append(
            (True, f"Write and read with a pool of threads, since io_uring is refused ({reason}); it warns once.")
        )
    if facts.probe["page_witness"] == "yes":
        found.append((False, "Watch the pages of lazily copied tensors: the kernel notices every write to them."))
    else:
        reason = facts.probe["page_witness"].removeprefix("no: ")
        found.append(
            (
                True,
                f"Watch version counters of lazily copied tensors, since the kernel does not watch pages ({reason}); "
                "docs/consistency.md lists the writers that move none.",
            )
        )
    if facts.fuse:
        pass  # said above
    elif facts.o_direct and not in_memory:
        found.append((False, "Go past the page cache (O_DIRECT), so that checkpoints do not push other data out."))
    elif not facts.o_direct and not in_memory:
        found.append((False, "Go through the page cache, since this file system has no O_DIRECT; as safe, but slower."))
    ring = f"A quarter of the available memory, {size(facts.ring_bytes)}, is the most"
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1") or "1"
    if ranks != "1":
        ring = f"A quarter of the available memory by {ranks} ranks, {size(facts.ring_bytes)}, is the most"
    found.append(
        (
            False,
            f'{ring} that the staging buffer takes (host_buffer_bytes="auto"); else what a checkpoint '
            "needs. A larger checkpoint is copied as fast as the disk makes room.",
        )
    )
    if facts.io_uring and facts.memlock_bytes is not None and facts.memlock_bytes < facts.ring_bytes:
        found.append(
            (
                False,
                f"Not register a buffer above {size(facts.memlock_bytes)} with the kernel (memlock): all works, at a "
                "little more CPU time. 'ulimit -l unlimited' lifts that.",
            )
        )
    if facts.gpus:
        found += _conclude_cuda(facts.probe)
        if facts.numa_nodes > 1 and "cuda_numa_nodes" in facts.probe:
            found.append(_conclude_numa(facts.probe))
    else:
        found.append((False, "Checkpoint tensors in host memory; torch sees no GPU here."))
    found.append((False, f"Refuse a checkpoint larger than {size(facts.free_bytes)} before training is held up."))
    return found


def _conclude_cuda(probe: dict[str, str]) -> list[tuple[bool, str]]:
    if probe["cuda_driver"] != "yes":
        reason = probe["cuda_driver"].removeprefix("no: ")
        return [
            (
                True,
                f"Let torch copy tensors from the GPU before save() returns, since the driver is not found ({reason}).",
            )
        ]
    batches = probe["cuda_batches"] == "yes"
    found = [
        (False, "Copy tensors from the GPU while training computes, on streams of its own; no memory is taken there."),
        (False, "Copy many small tensors in one call." if batches else "Copy small tensors one by one (CUDA < 12.8)."),
    ]
    if probe["cuda_pinning"] != "yes":
        reason = probe["cuda_pinning"].removeprefix("no: ")
        found.append(
            (
                True,
                f"Copy by way of a small pinned buffer, since the staging buffer cannot be pinned ({reason}); if that "
                "is refused, too, slowly, and save() waits for the GPU.",
            )
        )
    return found


def _conclude_numa(probe: dict[str, str]) -> tuple[bool, str]:
    """Of a machine with several nodes."""
    nodes = sorted(set(probe["cuda_numa_nodes"].split()))
    if "-1" in nodes:
        return False, "Leave the staging buffer on any NUMA node: the driver does not say which is next to the GPU."
    if probe["numa_placement"] != "yes":
        reason = probe["numa_placement"].removeprefix("no: ")
        return True, f"Leave the staging buffer on any NUMA node: this process may not choose one ({reason})."
    if len(nodes) == 1:
        return False, f"Put the staging buffer on NUMA node {nodes[0]}, next to the GPU."
    return (
        False,
        f"Put the staging buffer on the GPU's NUMA node (one of {', '.join(nodes)}), if a process uses one node.",
    )


def _may_lock_memory() -> bool:
    """Whether the memlock limit does not bind: CAP_IPC_LOCK."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
