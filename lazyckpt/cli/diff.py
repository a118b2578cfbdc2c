"""``lazyckpt diff``: prints what changed between two files or checkpoints, and by how much."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lazyckpt.cli.output import STYLES, TreeLine, plain, print_json, print_tree, progress, say
from lazyckpt.cli.parameters import AsJson, Depth, path_argument
from lazyckpt.tools.units import count

if TYPE_CHECKING:
    from lazyckpt.tools.diff import Change, ChangeKind, DocumentDifference

_CHANGES: tuple[ChangeKind, ...] = ("changed", "only in A", "only in B")


def diff(
    a: Annotated[Path, path_argument("A", "A file, a checkpoint, or a folder of them, as for verify.")],
    b: Annotated[Path, path_argument("B", "What to compare it with.")],
    depth: Depth = None,
    as_json: AsJson = False,
) -> None:
    """Compare two files or checkpoints: which tensors and values differ, and by how much.

    REL L2 is |B - A| / |A| over what differs, MAX ABS the largest difference of two elements. Tensors are the same if
    their dtype, shape and bits are. A run's folder means its newest checkpoint. Runs no code from the files.

    Exit code: 0 if nothing differs, 1 if something does, 2 if something is damaged or could not be read.
    """
    from lazyckpt.tools import diff as tool  # imports torch, which takes seconds

    with progress() as report:
        found = tool.diff(a, b, progress=report)
    if as_json:
        documents = [_to_json(document, depth) for document in found.documents]
        lonely = {"only_in_a": found.only_in_a, "only_in_b": found.only_in_b}
        print_json({"same": found.same, **lonely, "documents": documents})
    else:
        for document in found.documents:
            _print(document, depth)
        for path, names in ((a, found.only_in_a), (b, found.only_in_b)):
            for name in names:
                say((plain(name), "bold"), f"  only in {plain(path)}")
    raise typer.Exit(0 if found.same else 1)


def _print(document: DocumentDifference, depth: int | None) -> None:
    parts = [f"{number:,} {change}" for change in _CHANGES if (number := document.number(change))]
    summary = ", ".join([*parts, f"{document.equal:,} the same"])
    say((f"{plain(document.a)}  {plain(document.b)}", "bold"), "  ", summary)
    if not document.changes:
        return
    lines = [TreeLine(("REL L2", "MAX ABS"), 0, "NAME", ("", ""), style="bold")]
    for row in _down_to(depth, document):
        about = plain(row.text)
        if row.elements is not None and row.max_abs is not None and row.kind == "tensor":
            about += f", {row.differing:,} of {count(row.elements, 'element')}"
        style = STYLES[row.kind]
        lines.append(TreeLine(_norms(row), row.level, plain(row.label), (row.change or "", about), style=style))
    print_tree(lines)


def _down_to(depth: int | None, document: DocumentDifference) -> list[Change]:
    return [row for row in document.changes if depth is None or row.level <= depth]


def _norms(row: Change) -> tuple[str, str]:
    if row.relative_l2 is None or row.max_abs is None:
        return "" if row.elements is None else "bits", ""
    return f"{row.relative_l2:.2e}", f"{row.max_abs:.2e}"


def _to_json(document: DocumentDifference, depth: int | None) -> dict[str, Any]:
    about = {"name": document.name, "a": document.a, "b": document.b, "same": document.equal}
    numbers: dict[str, Any] = {change: document.number(change) for change in _CHANGES}
    return {**about, **numbers, "entries": list(map(_entry, _down_to(depth, document)))}


def _entry(row: Change) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.name, "kind": row.kind, "change": row.change}
    if row.text:
        entry["text"] = row.text
    if row.elements is not None:
        entry |= {"elements": row.elements, "differing": row.differing}
        entry |= {"relative_l2": _finite(row.relative_l2), "max_abs": _finite(row.max_abs)}
    return entry


def _finite(number: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if number is not None and math.isfinite(number) else None
