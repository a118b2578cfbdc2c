"""Every tunable, with its unit in its name."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from lazyckpt.errors import ConfigError, SaveError
from lazyckpt.metrics import CheckpointMetrics

PAGE_BYTES = 4096
MIB = 1 << 20
F = TypeVar("F", bound=Callable[..., Any])

# Settings that lazyckpt took before: why each is gone, and what to use instead.
_REMOVED = {
    "witness='copy'": 'it needed a privilege and was never chosen by "auto". Use witness="auto"; guard() or '
    "wait_captured() covers code that writes to weights between save() and the copy",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a ``Checkpointer`` works. All fields are keyword arguments of it."""

    host_buffer_bytes: int | Literal["auto"] = "auto"
    """The staging ring. "auto": as much as one checkpoint needs plus two chunks, at most a quarter of the memory
    available to this process; taken after the first step of a tracked optimizer. A number is taken at once. A smaller
    one saves memory; the copies then wait for the disk (DataStates-LLM, V-B)."""

    max_in_flight: int = 2
    """Checkpoints not yet durable at once; the next save waits until there is room (PCcheck)."""

    durability: Literal["async", "before_step"] = "async"
    """"before_step": the next optimizer step waits until the checkpoint is durable (FastPersist, 4.3)."""

    on_error: Literal["raise", "warn"] = "raise"
    """What happens when a checkpoint fails in the background: the next call of the Checkpointer raises, or it is a
    warning and training goes on. A ``save()`` that raises an earlier failure has saved its own step all the same."""

    keep_last: int | None = None
    """Checkpoints to keep, counted back from the newest along the parent chain; if the chain is shorter, the newest
    others make up for it. None keeps all."""

    keep_every: int | None = None
    """Also keep checkpoints whose step is a multiple of this."""

    keep_best: int | None = None
    """Also keep so many of the checkpoints with the best metric."""

    best: str | None = None
    """The metric, of those given to ``save(step, metrics=…)``, by which checkpoints are compared."""

    mode: Literal["min", "max"] = "min"
    """Whether the best checkpoint has the lowest or the highest metric."""

    witness: Literal["auto", "pages", "versions"] = "auto"
    """How lazyckpt notices a write to a lazily copied tensor before its copy. "pages": by the kernel, which sees every
    writer (host memory, Linux 6.7 or newer). "versions": by the tensors' version counters, which some writers do not
    move. "auto": "pages" where it works, which ``lazyckpt doctor`` tells; docs/consistency.md compares them."""

    huge_pages: bool = False
    """Move large lazily copied tensors in host memory to huge pages, in the background after the first save. The kernel
    then watches them in a fraction of the time. Takes the page witness; where the kernel refuses, lazyckpt warns once
    and goes on (docs/settings.md)."""

    audit: bool = False
    """Compare checksums of every lazily copied tensor at save(), in the copy and at the optimizer step, to find writes
    to parameters outside the optimizer. Reads the whole state twice more; for debugging."""

    verify_after_write: bool = False
    """Read every checkpoint back from the disk before it is committed, and compare checksums with those of the copy.
    A difference fails the checkpoint. Reads the disk once more, and takes no time of ``save()``."""

    chunk_bytes: int = 8 * MIB
    """The unit that is copied, checksummed and written; a multiple of 4096."""

    io_depth: int = 8
    """Writes in flight."""

    copy_threads: int = min(len(os.sched_getaffinity(0)), 2)
    """Threads that copy while training computes. Until the staging buffer is full no more of them work than half of
    the cores of this process: the others are training's (docs/benchmarks.md)."""

    io_backend: Literal["auto", "io_uring", "posix"] = "auto"
    """"posix" is a thread pool. "auto" is io_uring where the machine has it, but the thread pool for files on FUSE.
    "io_uring" fails where the machine does not have it."""

    direct_io: bool | Literal["auto"] = "auto"
    """O_DIRECT where the file system has it. "auto": except on FUSE, where servers that answer short get wrong data."""

    rank_timeout_s: float = 120.0
    """With several ranks: how long the others wait without a sign of life from one before they give up the checkpoint.
    A rank that lives may take as long as it needs to write, but must get through ``save()`` within five times this."""

    trace: str | os.PathLike[str] | None = None
    """A file for the timeline of every checkpoint, beside the training steps (docs/metrics.md). An existing one is
    continued, up to 256 MiB. Of several ranks each has its own: rank 3 writes runs/a.rank-3.json for runs/a.json."""

    on_done: Callable[[CheckpointMetrics, SaveError | None], None] | None = None
    """Called when a checkpoint is durable or has failed, on a thread of the background (in ``save()``, if it fails at
    once); its errors become warnings. Must not wait for checkpoints.
    ``lazyckpt.exporters`` has some."""

    mirrors: Sequence[str] = ()  # and what the text says; command lines take the URLs
    """Further places that get the checkpoints in the background, once they are durable: each a ``Mirror``, a URL, a
    folder, or a dict of the arguments of a ``Mirror`` (docs/mirrors.md)."""

    def __post_init__(self) -> None:
        self._at_least("max_in_flight", 1)
        self._at_least("io_depth", 1)
        self._at_least("copy_threads", 1)
        self._at_least("chunk_bytes", PAGE_BYTES)
        if self.keep_last is not None:
            self._at_least("keep_last", 1)
        if self.keep_every is not None:
            self._at_least("keep_every", 1)
            if self.keep_last is None:
                raise ConfigError(
                    "keep_every adds to keep_last, and without that everything is kept: give keep_last, too"
                )
        if self.keep_best is not None:
            self._at_least("keep_best", 1)
            if self.keep_last is None or self.best is None:
                missing = "keep_last" if self.keep_last is None else 'best, the name of a metric such as "loss"'
                raise ConfigError(f"keep_best adds the best checkpoints to the last ones: give {missing}, too")
        if self.best is not None and not isinstance(self.best, str):
            raise ConfigError(f"best={self.best!r}: expected the name of a metric")
        for name, allowed in (
            ("mode", ("min", "max")),
            ("durability", ("async", "before_step")),
            ("on_error", ("raise", "warn")),
            ("io_backend", ("auto", "io_uring", "posix")),
            ("witness", ("auto", "pages", "versions")),
        ):
            setting = f"{name}={getattr(self, name)!r}"
            if setting in _REMOVED:
                raise ConfigError(f"{setting} was removed: {_REMOVED[setting]}")
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{setting}: expected one of {', '.join(map(repr, allowed))}")
        if self.direct_io != "auto" and not isinstance(self.direct_io, bool):
            raise ConfigError(f"direct_io={self.direct_io!r}: expected true, false or 'auto'")
        if self.trace is not None and not isinstance(self.trace, str | os.PathLike):
            raise ConfigError(f"trace={self.trace!r}: expected the name of a file")
        if self.on_done is not None and not callable(self.on_done):
            raise ConfigError(f"on_done={self.on_done!r}: expected something to call")
        if self.io_depth > 1024 or self.copy_threads > 1024:
            raise ConfigError("io_depth and copy_threads: at most 1024")
        if self.max_in_flight > 64:
            raise ConfigError(
                f"max_in_flight={self.max_in_flight}: at most 64; they share one staging buffer and one disk, which is "
                "no faster for it, and a crash loses all of them"
            )
        timeout_s = self.rank_timeout_s
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"rank_timeout_s={timeout_s!r}: expected a positive number of seconds")
        if self.chunk_bytes % PAGE_BYTES or self.chunk_bytes > 1024 * MIB:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}: expected a multiple of 4096, at most 1 GiB")
        if self.host_buffer_bytes != "auto":
            self._at_least("host_buffer_bytes", 1)
            if self.host_buffer_bytes > (memory := _memory_bytes()):
                raise ConfigError(
                    f"host_buffer_bytes={self.host_buffer_bytes}: this machine has {memory} bytes of memory"
                )
            if self.host_buffer_bytes < 2 * self.chunk_bytes:
                raise ConfigError(
                    f"host_buffer_bytes={self.host_buffer_bytes}: the ring must hold two chunks of "
                    f"{self.chunk_bytes} bytes (chunk_bytes); make it larger, or the chunks smaller"
                )

    @classmethod
    def of(cls, knobs: Mapping[str, Any], owner: str) -> Config:
        """Makes one from the keyword arguments of ``owner``. Raises ConfigError."""
        check_names(owner, knobs)
        return cls(**knobs)

    def _at_least(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{name}={value!r}: expected a whole number, at least {minimum}")


class Settings(TypedDict, total=False):
    """The fields of ``Config`` as keyword arguments of an integration. Retention is left to its framework."""

    host_buffer_bytes: int | Literal["auto"]
    max_in_flight: int
    durability: Literal["async", "before_step"]
    on_error: Literal["raise", "warn"]
    witness: Literal["auto", "pages", "versions"]
    huge_pages: bool
    audit: bool
    verify_after_write: bool
    chunk_bytes: int
    io_depth: int
    copy_threads: int
    io_backend: Literal["auto", "io_uring", "posix"]
    direct_io: bool | Literal["auto"]
    rank_timeout_s: float
    trace: str | os.PathLike[str] | None
    on_done: Callable[[CheckpointMetrics, SaveError | None], None] | None
    mirrors: Sequence[Any]


class RunSettings(Settings, total=False):
    """All fields of ``Config`` as keyword arguments."""

    keep_last: int | None
    keep_every: int | None
    keep_best: int | None
    best: str | None
    mode: Literal["min", "max"]


RETENTION = tuple(name for name in RunSettings.__annotations__ if name not in Settings.__annotations__)


def spells_out(names: type[Settings]) -> Callable[[F], F]:
    """Decorates a function that takes ``**knobs: Unpack[names]``: its signature lists each setting with its type and
    default, for ``help()`` and for command lines such as LightningCLI's."""

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        types = get_type_hints(names)
        listed = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
            )
            for field in fields(Config)
            if field.name in types
        ]
        others = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        function.__signature__ = own.replace(parameters=[*others, *listed])  # type: ignore[attr-defined]
        return function

    return decorate


def check_names(owner: str, knobs: Iterable[str], *others: str) -> None:
    """Raises ConfigError, with the name that was probably meant, for a keyword argument of ``owner`` that is no field
    of Config. ``others``: further keyword arguments that it takes."""
    names = [*others, *(field.name for field in fields(Config))]
    for name in knobs:
        if name not in names:
            raise ConfigError(f"{owner}: {name!r} is not a setting; {hint(name, names)}")


def check_writers(writers: Any) -> None:
    """Raises ConfigError unless this is a number of ranks, a word that chooses some, or None."""
    named = isinstance(writers, str) and writers in ("auto", "all", "node", "rank0")
    if not (writers is None or named or (type(writers) is int and writers > 0)):
        raise ConfigError(f'writers={writers!r}: expected "auto", "all", "node", "rank0", a number of ranks, or None')


def hint(name: str, names: Iterable[str]) -> str:
    """Returns which of ``names`` was probably meant, or all of them."""
    names = list(names)
    meant = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {meant[0]!r}?" if meant else f"there is: {', '.join(names)}"


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
