"""Describes what a file holds, by module, without reading a tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lazyckpt.reading.tree import Node
from lazyckpt.storage.manifest import STATE, Checkpoint
from lazyckpt.tools.contents import as_path, checkpoint_in, document_in, read


@dataclass(frozen=True)
class Inspection:
    """What a file or a checkpoint holds.

    Attributes:
        path: The file, or the index of shards.
        format: For example "safetensors in 3 files".
        bytes: Length of the file, or of all shards.
        metadata: The metadata of a safetensors file; None in other formats.
        checkpoint: What the manifest of the checkpoint says (step, sequence, …); None for other files.
        root: What is saved, as a tree of modules.
    """

    path: Path
    format: str
    bytes: int
    metadata: dict[str, str] | None
    checkpoint: Checkpoint | None
    root: Node

    @property
    def tensors(self) -> dict[str, Node]:
        """The tensors by their paths."""
        return {node.path: node for node in self.root.walk() if node.kind == "tensor"}


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Describes the tensors and values in a file, without reading a tensor or running code from the file.

    ``path`` is a file, the index of shards, a checkpoint, or a run's folder, which means its newest checkpoint. Raises
    LoadError, and ConfigError for a URL.
    """
    path = as_path(path)
    checkpoint = checkpoint_in(path) if os.path.isdir(path) else None
    contents = read(document_in(path) if checkpoint is None else checkpoint.path / STATE)
    return Inspection(contents.file, contents.format, contents.nbytes, contents.metadata, checkpoint, contents.tree())
