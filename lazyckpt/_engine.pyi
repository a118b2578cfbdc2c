"""The native engine (csrc/python/bindings.cc): bytes, files and devices; nothing of tensors, pickles or file formats.
Beside it (csrc/python/tensors.cc), what every save asks of every tensor.

Failures of the operating system are OSError with errno and path. Waits release the GIL and heed Ctrl-C.
"""

import os
from typing import Any

import torch
from typing_extensions import Buffer

StrPath = str | os.PathLike[str]

FAULTS: bool  # whether this is the test build, with fault injection

class Engine:
    """A staging ring and the threads that copy and write. Belongs to the process that made it: in a forked child
    every call raises RuntimeError. copies_in_flight: chunks on their way from a device, eager and lazy ones each;
    copies_ahead: at most so many while a thread waits for copies.
    direct: O_DIRECT; None: except on FUSE. With the backend "auto" a thread pool writes to FUSE."""

    def __init__(
        self,
        *,
        ring_bytes: int,
        chunk_bytes: int,
        io_depth: int,
        copy_threads: int,
        backend: str = "auto",
        direct: bool | None = None,
        register_buffers: bool = True,
        pin_ring: bool = True,
        copies_in_flight: int = 4,
        copies_ahead: int = 64,
        watch_pages: bool = False,
        copy_on_write: bool = False,
        fault: str = "",
    ) -> None: ...
    def reserve(self, bytes: int) -> bool:
        """Raises the ring's capacity, up to ring_bytes; False while the ring is in use."""

    def attach(self, device: int) -> bool:
        """Makes the memory of a CUDA device readable, from then on; False where there is no CUDA driver."""

    def begin(
        self,
        pointers: Buffer,
        sizes: Buffer,
        owners: Buffer,
        files: int,
        eager_by_caller: bool = False,
        devices: Buffer | None = None,
        streams: Buffer | None = None,
    ) -> Job:
        """A checkpoint of sources (three arrays of uint64). owners: bits of the gates that protect it; 0: eager.
        eager_by_caller: wait_eager() and go() will be called at once; copy threads begin after that.

        devices (int64): the attached CUDA device of each source, or -1: host memory, as without it. streams (uint64):
        device, handle, device, handle, … of the caller's current stream of every such device. What is copied is what
        these streams make of it by now.

        With watch_pages, a write to a page of a source with owners in host memory, from now until it is copied, fails
        the job: see Job.torn(). Sources whose pages cannot be watched become eager. With copy_on_write besides, it is
        the writer who waits, until the page is copied aside, and the job goes on."""

    @property
    def ring_bytes(self) -> int: ...
    @property
    def ring_used_bytes(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def unpinned(self) -> str:
        """Why the ring could not be pinned for the attached devices; empty if it was."""

    @property
    def bounces(self) -> bool:
        """Whether copies from and to devices pass a small pinned buffer, since the ring could not be pinned."""

    @property
    def fallback(self) -> str:
        """Why io_uring is not used; empty if it is."""

class Job:
    """One checkpoint. Dropping it abandons it. Sources must stay alive until wait_released()."""

    def append(self, file: int, offset: int, rows: Buffer, blob: bytes, first_source: int = 0) -> None:
        """Lays out and begins to copy one extent (containers/base.py), whose source 0 is `first_source` of the job.
        OSError(EINVAL), and the job fails, if the program does not fit its sources or its blob."""

    def go(self) -> None:
        """The copy threads may begin, where eager_by_caller held them back."""

    def seal(self) -> None:
        """Nothing more will be appended. OSError(EINVAL), and the job fails, if a file has a hole or an overlap, or
        if a source was left out."""

    def open(self, file: int, path: StrPath, size: int) -> None:
        """Creates the file (it must not exist) and reserves `size` bytes on the disk. If it fails, so does the job."""

    def wait_eager(self, timeout_s: float | None = None) -> bool:
        """Returns when every eager byte is in the ring, or the job has failed; copies while it waits. Of bytes on
        devices, when their copies are enqueued: what is put into begin()'s streams from then on waits for them."""

    def wait_captured(self, owners: int, timeout_s: float | None = None) -> bool:
        """The same for the lazy bytes of these owners."""

    def wait_enqueued(self, owners: int, streams: Buffer, timeout_s: float | None = None) -> bool:
        """As wait_captured(), but it is ``streams`` (as in begin()) that wait for the devices, from here on. If one of
        them is being captured into a graph: wait_captured(), with no other call of the driver by this thread."""

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Until nobody reads the sources any more."""

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Until every file is synced, or the job has failed and the kernel is done with it."""

    def fail(self, errno: int, why: str) -> None: ...
    def raise_error(self) -> None:
        """Raises the OSError that failed the job, if one did."""

    def torn(self) -> list[int]:
        """The sources that were written to before they were copied; known once wait_released() has returned."""

    def pending_chunks(self, owners: int) -> int:
        """Chunks with lazy bytes of these owners that are not copied yet."""

    def source_crcs(self) -> list[int]: ...
    def files(self) -> list[tuple[int, int]]:
        """(bytes, CRC-32) of each file; RuntimeError before it is durable."""

    def read_back(self, file: int) -> list[tuple[int, int]]:
        """Reads a durable file from the disk, past the page cache. (offset, bytes) of each chunk whose CRC-32 is not
        the one that was computed while it was copied."""

    def stats(self) -> dict[str, float]:
        """Bytes and seconds: "begin" on the clock of time.perf_counter(), moments since then, durations."""

    def timeline(self) -> list[tuple[int, int, int, float, float, float, float, float]]:
        """The fields of metrics.ChunkEvent of each chunk, in the order of the layout."""

class VersionReading:
    """The version counters of tensors, read by the main thread between two bytecodes, where it is not inside of an
    operation."""

    def __init__(self, tensors: list[torch.Tensor]) -> None: ...
    def request(self) -> None:
        """Asks the main thread, unless it was asked and has not answered."""

    def versions(self) -> list[int] | None:
        """What it has read; None if it has not come to it, or was inside of an operation: request it again then."""

class Ring:
    """The ring's bookkeeping alone, for tests."""

    def __init__(self, capacity: int, slice_bytes: int) -> None: ...
    def allocate(self, bytes: int) -> int | None: ...
    def free(self, offset: int) -> None: ...
    def node_of(self, offset: int) -> int: ...
    @property
    def used(self) -> int: ...

class Reader:
    """Ranges of one file (two arrays of uint64). The disk begins at once, into at most `io_depth` staging buffers,
    in the engine's ring if that has room; nothing lands before read_into(). Dropping it gives up."""

    def __init__(
        self, engine: Engine, path: StrPath, offsets: Buffer, sizes: Buffer, *, threads: int = 0, io_depth: int = 0
    ) -> None: ...
    def read_into(self, pointers: Buffer, devices: Buffer | None = None, streams: Buffer | None = None) -> list[int]:
        """Reads every range to its place (uint64; 0: nowhere) and returns the CRC-32 of each. Once.

        devices and streams are as in Engine.begin(): places on a device are written to after what the stream holds."""

def crc32(data: Buffer, value: int = 0) -> int: ...
def crc32_at(pointer: int, size: int) -> int: ...
def look_at_tensors(tensors: list[torch.Tensor]) -> tuple[bytes, dict[int, torch.UntypedStorage]] | None:
    """All that a pickle says of them besides their storages' keys and bytes, as bytes that are equal only if that is;
    and their storages, each once, by _cdata. None if one is not plain: has attributes, hooks, is nested, sparse,
    negated or conjugated, or is neither on a CPU nor on CUDA."""

def storages_in(tree: Any) -> tuple[list[torch.Tensor], list[int], list[int], bytes, list[torch.Tensor]]:
    """The tensors with a storage in dicts, lists and tuples, however deep; the _cdata of their storages; the bytes of
    these; 1 for each tensor that is contiguous, fills its storage and is no inference tensor, 0 for others; and the
    wrapper subclasses, which hold other tensors instead of memory (wrappers.py)."""

def page_witness(copy_on_write: bool = False) -> str:
    """Why watch_pages, or copy_on_write with it, does not work here; empty if it does."""

def crc32_combine(crc_a: int, crc_b: int, size_b: int) -> int: ...
def rename_exchange(a: StrPath, b: StrPath) -> None: ...
def probe(folder: StrPath) -> dict[str, str]: ...
