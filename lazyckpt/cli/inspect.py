"""``lazyckpt inspect``: prints the contents of a file, by module."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lazyckpt.cli.output import STYLES, TreeLine, age, print_json, print_tree, progress, say
from lazyckpt.cli.parameters import AsJson, Depth, flag, path_argument, placed
from lazyckpt.storage.manifest import NO_STEP
from lazyckpt.tools import inspect as tool
from lazyckpt.tools.inspect import Inspection
from lazyckpt.tools.tree import Node, rows, short, shown_shape
from lazyckpt.tools.units import count, plain, size


def inspect(
    path: Annotated[
        Path, path_argument("FILE|DIR", "A file, a checkpoint, or a run's folder: its newest checkpoint. Also a URL.")
    ],
    depth: Depth = None,
    filter: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Show only names with this in them, or matching *.weight.")
    ] = None,
    stats: Annotated[
        bool, flag("--stats", help="Read the tensors: min, max, mean, NaN and infinite elements.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the tensors in a file: shape, dtype, bytes, and the sum of every module.

    Runs no code from the file, and reads no tensor without --stats. Counts a storage once, however many tensors share
    it.
    """
    with progress() as report:
        found = tool.inspect(placed(path), filter=filter, stats=stats, progress=report)
    if as_json:
        print_json(_to_json(found, depth))
        return
    root = found.root
    facts = [found.format, size(found.bytes), count(root.tensors, "tensor")]
    if (c := found.checkpoint) is not None:
        facts += [f"step {c.step}"] if c.step != NO_STEP else []
        facts += [f"sequence {c.sequence}", f"saved {age(c.created)} ago"]
        facts += [f"by {c.world_size} ranks"] * (c.world_size > 1)
    if (tag := found.tag) is not None:
        facts += [f"step {tag.step}"] * (tag.step is not None)
        facts += [f"by {tag.world_size} ranks"] * (tag.world_size is not None and tag.world_size > 1)
    say((plain(found.path), "bold"), "  ", ", ".join(facts))
    if tag is not None and tag.wrong_names:
        say((plain(f"incomplete: {', '.join(tag.wrong_names)}"), "yellow"))
    for key, text in (found.metadata or {}).items():
        say((plain(f"{key}: {short(text)}"), "dim"))
    heads = ("DTYPE", "SHAPE", *("MIN", "MAX", "MEAN", "NAN", "INF") * stats)
    lines = [TreeLine(("SIZE",), 0, "NAME", heads, style="bold")]
    lines.append(TreeLine((size(root.nbytes),), 0, plain(root.name), ("",) * len(heads), style="bold"))
    lines += (_line(level, label, node, stats) for level, label, node in rows(root, depth))
    print_tree(lines)


def _line(level: int, label: str, node: Node, stats: bool) -> TreeLine:
    weight = size(node.nbytes) if (node.nbytes or node.tensors) and not node.tied_to else ""
    about = shown_shape(node.shape) if node.kind == "tensor" else plain(node.text)
    if node.kind == "module" and node.tensors:
        about += (", " if about else "") + count(node.tensors, "tensor")
    behind = [plain(node.dtype), about]
    if stats:
        told = node.stats
        behind += ["-" if v is None else f"{v:.4g}" for v in (told.min, told.max, told.mean)] if told else [""] * 3
        behind += [str(told.nan), str(told.inf)] if told else [""] * 2
    return TreeLine((weight,), level, plain(label), tuple(behind), plain(node.note), STYLES[node.kind])


def _to_json(found: Inspection, depth: int | None) -> dict[str, Any]:
    about: dict[str, Any] = {"path": found.path, "format": found.format, "bytes": found.bytes}
    about |= {"tensor_bytes": found.root.nbytes, "tensors": found.root.tensors}
    if found.checkpoint is not None:
        step = found.checkpoint.step if found.checkpoint.step != NO_STEP else None
        about |= {"step": step, "sequence": found.checkpoint.sequence}
        about |= {"world_size": found.checkpoint.world_size}
    if (tag := found.tag) is not None:
        about |= {"step": tag.step, "world_size": tag.world_size, "files": tag.files}
        about |= {"missing": tag.missing, "stale": tag.stale}
    return {**about, "entries": [_entry(node) for _, _, node in rows(found.root, depth)]}


def _entry(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.path, "kind": node.kind, "bytes": node.nbytes}
    if node.kind == "module":
        entry["tensors"] = node.tensors
    if node.kind == "tensor":
        entry |= {"dtype": node.dtype, "shape": node.shape, "tied_to": node.tied_to, "note": node.note or None}
    if node.stats is not None:
        entry["stats"] = asdict(node.stats)
    if node.text:
        entry["value"] = node.text
    if node.storage is not None and (shards := node.storage.shards) is not None:
        entry["parts"] = [
            {"file": part.file.name, "item": part.place, "offsets": part.offsets, "shape": part.shape}
            for part in shards.parts
        ]
    elif node.storage is not None:
        file, record = node.storage.file, node.storage.record
        crc32 = None if record.crc32 is None else f"{record.crc32:08x}"
        entry |= {"file": file.name, "record": record.name, "offset": record.offset, "crc32": crc32}
    return entry
