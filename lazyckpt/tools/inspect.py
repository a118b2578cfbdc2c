"""Describes the contents of a file, by module, without reading a tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lazyckpt.conversion.inert import InertTensor
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.stores.urls import located
from lazyckpt.tools import Progress
from lazyckpt.tools.contents import checkpoint_in, document_in, read, read_tag, tag_in
from lazyckpt.tools.deepspeed import Tag
from lazyckpt.tools.tree import Node, rows, shown_shape
from lazyckpt.tools.units import count, plain, size

_SHOWN_ROWS = 100


@dataclass(frozen=True)
class Inspection:
    """The contents of a file or a checkpoint.

    Attributes:
        path: The file, or the index of shards: for a folder of torch.distributed.checkpoint its .metadata. For a
            checkpoint of DeepSpeed the folder of its tag.
        format: For example "safetensors in 3 files".
        bytes: Length of the file, or of all shards.
        metadata: The metadata of a safetensors file; None in other formats.
        checkpoint: The facts in the manifest of the checkpoint (step, sequence, …); None for other files.
        root: The saved object, as a tree of modules.
        tag: The facts about a checkpoint of DeepSpeed; None for others.
    """

    path: AnyPath
    format: str
    bytes: int
    metadata: dict[str, str] | None
    checkpoint: Checkpoint | None
    root: Node
    tag: Tag | None = None

    @property
    def tensors(self) -> dict[str, Node]:
        """The tensors by their paths."""
        return {node.path: node for node in self.root.walk() if node.kind == "tensor"}

    def __repr__(self) -> str:
        """The tree, for a notebook: as many levels as fit into 100 rows."""
        found = list(rows(self.root, None))
        depth = max((level for level, _, _ in found), default=0)
        while depth > 1 and sum(level <= depth for level, _, _ in found) > _SHOWN_ROWS:
            depth -= 1
        shown = [(level, label, node) for level, label, node in found if level <= depth][:_SHOWN_ROWS]
        names = ["  " * (level - 1) + plain(label) for level, label, _ in shown]
        sizes = [size(node.nbytes) if node.nbytes else "" for _, _, node in shown]
        wide, sized = max(map(len, names), default=0), max(map(len, sizes), default=0)
        lines = [f"{plain(self.path)}: {self.format}, {size(self.bytes)}, {count(self.root.tensors, 'tensor')}"]
        for name, nbytes, (_, _, node) in zip(names, sizes, shown, strict=True):
            lines.append(f"{nbytes:>{sized}}  {name:<{wide}}  {_about(node)}".rstrip())
        if len(shown) < len(found):
            lines.append(f"… {len(found) - len(shown):,} more rows: see root and tensors")
        return "\n".join(lines)


def inspect(
    path: str | os.PathLike[str],
    *,
    filter: str | None = None,
    stats: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Describes the tensors and values in a file, without running code from the file.

    Args:
        path: A file, the index of shards, a checkpoint, or a run's folder, which means its newest checkpoint. For
            DeepSpeed the folder of a tag, or the one above, which means the tag that ``latest`` names.
        filter: Keeps only entries with this text in their path; a pattern with * or ? must match all of the path.
        stats: Also reads the tensors, and computes ``Node.stats``.
        progress: Called with the name of the file, the bytes read and the bytes in all.

    Raises:
        LoadError: If the file cannot be read; CorruptFileError if it is damaged.
        ConfigError: For a URL that lazyckpt cannot read.
    """
    path = located(path)
    checkpoint = checkpoint_in(path) if isinstance(path, StorePath) or os.path.isdir(path) else None
    tag = tag_in(path) if checkpoint is None and isinstance(path, Path) else None
    if tag is not None:
        contents = read_tag(tag)
    elif checkpoint is not None and checkpoint.layout == "state":
        contents = read(checkpoint.state)
    else:
        contents = read(document_in(path))
    root = contents.tree()
    if filter is not None:
        _prune(root, filter if any(c in filter for c in "*?[") else f"*{filter}*")
    if stats:
        _measure(root, contents.file, progress or (lambda name, done, total: None))
    return Inspection(contents.file, contents.format, contents.nbytes, contents.metadata, checkpoint, root, tag)


def _about(node: Node) -> str:
    if node.kind == "tensor":
        return "  ".join(filter(None, (plain(node.dtype), shown_shape(node.shape), plain(node.note))))
    return count(node.tensors, "tensor") if node.tensors else plain(node.text)


def _prune(node: Node, pattern: str) -> None:
    """Keeps the leaves whose path matches, and the modules above them, with the sums of these leaves."""
    kept = []
    for child in node.children:
        if child.children and not fnmatchcase(child.path, pattern):
            _prune(child, pattern)
        if child.children or fnmatchcase(child.path, pattern):
            kept.append(child)
    node.children = kept
    node.nbytes, node.tensors = sum(child.nbytes for child in kept), sum(child.tensors for child in kept)


def _measure(root: Node, file: AnyPath, progress: Progress) -> None:
    from lazyckpt.tools.stats import stats_of  # imports torch, which takes seconds

    tensors = [node for node in root.walk() if isinstance(node.value, InertTensor)]
    total, done = sum(node.value.nbytes for node in tensors), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(str(file), done, total)

    for node in tensors:
        node.stats = stats_of(node.value, advance)
