"""The files of a sharded checkpoint, each of one rank: for integrations, which know how ranks share the work.

``write_shard`` writes one at once, into a folder that its caller stages and publishes. A ``ShardSaver`` captures one
lazily: the name of the folder may become known later. ``read_slices`` reads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lazyckpt import waits
from lazyckpt.errors import SaveError
from lazyckpt.formats.distcp import Place as Place
from lazyckpt.formats.reader import FileReader as FileReader
from lazyckpt.pipeline.handle import SaveHandle, give_up, mark_reported
from lazyckpt.pipeline.reentry import alone
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.save_now import save_now
from lazyckpt.pipeline.sharded.shard_plan import Item, ShardCache, ShardPlan
from lazyckpt.reading.ranges import process_engine
from lazyckpt.reading.sharded import metadata, slices
from lazyckpt.reading.sharded.metadata import METADATA as METADATA
from lazyckpt.reading.sharded.metadata import Stamps as Stamps
from lazyckpt.reading.sharded.slices import Slice as Slice
from lazyckpt.saver import Saver
from lazyckpt.storage.commit import PartStaging, Staging
from lazyckpt.storage.manifest import crc_of


def write_shard(items: Iterable[Item], folder: Path, name: str, *, target: Path) -> Mapping[str, Place]:
    """Writes a ``.distcp`` file of these items into ``folder``, on the calling thread.

    Returns where each item lies, when the file is durable under its name. Messages call the checkpoint
    ``target``. Raises SaveError after removing the file."""
    plan = ShardPlan(items)
    save_now(_PartRequest(target, name, _known(folder)), {name: plan}, process_engine())
    return plan.places


class ShardCapture:
    """One file of a rank, captured and on its way; made by ``ShardSaver.capture``. Holds the tensors until they are
    copied."""

    def __init__(self, plan: ShardPlan, folder: Future[Path], handle: SaveHandle) -> None:
        self._plan = plan
        self._folder = folder
        self._handle = handle
        self.metrics = handle.metrics

    def open(self, folder: Path) -> None:
        """Names the folder, which exists. Any thread."""
        self._folder.set_result(folder)

    def result(self) -> Mapping[str, Place]:
        """Returns where each item lies, when the file is durable. Any thread, after ``open``. Raises SaveError."""
        self.wait()  # without a limit: result() alone gives up on a thread that owes a verdict
        self._handle.result()
        return self._plan.places

    def abandon(self, why: str) -> None:
        """Gives up a file that is not durable yet. Any thread."""
        mark_reported(self._handle)  # the caller knows
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._folder.set_exception(SaveError(why, path=self._handle.path))
        give_up(self._handle, why)

    def wait(self) -> None:
        """Waits until nothing writes the file any more, after ``open`` or ``abandon``."""
        concurrent.futures.wait([self._handle])


class ShardSaver:
    """Captures files of a rank lazily. Thread-safety: as ``saver``."""

    def __init__(self, saver: Saver) -> None:
        self._launcher = saver.launcher
        self._callers = saver.launcher.callers
        self._caches: dict[str, ShardCache] = {}  # by name of the file

    @alone("save()")
    def capture(
        self, items: Iterable[Item], name: str, *, target: Path, look: Callable[[], None] = lambda: None
    ) -> ShardCapture:
        """Starts to save these items as the file ``name`` of a folder that ``ShardCapture.open`` will name.

        Returns when everything is copied or guarded, as ``Saver.save`` does; an optimizer's next step waits for the
        rest. The caller must call ``open`` or ``abandon`` soon: until then the staging buffer may be full, and a step
        waits. ``look``: called every now and then until then, on a background thread; it may abandon. Messages call
        the checkpoint ``target``, whose parent exists. Raises SaveError."""
        plan = ShardPlan(items, self._caches.setdefault(name, ShardCache()))
        folder: Future[Path] = Future()
        request = _PartRequest(target, name, folder, look)
        handle = self._launcher.launch(request, {name: plan}, blocking=False)
        return ShardCapture(plan, folder, handle)


class _PartRequest(Request):
    """A file in a folder that other code stages."""

    def __init__(self, path: Path, name: str, folder: Future[Path], look: Callable[[], None] = lambda: None) -> None:
        super().__init__(path, None)
        self._name = name
        self._folder = folder
        self._look = look

    def stage(self) -> Staging:
        while not self._folder.done():
            self._look()
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._folder.exception(waits.FOLDER_LOOK_S)
        return PartStaging(self._folder.result(), [self._name])


def _known(folder: Path) -> Future[Path]:
    known: Future[Path] = Future()
    known.set_result(folder)
    return known


def read_metadata(path: Path) -> tuple[Any, Stamps]:
    """Returns the ``Metadata`` in the file ``path``, and what tells whether other files of its folder are of the same
    save. Raises LoadError; see ``reading.sharded.metadata``."""
    with FileReader(path) as file:
        return metadata.read_metadata(file, crc_of(path.parent, path.name)), Stamps(file)


def read_slices(file: FileReader, wanted: Iterable[Slice]) -> None:
    """Reads slices of the tensors in one ``.distcp`` file into their targets; see ``reading.sharded.slices``."""
    slices.read_slices(file, wanted, process_engine())


def read_items(file: FileReader, items: Iterable[tuple[str, Place]], *, weights_only: bool) -> Iterator[bytes]:
    """Yields ready-made items of a file, each with its name for messages; see ``reading.sharded.slices``."""
    for name, place in items:
        yield slices.read_bytes(file, place, name, weights_only=weights_only)
