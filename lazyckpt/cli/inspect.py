"""``lazyckpt inspect``: what is in a file, by module, without reading a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lazyckpt import commit
from lazyckpt.catalog import STATE, Catalog, Checkpoint, read_checkpoint
from lazyckpt.cli.output import age, count, plain, print_json, size, stdout
from lazyckpt.cli.skeleton import Storage, Tensor, dtype_name, read_skeleton
from lazyckpt.cli.tree import Node, Tree, short
from lazyckpt.containers import safetensors, sniff
from lazyckpt.containers.torch_zip_reader import read_directory
from lazyckpt.errors import LoadError, UnsupportedFormatError


def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="FILE|DIR", help="A file, a checkpoint, or a run's folder: its newest checkpoint.")
    ],
    depth: Annotated[int | None, typer.Option(min=0, help="Show this many levels; their sums count all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the tensors in a file: shape, dtype, bytes, and the sum of every module.

    Reads no tensor and runs no code from the file. A storage that several tensors share is counted once.
    """
    checkpoint = _checkpoint_in(path) if path.is_dir() else None
    file = checkpoint.path / STATE if checkpoint is not None else path
    contents = _read(file)
    if as_json:
        print_json(_to_json(contents, checkpoint, depth))
        return
    console = stdout()
    console.print(_heading(contents, checkpoint), soft_wrap=True)
    for text in contents.metadata:
        console.print(Text(plain(text), style="dim"), soft_wrap=True)
    _print_rows(console, contents.root, depth)


@dataclass
class _Contents:
    file: Path
    format: str
    nbytes: int
    root: Node
    metadata: list[str]


def _checkpoint_in(folder: Path) -> Checkpoint:
    """The checkpoint that ``folder`` is, or the newest in it."""
    if (folder / commit.MANIFEST).is_file():
        return read_checkpoint(folder)
    catalog = Catalog(folder)
    checkpoints = catalog.scan()
    if checkpoints:
        return checkpoints[0]
    if catalog.broken:
        raise catalog.broken[0]
    raise LoadError("no checkpoint in this folder", path=folder)


def _read(file: Path) -> _Contents:
    """Raises LoadError for what is damaged, or of a format whose contents cannot be told without loading it."""
    kind = sniff(file)
    if kind == "torch_legacy":
        raise UnsupportedFormatError("written by torch before 1.6; load it with lazyckpt.load, save it anew", path=file)
    nbytes = file.stat().st_size
    if kind == "safetensors":
        header = safetensors.read_header(file)
        metadata = [f"{key}: {short(value)}" for key, value in header.metadata.items()]
        with _showing(file):
            tensors = {
                name: Tensor(dtype_name(info.dtype), info.shape, 0, (), Storage(info.record, info.dtype))
                for name, info in header.tensors.items()
            }
            return _Contents(file, "safetensors", nbytes, Tree(file.name, tensors).root, metadata)
    obj = read_skeleton(file, read_directory(file))
    with _showing(file):
        return _Contents(file, "torch.save archive", nbytes, Tree(file.name, obj).root, [])


@contextlib.contextmanager
def _showing(file: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UnsupportedFormatError(f"cannot be shown: {error}", path=file) from error


def _heading(contents: _Contents, checkpoint: Checkpoint | None) -> Text:
    parts = [contents.format, size(contents.nbytes), count(contents.root.tensors, "tensor")]
    if checkpoint is not None:
        parts += [f"step {checkpoint.step}", f"sequence {checkpoint.sequence}", f"saved {age(checkpoint.created)} ago"]
    return Text.assemble((plain(contents.file), "bold"), "  ", ", ".join(parts))


def _rows(node: Node, depth: int | None, above: str = "") -> Iterator[tuple[str, Node]]:
    """Every node to be shown but the root, behind the lines that draw the tree."""
    if depth == 0:
        return
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        yield above + ("└─ " if last else "├─ "), child
        below = above + ("   " if last else "│  ")
        yield from _rows(child, None if depth is None else depth - 1, below)


def _print_rows(console: Console, root: Node, depth: int | None) -> None:
    """By hand, not with rich's tables: those take seconds for ten thousand rows."""
    rows = [("SIZE", "", "NAME", "DTYPE", "SHAPE", ""), (size(root.nbytes), "", plain(root.name), "", "", "")]
    styles = ["bold", "bold"]
    for lines, node in _rows(root, depth):
        weight = size(node.nbytes) if (node.nbytes or node.tensors) and not node.tied_to else ""
        about = " x ".join(map(str, node.shape)) or "scalar" if node.kind == "tensor" else plain(node.text)
        if node.kind == "module" and node.tensors:
            about += (", " if about else "") + count(node.tensors, "tensor")
        rows.append((weight, lines, plain(node.name), plain(node.dtype), about, plain(node.note)))
        styles.append(_STYLES[node.kind])
    weight_cells, name_cells, dtype_cells = (
        max(cell_len("".join(row[first:last])) for row in rows) for first, last in ((0, 1), (1, 3), (3, 4))
    )
    text = Text()
    for (weight, lines, name, dtype, about, note), style in zip(rows, styles, strict=True):
        text.append(f"{weight:>{weight_cells}}  ").append(lines, "dim").append(name, style)
        text.append(" " * (name_cells - cell_len(lines + name) + 2) + f"{dtype:<{dtype_cells}}  ")
        text.append(about, "dim" if style == _STYLES["module"] else "")
        text.append(f"  {note}" if note else "", "yellow").append("\n")
    if console.is_terminal:
        console.print(text, no_wrap=True, overflow="ellipsis", end="")
    else:
        print("\n".join(line.rstrip() for line in text.plain.splitlines()))


_STYLES = {"module": "bold", "tensor": "", "value": "cyan"}


def _to_json(contents: _Contents, checkpoint: Checkpoint | None, depth: int | None) -> dict[str, Any]:
    about: dict[str, Any] = {
        "path": str(contents.file),
        "format": contents.format,
        "bytes": contents.nbytes,
        "tensor_bytes": contents.root.nbytes,
        "tensors": contents.root.tensors,
    }
    if checkpoint is not None:
        about["step"], about["sequence"] = checkpoint.step, checkpoint.sequence
    return {**about, "entries": [_entry(node) for _, node in _rows(contents.root, depth)]}


def _entry(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.path, "kind": node.kind, "bytes": node.nbytes}
    if node.kind == "module":
        entry["tensors"] = node.tensors
    if node.kind == "tensor":
        entry |= {"dtype": node.dtype, "shape": list(node.shape), "tied_to": node.tied_to, "note": node.note or None}
    if node.text:
        entry["value"] = node.text
    if node.record is not None:
        crc = node.record.crc32
        entry |= {
            "record": node.record.name,
            "offset": node.record.offset,
            "crc32": None if crc is None else f"{crc:08x}",
        }
    return entry
