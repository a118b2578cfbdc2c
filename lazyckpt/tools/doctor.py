"""Finds out which features a machine and a folder have, and concludes what lazyckpt will do there."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lazyckpt import _engine
from lazyckpt._version import __version__
from lazyckpt.config import Config
from lazyckpt.errors import ConfigError
from lazyckpt.pipeline.budget import auto_ring_bytes, available_memory_bytes
from lazyckpt.saver import Saver
from lazyckpt.storage import mounts
from lazyckpt.tools.units import size


@dataclass(frozen=True)
class Conclusion:
    """A sentence about what lazyckpt will do; ``serious`` if it deserves a change."""

    serious: bool
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """The facts about a machine by topic, and the conclusions from them."""

    facts: dict[str, str]
    conclusions: list[Conclusion]


def diagnose(directory: Path) -> Diagnosis:
    """Examines the machine and the nearest folder of ``directory`` that exists; writes nothing there that stays.

    Raises ConfigError if that is no folder.
    """
    machine = _Machine(directory)
    return Diagnosis(machine.describe(), [Conclusion(*found) for found in machine.conclude()])


def refused_batches() -> str:
    """Saves small tensors of every GPU. Returns why a driver refused to copy them in one call; empty if none did, or if
    they cannot be saved."""
    try:
        with tempfile.TemporaryDirectory() as folder, Saver(host_buffer_bytes=1 << 20, chunk_bytes=1 << 16) as saver:
            saver.save(small_tensors(), Path(folder, "a.pt"), blocking=True)
            return saver.engine.unbatched
    except (RuntimeError, OSError):  # without memory on the device, for example
        return ""


def small_tensors() -> list[torch.Tensor]:
    return [torch.ones(1, device=f"cuda:{number}") for number in range(torch.cuda.device_count()) for _ in range(32)]


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
        self.file_system, self.mount = mounts.file_system(self.directory)
        self.probe = _engine.probe(self.directory)
        self.gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]

    def _has(self, what: str) -> bool:
        return self.probe[what] == "yes"

    def _why_not(self, what: str) -> str:
        return self.probe[what].removeprefix("no: ")

    def describe(self) -> dict[str, str]:
        probe = self.probe
        build = ", test build with fault injection" if _engine.FAULTS else ""
        alignment = f", alignment {probe['alignment_bytes']} bytes" if "alignment_bytes" in probe else ""
        nearest = f" (the nearest folder of {self.asked} that exists)"
        return {
            "lazyckpt": f"{__version__}, checksums by {probe['crc32']}{build}",
            "torch": f"{torch.__version__}, Python {platform.python_version()}",
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs",
            "folder": f"{self.directory}{nearest if self.directory != self.asked.absolute() else ''}",
            "file system": f"{self.file_system} on {self.mount}",
            "free space": f"{size(self.free_bytes)} of {size(self.total_bytes)}",
            "io_uring": probe["io_uring"],
            "O_DIRECT": probe["o_direct"] + (alignment if self._has("o_direct") else ""),
            "pages": f"watched for writes: {probe['page_witness']}",
            "huge pages": f"made of small ones on request: {self.probe['huge_pages']}",
            "memory": f"{size(available_memory_bytes())} available to this process",
            "CUDA": self._cuda(),
        }

    def _cuda(self) -> str:
        if self.gpus:
            version = f"; driver of CUDA {self.probe['cuda_version']}" if "cuda_version" in self.probe else ""
            return ", ".join(self.gpus) + version
        if self._has("cuda_driver"):
            return "no: there is a driver, but torch finds no device it can use"
        return self.probe["cuda_driver"]

    def conclude(self) -> Iterator[tuple[bool, str]]:
        in_memory = self.file_system in ("tmpfs", "ramfs")
        if not os.access(self.directory, os.W_OK | os.X_OK):
            yield True, "Fail: this user may not write to the folder."
        if in_memory:
            yield True, "Write to memory: a restart of the machine loses every checkpoint here."
        if self._has("fuse"):
            yield (
                False,
                "Write with a pool of threads and the page cache: on FUSE (or virtiofs), direct writes with io_uring "
                "go wrong if the server answers short. Set io_backend and direct_io to override that.",
            )
        elif self._has("io_uring"):
            yield False, "Write and read with io_uring, several requests in flight."
        elif "liburing" in (reason := self._why_not("io_uring")):
            yield (
                True,
                "Write and read with a pool of threads, which takes training a little more time: lazyckpt was built "
                "without liburing. To have io_uring, install liburing-dev, then lazyckpt again. It warns once.",
            )
        else:
            yield True, f"Write and read with a pool of threads, since io_uring is refused ({reason}); it warns once."
        if self.probe["crc32"] == "zlib":
            yield (
                True,
                "Compute checksums with zlib, which takes three times as long: lazyckpt was built without libdeflate. "
                "To have it, install libdeflate-dev, then lazyckpt again.",
            )
        if self._has("page_witness"):
            yield False, "Watch the pages of lazily copied tensors: the kernel notices every write to them."
        else:
            yield (
                True,
                "Watch version counters of lazily copied tensors, since the kernel does not watch pages "
                f"({self._why_not('page_witness')}); docs/consistency.md lists the writers that move none.",
            )
        if not self._has("fuse") and not in_memory:
            direct = "Bypass the page cache (O_DIRECT), so that checkpoints do not push other data out."
            cached = "Use the page cache, since this file system has no O_DIRECT: equally safe, but slower."
            yield False, direct if self._has("o_direct") else cached
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1") or "1"
        share = "A quarter of the available memory" + (f" by {ranks} ranks" if ranks != "1" else "")
        yield (
            False,
            f"{share}, {size(auto_ring_bytes(Config.chunk_bytes))}, is the most that the staging buffer takes "
            '(host_buffer_bytes="auto"). The copies of a larger checkpoint wait for the disk.',
        )
        yield from self._devices() if self.gpus else [(False, "Checkpoint tensors in host memory; torch sees no GPU.")]
        yield False, f"Refuse a checkpoint larger than {size(self.free_bytes)} before training is held up."

    def _devices(self) -> Iterator[tuple[bool, str]]:
        if not self._has("cuda_driver"):
            reason = self._why_not("cuda_driver")
            yield (
                True,
                f"Let torch copy tensors from the GPU before save() returns, since no driver is found ({reason}).",
            )
            return
        yield False, "Copy tensors from the GPU during training, on separate streams, without GPU memory."
        refusal = refused_batches() if self._has("cuda_batches") else "CUDA < 12.8"
        yield (
            False,
            f"Copy small tensors one by one ({refusal})." if refusal else "Copy many small tensors in one call.",
        )
        if not self._has("cuda_pinning"):
            yield (
                True,
                "Copy through a small pinned buffer, since the staging buffer cannot be pinned "
                f"({self._why_not('cuda_pinning')}). Without that buffer copies are slow, and save() waits for them.",
            )
