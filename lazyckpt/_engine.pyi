"""The native engine (csrc/README.md): bytes, files and devices; and one pass over all tensors (csrc/python/tensors.cc).

Failures of the operating system raise OSError with errno and path. Waits release the GIL and react to Ctrl-C.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from typing_extensions import Buffer

StrPath = str | os.PathLike[str]

FAULTS: bool  # whether this is the test build, which can inject faults

class Engine:
    """A staging ring and the threads that copy and write. csrc/engine/engine.h describes the options.

    Belongs to the process that made it; in a forked child every call raises RuntimeError.
    """

    def __init__(
        self,
        *,
        ring_bytes: int,
        chunk_bytes: int,
        io_depth: int,
        copy_threads: int,
        backend: str = "auto",
        direct: bool | None = None,
        pin_ring: bool = True,
        copies_in_flight: int = 4,
        copies_ahead: int = 64,
        watch_pages: bool = False,
        huge_pages: bool = False,
        fault: str = "",
    ) -> None: ...
    def reserve(self, bytes: int) -> bool:
        """Raises the ring's capacity, up to ring_bytes. Returns False while the ring is in use."""

    def attach(self, device: int) -> bool:
        """Makes the memory of a CUDA device readable. Returns False if there is no CUDA driver."""

    def begin(
        self,
        pointers: Buffer,
        sizes: Buffer,
        owners: Buffer,
        files: int,
        eager_by_caller: bool = False,
        devices: Buffer | None = None,
        streams: Buffer | None = None,
        parts: Sequence[tuple[int, int, int]] = (),
    ) -> Job:
        """Starts a job with sources (three arrays of uint64).

        owners: the optimizers that wait for a source, one bit each (capture/ownership.py); 0: eager. With
        eager_by_caller the caller calls wait_eager() and go() at once, and copy threads begin after go().

        devices (int64): the attached CUDA device of each source; -1, the default: host memory. streams (uint64): pairs
        of device and handle, the caller's current stream of every such device. The copies hold what work already
        enqueued on these streams makes of the sources.

        parts: file, begin and end of what this job writes of a file of which other processes write the rest. Each begin
        is a multiple of 4096, and so is each end but that of the file.

        With watch_pages, a write to a page of a lazy host source before its copy fails the job; see Job.torn(). Sources
        whose pages cannot be watched become eager.
        """

    def capture(
        self,
        pointers: Buffer,
        sizes: Buffer,
        owners: Buffer,
        files: int,
        program: Sequence[tuple[int, int, Buffer, bytes, int]],
        devices: Buffer | None = None,
        streams: Buffer | None = None,
        parts: Sequence[tuple[int, int, int]] = (),
    ) -> Job:
        """begin() with eager_by_caller, Job.append() of each extent in ``program``, Job.seal(), and as much of
        Job.wait_eager() as the ring has room for.

        The calling thread runs no other code meanwhile, so all bytes are of one moment. With watch_pages, a write to
        eager host memory for which the ring had no room fails the job, as one to lazy memory does."""

    @property
    def ring_bytes(self) -> int: ...
    @property
    def ring_used_bytes(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def unpinned(self) -> str:
        """Why the ring is not pinned for devices; empty if it is."""

    @property
    def unbatched(self) -> str:
        """Why a device refused to copy many small pieces in one call; empty if none did. They are then copied one by
        one."""

    @property
    def bounces(self) -> bool:
        """Whether copies from and to devices pass a small pinned buffer instead of a pinned ring."""

    @property
    def fallback(self) -> str:
        """Why io_uring is not used; empty if it is."""

class Job:
    """One checkpoint under way. Dropping it abandons it. Sources must stay alive until wait_released()."""

    @property
    def watch_s(self) -> float:
        """Seconds that begin() or capture() took to have the kernel watch pages."""

    @property
    def eager_copy_s(self) -> float:
        """Seconds that capture() copied eager bytes."""

    def append(self, file: int, offset: int, rows: Buffer, blob: bytes, first_source: int = 0) -> None:
        """Lays out one extent (formats/program.py) and starts to copy it. Its source 0 is `first_source` of the job.
        OSError(EINVAL), and the job fails, if the program does not fit its sources or its blob."""

    def go(self) -> None:
        """Lets the copy threads begin, if eager_by_caller held them back."""

    def seal(self) -> None:
        """Ends the layout. OSError(EINVAL), and the job fails, if a file has a hole or an overlap, or if a source was
        left out."""

    def open(self, file: int, path: StrPath, size: int) -> None:
        """Creates a file that must not exist and reserves `size` bytes on the disk. A failure fails the job, too."""

    def drop(self, file: int) -> None:
        """Copies the bytes of a file for their checksums, and writes none."""

    def open_existing(self, file: int, path: StrPath, shift: int = 0) -> None:
        """Opens a file that another process has created, and writes its ``parts`` there, ``shift`` bytes behind the
        offsets of the program. A failure fails the job, too; OSError(EINVAL) if a part does not end with a block."""

    def wait_eager(self, timeout_s: float | None = None) -> bool:
        """Copies until every eager host byte is in the ring, or the job has failed. Returns False at the timeout.

        Of eager bytes on devices, the copies are enqueued; later work on begin()'s streams waits for them.
        """

    def wait_captured(self, owners: int, timeout_s: float | None = None) -> bool:
        """Copies until the lazy bytes of these owners are in the ring, or the job has failed."""

    def wait_enqueued(self, owners: int, streams: Buffer, timeout_s: float | None = None) -> bool:
        """Like wait_captured(), but later work on ``streams`` (as in begin()) waits for the devices, not the caller. If
        a stream is being captured into a graph, waits on the host."""

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing reads the sources any more."""

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Waits until every file is synced, or the job has failed and the kernel is done with it."""

    def fail(self, errno: int, why: str) -> None: ...
    def raise_error(self) -> None:
        """Raises the OSError with which the job failed, if it did."""

    def torn(self) -> list[int]:
        """Returns the sources that were written before they were copied, once wait_released() has returned."""

    def pending_chunks(self, owners: int) -> int:
        """Counts chunks with lazy bytes of these owners that are not copied yet."""

    def source_crcs(self) -> list[int]: ...
    def files(self) -> list[tuple[int, int]]:
        """Returns (bytes, CRC-32) of each file. RuntimeError before the files are durable."""

    def runs(self, file: int) -> list[tuple[int, int, int]]:
        """Offset, size and CRC-32 of every contiguous run of bytes that this job has written to a file, durable."""

    def read_back(self, file: int) -> list[tuple[int, int]]:
        """Reads a durable file from the disk, past the page cache. Returns (offset, bytes) of each chunk whose CRC-32
        differs from the one computed during its copy."""

    def stats(self) -> dict[str, float]:
        """Returns bytes and seconds: "begin" on the clock of time.perf_counter(), moments since then, durations."""

    def timeline(self) -> list[tuple[int, int, int, float, float, float, float, float]]:
        """Returns the fields of metrics.ChunkEvent for each chunk, in layout order."""

class VersionReading:
    """The version counters of tensors. The main thread reads them between two bytecodes, outside any operation."""

    def __init__(self, tensors: list[torch.Tensor]) -> None: ...
    def request(self, custom_functions: frozenset[int] | None) -> None:
        """Asks the main thread to read, unless a request is pending.

        It reads nothing where a code with one of these ids is on its stack, or if they are None.
        """

    def versions(self) -> list[int] | None:
        """Returns the versions, or None if they were not read yet: request again, since the thread may have been
        busy."""

def versions_of(tensors: list[torch.Tensor]) -> bytes:
    """The version counters of tensors now, 64 bits each; -1 for inference tensors, which have none."""

class Ring:
    """The bookkeeping of a staging ring, for tests."""

    def __init__(self, capacity: int, slice_bytes: int) -> None: ...
    def allocate(self, bytes: int) -> int | None: ...
    def free(self, offset: int) -> None: ...
    @property
    def used(self) -> int: ...

class RangeReader:
    """Reads ranges of one file (two arrays of uint64), or of `size` bytes that `fetch(begin, end)` brings in parts, in
    their order; `path` is their name in errors. Threads of the reader call it, up to `io_depth` at once, and iterate
    over what it returns; read_into() raises its error.

    The disk starts at once, into at most `io_depth` staging buffers, in the engine's ring if that has room. No byte
    reaches its place before read_into(). Dropping it gives up.
    """

    def __init__(
        self,
        engine: Engine,
        path: StrPath,
        offsets: Buffer,
        sizes: Buffer,
        *,
        threads: int = 0,
        io_depth: int = 0,
        fetch: Callable[[int, int], Iterable[Buffer]] | None = None,
        size: int = 0,
    ) -> None: ...
    def cancel(self) -> None:
        """Lets read_into(), which another thread may have called, raise OSError (ECANCELED) soon, and land nothing
        after that."""

    def read_into(self, pointers: Buffer, devices: Buffer | None = None, streams: Buffer | None = None) -> list[int]:
        """Reads every range to its place (uint64; 0: nowhere) and returns the CRC-32 of each. May be called once.

        devices and streams are as in Engine.begin(). A place on a device is written after the work already enqueued on
        its stream.
        """

def crc32(data: Buffer, value: int = 0) -> int: ...
def crc32_at(pointer: int, size: int) -> int: ...
def pickle_in(archive: bytes) -> bytes | None:
    """The pickle in a small archive of ``torch.save`` whose every checksum is right. None for any other archive, and
    for one with storages: ``formats/torch_zip_reader.py`` reads it."""

def read_plain_pickle(data: bytes, persistent_load: Callable[[Any], Any], globals: dict[bytes, Any]) -> Any:
    """Reads a pickle of plain state; formats/plain_pickle.py has the grammar.

    globals: the objects that it may name, by what follows the opcode GLOBAL. Raises ValueError for any other pickle,
    and what persistent_load and the functions of torch raise.
    """

def look_at_tensors(tensors: list[torch.Tensor]) -> tuple[bytes, dict[int, torch.UntypedStorage]] | None:
    """Describes tensors in one pass: (description, storages by _cdata).

    Two descriptions are equal only if a pickle says the same of the tensors, apart from their bytes and the keys of
    their storages. Returns None if a tensor is not plain: it has attributes or hooks, is nested, sparse, negated or
    conjugated, or is neither on a CPU nor on CUDA.
    """

def spans_of(tensors: list[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Returns for each tensor the bytes of its storage that a compact archive holds: where they begin, and how many
    they are; and the offset of the tensor there, in elements.

    These are the bytes from its first to its last element, together with those of the tensors that share a byte with
    it. If they are all of the storage, tensors without elements have all of it, too. Raises ValueError for a tensor
    without a storage and sizes of its own, such as a sparse one."""

def look_at_landings(
    saved: list[torch.Tensor], live: list[torch.Tensor]
) -> tuple[list[int], list[torch.UntypedStorage], list[int], bytes]:
    """Looks at pairs of tensors in one pass.

    Returns the _cdata of each saved tensor's storage; each live tensor's storage, and its offset there in bytes; and a
    byte for each pair, 1 if both show the bytes of the saved storage, all of them, in order and as they are.
    """

class Seen:
    """What was seen of tensors: the objects, their memory, storages and geometry, and whether they need a gradient.

    Holds no tensor. Equal if all of it is, also if tensors lie at the addresses of others that are gone."""

    @property
    def is_on_host(self) -> bool: ...  # all of them
    @property
    def identities(self) -> list[int]: ...  # of the storages, _cdata
    @property
    def sizes(self) -> list[int]: ...  # of the storages, in bytes
    @property
    def whole(self) -> bytes: ...  # 1 if the tensor is contiguous, fills its storage and is no inference tensor

def storages_in(tree: Any, inside_dtensors: bool = False) -> tuple[list[torch.Tensor], Seen, list[torch.Tensor]]:
    """Finds the tensors with a storage in dicts, lists and tuples, at any depth.

    Returns the tensors, what was seen of them, and the wrapper subclasses, which hold other tensors instead of memory
    (wrappers.py). With inside_dtensors, the tensor inside a DTensor takes its place, unless it is a wrapper, too.
    """

def add_leaves(path: tuple[Any, ...], value: Any, leaves: dict[tuple[Any, ...], Any]) -> list[tuple[Any, ...]]:
    """Adds the leaves of ``value`` to ``leaves``, by path, each path beginning with ``path``.

    Mappings whose keys are all strings have leaves, and so have lists that hold a tensor, a mapping or a list. An empty
    mapping is a leaf, and so is everything else. Returns the paths of the leaves that are no tensors.
    """

class PlainPickle:
    """A pickle of plain state whose storages have no keys yet. Holds no object of the state."""

    def is_same(self, other: PlainPickle) -> bool:
        """Whether both become the same pickle with the same keys."""

    def has_same_storages(self, other: PlainPickle) -> bool:
        """Whether there are as many storages, of the same offsets, sizes, dtypes and devices."""

    def has_same_memory(self, other: PlainPickle) -> bool:
        """Whether the storages of both are the same ones, at the same addresses."""

    def with_keys(self, keys: list[str]) -> bytes:
        """The opcodes, without PROTO and STOP. keys: of the storages, in the order of appearance."""

    @property
    def identities(self) -> list[int]: ...  # of the storages, _cdata
    @property
    def pointers(self) -> list[int]: ...  # to their first bytes
    @property
    def offsets(self) -> list[int]: ...  # of the first bytes that are written
    @property
    def sizes(self) -> list[int]: ...  # bytes
    @property
    def dtypes(self) -> list[torch.dtype]: ...
    @property
    def devices(self) -> list[int]: ...  # -1: host memory; otherwise of CUDA

class Vocabulary:
    """What the native pickler writes of dtypes and devices: opcodes without a place in the memo.

    of_dtype: the opcodes of the function that makes a tensor, of the class of its storage and, if there, of the dtype;
    and the dtype of the storage. of_device: the opcodes of a location. places: how many first places of the memo these
    words may take."""

    def __init__(
        self,
        of_dtype: Callable[[torch.dtype], tuple[bytes, bytes, bytes | None, torch.dtype] | None],
        of_device: Callable[[int], bytes],
        storage: bytes,
        ordered_dict: bytes,
        places: int,
    ) -> None: ...
    def pickle(
        self, object: Any, first: int, before: PlainPickle | None = None, detached: bool = False
    ) -> tuple[PlainPickle, list[torch.Tensor], list[torch.UntypedStorage]] | None:
        """Pickles nested dicts, lists and tuples of text, numbers and plain tensors. Returns the tensors and their
        storages, each once, in the order of appearance; None for any other object.

        first: the place of the first object in the memo. before: a pickle that is likely to be the same, for speed.
        detached: pickles in place of each tensor or parameter what ``detach()`` would return."""

    def pickle_compact(
        self, object: Any, first: int, before: PlainPickle | None = None
    ) -> tuple[PlainPickle, list[torch.Tensor], list[torch.UntypedStorage]] | None:
        """As pickle, but each span (see spans_of) is a storage of its own: the list of storages has one for each."""

def live_state(module: torch.nn.Module) -> OrderedDict[str, torch.Tensor] | None:
    """What ``module.state_dict(keep_vars=True)`` returns; None if that would run code that is not torch's, and for
    parameters or buffers of other classes than torch's."""

def reads_tensors_directly() -> bool:
    """Returns whether facts of tensors are read from torch's exported functions and a tensor's words."""

def reads_versions_directly() -> bool:
    """Returns whether version counters are read without asking torch."""

def ask_tensors_always(always: bool) -> None:
    """Asks every fact of a tensor in Python's way, for tests."""

def prefetches_tensors() -> bool:
    """Returns whether the pass over all tensors loads them into the cache ahead, for tests."""

def page_witness() -> str:
    """Returns why watch_pages does not work here; empty if it does."""

def huge_pages() -> str:
    """Returns why the kernel makes no huge pages for this process; empty if it does."""

def crc32_combine(crc_a: int, crc_b: int, size_b: int) -> int: ...
def rename_exchange(a: StrPath, b: StrPath) -> None:
    """Swaps two names atomically."""

def probe(folder: StrPath) -> dict[str, str]: ...
