"""Lazy, durable checkpointing for PyTorch training, on standard files."""

from lazyckpt.advice import Advice, advise
from lazyckpt.background import SaveHandle
from lazyckpt.checkpointer import Checkpointer
from lazyckpt.config import Config
from lazyckpt.errors import (
    ClosedError,
    ConfigError,
    CorruptFileError,
    LazyCkptError,
    LoadError,
    NoSpaceError,
    RestoreError,
    SaveError,
    SerializationError,
    TornSnapshotError,
    UnsupportedFormatError,
)
from lazyckpt.functional import load, save
from lazyckpt.gate import CUDAGraph, guard, wait_captured
from lazyckpt.metrics import CheckpointMetrics, ChunkEvent
from lazyckpt.preemption import CommitOnSignal, commit_on
from lazyckpt.providers.objects import StateProvider
from lazyckpt.saver import Saver
from lazyckpt.staged import StagedFolder

__version__ = "0.1.0"

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
