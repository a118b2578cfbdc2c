"""Describes what a file holds, by module, without reading a tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lazyckpt.formats.base import Record
from lazyckpt.reading.tree import Kind, Node, rows
from lazyckpt.storage.catalog import STATE, Checkpoint
from lazyckpt.tools.contents import checkpoint_in, document_in, read


@dataclass(frozen=True)
class Entry:
    """A module, a tensor or a value in a file.

    Attributes:
        name: The path to it: keys joined by dots.
        label: The part of ``name`` that its parent does not have.
        level: 1 for what has no parent, 2 for what is in those, and so on.
        kind: "module", "tensor" or "value".
        bytes: Bytes in the file, of all below. A storage counts where it first appears.
        tensor_count: Tensors in it.
        dtype: Element type of a tensor, such as "float32".
        shape: Shape of a tensor.
        text: A value, shortened.
        note: How a tensor shares its memory, or what it is if not a plain tensor.
        tied_to: The name of the tensor that this one is another name of.
        file: The file that holds the storage of a tensor.
        record: The name, offset, bytes and checksum of that storage in the file.
    """

    name: str
    label: str
    level: int
    kind: Kind
    bytes: int
    tensor_count: int
    dtype: str
    shape: tuple[int, ...]
    text: str
    note: str
    tied_to: str | None
    file: Path | None
    record: Record | None


@dataclass(frozen=True)
class Inspection:
    """What a file or a checkpoint holds.

    Attributes:
        path: The file, or the index of shards.
        format: For example "safetensors in 3 files".
        bytes: Length of the file, or of all shards.
        tensor_bytes: Bytes of all storages.
        tensor_count: Tensors, tied ones included.
        metadata: The metadata of a safetensors file; None in other formats.
        entries: What is saved, parents first.
        checkpoint: What the manifest of the checkpoint says (step, sequence, …); None if ``path`` was just a file.
    """

    path: Path
    format: str
    bytes: int
    tensor_bytes: int
    tensor_count: int
    metadata: dict[str, str] | None
    entries: tuple[Entry, ...]
    checkpoint: Checkpoint | None

    @property
    def tensors(self) -> dict[str, Entry]:
        """The tensors by name."""
        return {entry.name: entry for entry in self.entries if entry.kind == "tensor"}


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Describes the tensors and values in a file, without reading a tensor or running code from the file.

    ``path`` is a file, the index of shards, a checkpoint, or a run's folder, which means its newest checkpoint. Raises
    LoadError.
    """
    path = Path(path)
    checkpoint = checkpoint_in(path) if os.path.isdir(path) else None
    contents = read(document_in(path) if checkpoint is None else checkpoint.path / STATE)
    root = contents.tree()
    return Inspection(
        path=contents.file,
        format=contents.format,
        bytes=contents.nbytes,
        tensor_bytes=root.nbytes,
        tensor_count=root.tensors,
        metadata=contents.metadata,
        entries=tuple(_entry(level, label, node) for level, label, node in rows(root)),
        checkpoint=checkpoint,
    )


def _entry(level: int, label: str, node: Node) -> Entry:
    return Entry(
        name=node.path,
        label=label,
        level=level,
        kind=node.kind,
        bytes=node.nbytes,
        tensor_count=node.tensors,
        dtype=node.dtype,
        shape=node.shape,
        text=node.text,
        note=node.note,
        tied_to=node.tied_to,
        file=None if node.storage is None else node.storage.file,
        record=None if node.storage is None else node.storage.record,
    )
