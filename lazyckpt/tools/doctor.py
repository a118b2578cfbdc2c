"""Finds out what a machine and a folder offer, and concludes what lazyckpt will do there."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lazyckpt import _engine
from lazyckpt._version import __version__
from lazyckpt.capture.budget import auto_ring_bytes, available_memory_bytes
from lazyckpt.config import Config
from lazyckpt.errors import ConfigError
from lazyckpt.storage import mounts
from lazyckpt.tools.units import size

_IN_MEMORY = ("tmpfs", "ramfs")
_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Conclusion:
    """A sentence about what lazyckpt will do; ``serious`` if it deserves a change."""

    serious: bool
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """The facts about a machine by topic, and the conclusions from them."""

    facts: dict[str, str]
    conclusions: tuple[Conclusion, ...]


def diagnose(directory: Path) -> Diagnosis:
    """Examines the machine and the nearest folder of ``directory`` that exists; writes nothing there that stays.

    Raises ConfigError if that is no folder.
    """
    machine = _Machine(directory)
    return Diagnosis(machine.describe(), tuple(machine.conclude()))


class _Machine:
    def __init__(self, asked: Path) -> None:
        self.asked = asked
        self.directory = asked.absolute()
        while not self.directory.exists():
            self.directory = self.directory.parent
        if not self.directory.is_dir():
            raise ConfigError(f"{self.directory}: not a folder; give a folder for checkpoints")
        disk = os.statvfs(self.directory)
        self.free_bytes, self.total_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        self.file_system = "{} on {}".format(*mounts.file_system(self.directory))
        self.ring_bytes = auto_ring_bytes(Config.chunk_bytes)
        self.locks_freely = _may_lock_memory()
        self.probe = _engine.probe(self.directory)
        self.gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]

    def _reason(self, what: str) -> str:
        return self.probe[what].removeprefix("no: ")

    def describe(self) -> dict[str, str]:
        probe = self.probe
        build = ", test build with fault injection" if _engine.FAULTS else ""
        alignment = f", alignment {probe['alignment_bytes']} bytes" if "alignment_bytes" in probe else ""
        limit = probe.get("memlock_bytes", "unlimited")
        memlock = limit if limit == "unlimited" else size(int(limit))
        where = str(self.directory)
        if self.directory != self.asked.absolute():
            where += f" (the nearest folder of {self.asked} that exists)"
        return {
            "lazyckpt": f"{__version__}, checksums by {probe['crc32']}{build}",
            "torch": f"{torch.__version__}, Python {platform.python_version()}",
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs",
            "folder": where,
            "file system": self.file_system,
            "free space": f"{size(self.free_bytes)} of {size(self.total_bytes)}",
            "io_uring": probe["io_uring"],
            "O_DIRECT": probe["o_direct"] + (alignment if probe["o_direct"] == "yes" else ""),
            "pages": f"watched for writes: {probe['page_witness']}; copied on write: {probe['copy_on_write']}",
            "memory": f"{size(available_memory_bytes())} available to this process",
            "memlock": memlock + (", which does not bind this process" if self.locks_freely else ""),
            "CUDA": self._cuda(),
        }

    def _cuda(self) -> str:
        if self.gpus:
            version = f"; driver of CUDA {self.probe['cuda_version']}" if "cuda_version" in self.probe else ""
            return ", ".join(self.gpus) + version
        if self.probe["cuda_driver"] == "yes":
            return "no: there is a driver, but torch finds no device it can use"
        return self.probe["cuda_driver"]

    def conclude(self) -> Iterator[Conclusion]:
        in_memory = self.file_system.split()[0] in _IN_MEMORY
        if not os.access(self.directory, os.W_OK | os.X_OK):
            yield Conclusion(True, "Fail: this user may not write to the folder.")
        if in_memory:
            yield Conclusion(True, "Write to memory: a restart of the machine loses every checkpoint here.")
        yield self._input_and_output()
        if self.probe["page_witness"] == "yes":
            yield Conclusion(False, "Watch the pages of lazily copied tensors: the kernel notices every write to them.")
        else:
            text = (
                "Watch version counters of lazily copied tensors, since the kernel does not watch pages "
                f"({self._reason('page_witness')}); docs/consistency.md lists the writers that move none."
            )
            yield Conclusion(True, text)
        if self.probe["fuse"] != "yes" and not in_memory:
            direct = "Bypass the page cache (O_DIRECT), so that checkpoints do not push other data out."
            cached = "Use the page cache, since this file system has no O_DIRECT: equally safe, but slower."
            yield Conclusion(False, direct if self.probe["o_direct"] == "yes" else cached)
        yield from self._memory()
        yield from self._devices()
        yield Conclusion(False, f"Refuse a checkpoint larger than {size(self.free_bytes)} before training is held up.")

    def _input_and_output(self) -> Conclusion:
        if self.probe["fuse"] == "yes":
            text = (
                "Write with a pool of threads and the page cache: on FUSE (or virtiofs), direct writes with io_uring "
                "go wrong if the server answers short. Set io_backend and direct_io to override that."
            )
            return Conclusion(False, text)
        if self.probe["io_uring"] == "yes":
            return Conclusion(False, "Write and read with io_uring, several requests in flight.")
        reason = self._reason("io_uring")
        text = f"Write and read with a pool of threads, since io_uring is refused ({reason}); it warns once."
        return Conclusion(True, text)

    def _memory(self) -> Iterator[Conclusion]:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1") or "1"
        share = "A quarter of the available memory" + (f" by {ranks} ranks" if ranks != "1" else "")
        text = (
            f"{share}, {size(self.ring_bytes)}, is the most that the staging buffer takes "
            '(host_buffer_bytes="auto"). The copies of a larger checkpoint wait for the disk.'
        )
        yield Conclusion(False, text)
        limit = self.probe.get("memlock_bytes", "unlimited")
        bound = limit != "unlimited" and not self.locks_freely and int(limit) < self.ring_bytes
        if bound and self.probe["io_uring"] == "yes":
            text = (
                f"Not register a buffer above {size(int(limit))} with the kernel (memlock), which costs a little CPU "
                "time. 'ulimit -l unlimited' lifts that."
            )
            yield Conclusion(False, text)

    def _devices(self) -> Iterator[Conclusion]:
        probe = self.probe
        if not self.gpus:
            yield Conclusion(False, "Checkpoint tensors in host memory; torch sees no GPU here.")
            return
        if probe["cuda_driver"] != "yes":
            reason = self._reason("cuda_driver")
            text = f"Let torch copy tensors from the GPU before save() returns, since no driver is found ({reason})."
            yield Conclusion(True, text)
        else:
            yield Conclusion(
                False, "Copy tensors from the GPU during training, on separate streams, without GPU memory."
            )
            batches = probe["cuda_batches"] == "yes"
            one = "Copy many small tensors in one call." if batches else "Copy small tensors one by one (CUDA < 12.8)."
            yield Conclusion(False, one)
            if probe["cuda_pinning"] != "yes":
                text = (
                    "Copy through a small pinned buffer, since the staging buffer cannot be pinned "
                    f"({self._reason('cuda_pinning')}). Without that buffer copies are slow, and save() waits for them."
                )
                yield Conclusion(True, text)
        nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
        if len(nodes) > 1 and "cuda_numa_nodes" in probe:
            yield self._numa(sorted(set(probe["cuda_numa_nodes"].split())))

    def _numa(self, nodes: list[str]) -> Conclusion:
        anywhere = "Leave the staging buffer on any NUMA node:"
        if "-1" in nodes:
            return Conclusion(False, f"{anywhere} the driver does not say which is next to the GPU.")
        if self.probe["numa_placement"] != "yes":
            return Conclusion(True, f"{anywhere} this process may not choose one ({self._reason('numa_placement')}).")
        if len(nodes) == 1:
            return Conclusion(False, f"Put the staging buffer on NUMA node {nodes[0]}, next to the GPU.")
        text = f"Put the staging buffer on the GPU's NUMA node (one of {', '.join(nodes)}), if a process uses one node."
        return Conclusion(False, text)


def _may_lock_memory() -> bool:
    """Whether the memlock limit does not bind this process, since it has CAP_IPC_LOCK."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
