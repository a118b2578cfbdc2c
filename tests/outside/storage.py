"""Puts our storage in place of torch's.

torch's tests name ``FileSystemWriter`` and ``FileSystemReader``, or leave it to ``dcp.save`` and ``dcp.load`` to make
them. The classes here take the same arguments. They differ from ours in two ways, which a user has to settle, too:

- Options that only tune torch's writer have no effect: numbers of threads and files, copies ahead, caches.
- A second save into one folder first moves the checkpoint there out of the way, unless the test says
  ``overwrite=False``. LazyStorageWriter refuses, and tells its user to do that.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import uuid
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

from lazyckpt.integrations.dcp import LazyStorageReader, LazyStorageWriter
from outside.process import MOVED, READER, WRITER, log, note


class Writer(LazyStorageWriter):
    """Takes the arguments of FileSystemWriter."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 0,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        if _extensions is not None or serialization_format is not SerializationFormat.TORCH_SAVE:
            raise TypeError("LazyStorageWriter has no extensions and no serialization_format")
        super().__init__(path)
        self._overwrite = overwrite
        note(WRITER)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if self._overwrite and (self.path / ".metadata").exists():
            with contextlib.suppress(FileNotFoundError):  # another rank has moved it
                os.rename(self.path, log().with_name(uuid.uuid4().hex))
                note(MOVED)


class Reader(LazyStorageReader):
    """Takes the arguments of FileSystemReader."""

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        if _extension_registry is not None:
            raise TypeError("LazyStorageReader has no extensions")
        super().__init__(path)
        note(READER)


def install() -> None:
    for name in ("_fsspec_filesystem", "format_utils", "hf_storage"):  # which derive from torch's classes, or name them
        importlib.import_module(f"torch.distributed.checkpoint.{name}")
    ours = {dcp.FileSystemWriter: Writer, dcp.FileSystemReader: Reader}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.checkpoint"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value in ours:
                    setattr(module, attribute, ours[value])
