"""``lazyckpt inspect``: what is in a file, by module, without reading a tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import TreeLine, age, count, plain, print_json, print_tree, size, stdout
from lazyckpt.reading.tree import STYLES, Node, drawn_rows, short, shown_shape
from lazyckpt.storage.manifest import STATE, Checkpoint
from lazyckpt.tools.contents import Contents, checkpoint_in, document_in, read


def inspect(
    path: Annotated[Path, path_argument("FILE|DIR", "A file, a checkpoint, or a run's folder: its newest checkpoint.")],
    depth: Annotated[int | None, typer.Option(min=0, help="Show this many levels; their sums count all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the tensors in a file: shape, dtype, bytes, and the sum of every module.

    Reads no tensor and runs no code from the file. A storage that several tensors share is counted once.
    """
    checkpoint = checkpoint_in(path) if os.path.isdir(path) else None
    contents = read(checkpoint.path / STATE if checkpoint is not None else document_in(path))
    root = contents.tree().root
    if as_json:
        print_json(_to_json(contents, root, checkpoint, depth))
        return
    console = stdout()
    console.print(_heading(contents, root, checkpoint), soft_wrap=True)
    for key, text in (contents.metadata or {}).items():
        console.print(Text(plain(f"{key}: {short(text)}"), style="dim"), soft_wrap=True)
    _print_rows(console, root, depth)


def _heading(contents: Contents, root: Node, checkpoint: Checkpoint | None) -> Text:
    parts = [contents.format, size(contents.nbytes), count(root.tensors, "tensor")]
    if checkpoint is not None:
        parts += [f"step {checkpoint.step}", f"sequence {checkpoint.sequence}", f"saved {age(checkpoint.created)} ago"]
    return Text.assemble((plain(contents.file), "bold"), "  ", ", ".join(parts))


def _print_rows(console: Console, root: Node, depth: int | None) -> None:
    lines = [TreeLine(("SIZE",), "", "NAME", ("DTYPE", "SHAPE"), style="bold")]
    lines.append(TreeLine((size(root.nbytes),), "", plain(root.name), ("", ""), style="bold"))
    for drawn, node in drawn_rows(root, depth):
        weight = size(node.nbytes) if (node.nbytes or node.tensors) and not node.tied_to else ""
        about = shown_shape(node.shape) if node.kind == "tensor" else plain(node.text)
        if node.kind == "module" and node.tensors:
            about += (", " if about else "") + count(node.tensors, "tensor")
        line = TreeLine(
            (weight,), drawn, plain(node.name), (plain(node.dtype), about), plain(node.note), STYLES[node.kind]
        )
        lines.append(line)
    print_tree(console, lines)


def _to_json(contents: Contents, root: Node, checkpoint: Checkpoint | None, depth: int | None) -> dict[str, Any]:
    about: dict[str, Any] = {
        "path": str(contents.file),
        "format": contents.format,
        "bytes": contents.nbytes,
        "tensor_bytes": root.nbytes,
        "tensors": root.tensors,
    }
    if checkpoint is not None:
        about["step"], about["sequence"] = checkpoint.step, checkpoint.sequence
    return {**about, "entries": [_entry(node) for _, node in drawn_rows(root, depth)]}


def _entry(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.path, "kind": node.kind, "bytes": node.nbytes}
    if node.kind == "module":
        entry["tensors"] = node.tensors
    if node.kind == "tensor":
        entry |= {"dtype": node.dtype, "shape": list(node.shape), "tied_to": node.tied_to, "note": node.note or None}
    if node.text:
        entry["value"] = node.text
    if node.storage is not None:
        record, crc = node.storage.record, node.storage.record.crc32
        entry |= {
            "file": node.storage.file.name,
            "record": record.name,
            "offset": record.offset,
            "crc32": None if crc is None else f"{crc:08x}",
        }
    return entry
