"""The engine of one Saver and its staging buffer: started from the knobs, grown when a save is due."""

from __future__ import annotations

import contextlib
import os

import torch

from lazyckpt import _engine, devices
from lazyckpt.config import Config
from lazyckpt.errors import ConfigError
from lazyckpt.pipeline.budget import auto_ring_bytes
from lazyckpt.pipeline.warmup import Warmup
from lazyckpt.warn import warn_once


class StagingBuffer:
    """The engine and its ring. Belongs to the process that made it."""

    def __init__(self, config: Config) -> None:
        """Starts the engine. Raises ConfigError if the system refuses memory, threads or the witness."""
        self.watched = _is_watched(config.witness)
        """Whether the kernel watches the pages of lazy host memory."""
        self._pid = os.getpid()
        self._chunk_bytes = config.chunk_bytes
        self._grows = config.host_buffer_bytes == "auto"
        self._max_bytes = auto_ring_bytes(config.chunk_bytes) if self._grows else int(config.host_buffer_bytes)
        self.engine: _engine.Engine | None
        try:
            self.engine = _engine.Engine(
                watch_pages=self.watched,
                huge_pages=config.huge_pages and _has_huge_pages(self.watched),
                ring_bytes=self._max_bytes,
                chunk_bytes=config.chunk_bytes,
                io_depth=config.io_depth,
                copy_threads=config.copy_threads,
                backend=config.io_backend,
                direct=None if config.direct_io == "auto" else config.direct_io,
            )
        except OSError as error:
            raise ConfigError(
                f"the engine does not start with host_buffer_bytes={self._max_bytes}, "
                f"io_backend={config.io_backend!r}, io_depth={config.io_depth}, copy_threads={config.copy_threads}: "
                f'{error.strerror}; use a smaller buffer or fewer threads, or io_backend="auto" to do without io_uring'
            ) from error
        if config.io_backend == "auto" and self.engine.fallback:
            cure = (
                "; to have it, install liburing-dev, then lazyckpt again" if "liburing" in self.engine.fallback else ""
            )
            warn_once(f"io_uring is not used ({self.engine.fallback}); a thread pool writes instead{cure}")
        if not self._grows:
            self.engine.reserve(self._max_bytes)
        self.warmup = Warmup(self._prepare)

    def reserve(self, nbytes: int) -> None:
        """Grows the ring to ``nbytes``, as far as ``host_buffer_bytes`` allows."""
        if self._grows and self.engine is not None:
            self.engine.reserve(min(nbytes, self._max_bytes))

    def reserve_for_save(self, nbytes: int) -> None:
        """Grows the ring for a save of ``nbytes``."""
        self.reserve(nbytes + 2 * self._chunk_bytes)

    def warn_if_unpinned(self) -> None:
        """Warns once if copies from a GPU are slow because the system did not pin the ring."""
        if self.engine is not None and self.engine.unpinned:
            way = "pass a small buffer that is" if self.engine.bounces else "are slow, and save() may wait for them"
            warn_once(f"the staging buffer is not pinned ({self.engine.unpinned}); copies from the GPU {way}")

    def close(self) -> None:
        """Drops the engine, which ends when no handle refers to it."""
        self.warmup.forget()
        self.engine = None

    def _prepare(self, tensors: list[torch.Tensor], nbytes: int) -> None:
        """Called after the first step (warmup.py). Never fails: the first save raises the error."""
        if self.engine is None or os.getpid() != self._pid:
            return
        storages = [tensor.untyped_storage() for tensor in tensors]
        with contextlib.suppress(OSError):  # attach the devices first: the ring goes next to them
            devices.locate(storages, [storage.device for storage in storages], self.engine)
        self.reserve_for_save(nbytes)


def _is_watched(witness: str) -> bool:
    """Whether the kernel will watch pages. Raises ConfigError if the user asks for it and the kernel refuses."""
    if witness == "versions":
        return False
    refused = _engine.page_witness()
    if refused and witness == "auto":
        warn_once(
            f"the kernel does not watch host memory here ({refused}), so version counters tell whether something wrote "
            'to a tensor before its copy. They miss some writers, which docs/consistency.md lists. witness="versions" '
            "turns this message off"
        )
    if not refused or witness == "auto":
        return not refused
    raise ConfigError(
        f'witness="pages" does not work here ({refused}). It takes Linux 6.7 or newer and, in a container, a seccomp '
        'profile that allows userfaultfd. witness="auto" takes what there is'
    )


def _has_huge_pages(watched: bool) -> bool:
    """Whether the engine can make huge pages of what it watches; warns once if not."""
    refused = _engine.huge_pages() if watched else "the kernel does not watch host memory"
    if refused:
        warn_once(f"huge_pages=True has no effect here: {refused}. Saving works without; lazyckpt doctor says more")
    return not refused
