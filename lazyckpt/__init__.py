"""Lazy, durable checkpointing for PyTorch training, on standard files."""

import importlib
import sys
from typing import TYPE_CHECKING

from lazyckpt._version import __version__ as __version__

if TYPE_CHECKING:
    from lazyckpt.capture.guard import CUDAGraph, guard, wait_captured
    from lazyckpt.checkpointer import Checkpointer
    from lazyckpt.config import Config
    from lazyckpt.errors import (
        ClosedError,
        ConfigError,
        CorruptFileError,
        LazyCkptError,
        LoadError,
        NoSpaceError,
        ReadError,
        RestoreError,
        SaveError,
        SerializationError,
        TornSnapshotError,
        UnsupportedFormatError,
    )
    from lazyckpt.functional import load, save
    from lazyckpt.metrics import CheckpointMetrics, ChunkEvent
    from lazyckpt.observe.advice import Advice, advise
    from lazyckpt.pipeline.handle import SaveHandle
    from lazyckpt.pipeline.preemption import CommitOnSignal, commit_on
    from lazyckpt.providers.objects import StateProvider
    from lazyckpt.saver import Saver
    from lazyckpt.staged import StagedFolder

__all__ = [
    "Advice",
    "CUDAGraph",
    "CheckpointMetrics",
    "Checkpointer",
    "ChunkEvent",
    "ClosedError",
    "CommitOnSignal",
    "Config",
    "ConfigError",
    "CorruptFileError",
    "LazyCkptError",
    "LoadError",
    "NoSpaceError",
    "ReadError",
    "RestoreError",
    "SaveError",
    "SaveHandle",
    "Saver",
    "SerializationError",
    "StagedFolder",
    "StateProvider",
    "TornSnapshotError",
    "UnsupportedFormatError",
    "advise",
    "commit_on",
    "guard",
    "load",
    "save",
    "wait_captured",
]

# Where they are. What is not asked for is not imported: torch takes seconds, and the command line seldom needs it.
_HOMES = {
    "observe.advice": ("Advice", "advise"),
    "checkpointer": ("Checkpointer",),
    "config": ("Config",),
    "errors": (
        "ClosedError",
        "ConfigError",
        "CorruptFileError",
        "LazyCkptError",
        "LoadError",
        "ReadError",
        "NoSpaceError",
        "RestoreError",
        "SaveError",
        "SerializationError",
        "TornSnapshotError",
        "UnsupportedFormatError",
    ),
    "functional": ("load", "save"),
    "capture.guard": ("CUDAGraph", "guard", "wait_captured"),
    "pipeline.handle": ("SaveHandle",),
    "metrics": ("CheckpointMetrics", "ChunkEvent"),
    "pipeline.preemption": ("CommitOnSignal", "commit_on"),
    "providers.objects": ("StateProvider",),
    "saver": ("Saver",),
    "staged": ("StagedFolder",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        """A public name, or a module of this package, at its first use (PEP 562)."""
        if name in _HOME_OF:
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
            return found
        try:
            if not name.startswith("__"):
                return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "importlib", "sys"})
