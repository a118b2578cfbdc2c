"""``lazyckpt inspect``: prints what is in a file, by module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from lazyckpt.cli.output import STYLES, TreeLine, age, plain, print_json, print_tree, say
from lazyckpt.cli.parameters import AsJson, Depth, path_argument
from lazyckpt.reading.tree import short, shown_shape
from lazyckpt.tools import inspect as tool
from lazyckpt.tools.inspect import Entry, Inspection
from lazyckpt.tools.units import count, size


def inspect(
    path: Annotated[Path, path_argument("FILE|DIR", "A file, a checkpoint, or a run's folder: its newest checkpoint.")],
    depth: Depth = None,
    as_json: AsJson = False,
) -> None:
    """Show the tensors in a file: shape, dtype, bytes, and the sum of every module.

    Reads no tensor and runs no code from the file. Counts a storage once, however many tensors share it.
    """
    found = tool.inspect(path)
    entries = [entry for entry in found.entries if depth is None or entry.level <= depth]
    if as_json:
        print_json(_to_json(found, entries))
        return
    facts = [found.format, size(found.bytes), count(found.tensor_count, "tensor")]
    if (c := found.checkpoint) is not None:
        facts += [f"step {c.step}", f"sequence {c.sequence}", f"saved {age(c.created)} ago"]
    say((plain(found.path), "bold"), "  ", ", ".join(facts))
    for key, text in (found.metadata or {}).items():
        say((plain(f"{key}: {short(text)}"), "dim"))
    top = TreeLine((size(found.tensor_bytes),), 0, plain(found.path.name), ("", ""), style="bold")
    header = TreeLine(("SIZE",), 0, "NAME", ("DTYPE", "SHAPE"), style="bold")
    print_tree([header, top, *map(_line, entries)])


def _line(entry: Entry) -> TreeLine:
    weight = size(entry.bytes) if (entry.bytes or entry.tensor_count) and not entry.tied_to else ""
    about = shown_shape(entry.shape) if entry.kind == "tensor" else plain(entry.text)
    if entry.kind == "module" and entry.tensor_count:
        about += (", " if about else "") + count(entry.tensor_count, "tensor")
    behind = (plain(entry.dtype), about)
    return TreeLine((weight,), entry.level, plain(entry.label), behind, plain(entry.note), STYLES[entry.kind])


def _to_json(found: Inspection, entries: list[Entry]) -> dict[str, Any]:
    about: dict[str, Any] = {
        "path": found.path,
        "format": found.format,
        "bytes": found.bytes,
        "tensor_bytes": found.tensor_bytes,
        "tensors": found.tensor_count,
    }
    if found.checkpoint is not None:
        about |= {"step": found.checkpoint.step, "sequence": found.checkpoint.sequence}
    return {**about, "entries": list(map(_entry, entries))}


def _entry(entry: Entry) -> dict[str, Any]:
    told: dict[str, Any] = {"name": entry.name, "kind": entry.kind, "bytes": entry.bytes}
    if entry.kind == "module":
        told["tensors"] = entry.tensor_count
    if entry.kind == "tensor":
        told |= {"dtype": entry.dtype, "shape": entry.shape, "tied_to": entry.tied_to, "note": entry.note or None}
    if entry.text:
        told["value"] = entry.text
    if entry.file is not None and (record := entry.record) is not None:
        crc32 = None if record.crc32 is None else f"{record.crc32:08x}"
        told |= {"file": entry.file.name, "record": record.name, "offset": record.offset, "crc32": crc32}
    return told
