"""``lazyckpt diff``: prints what changed between two files or checkpoints, and by how much."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lazyckpt.cli.output import STYLES, TreeLine, print_json, print_tree, progress, say
from lazyckpt.cli.parameters import AsJson, Depth, path_argument, placed
from lazyckpt.tools.tree import rows
from lazyckpt.tools.units import count, plain

if TYPE_CHECKING:
    from lazyckpt.tools.diff import Change, DocumentDifference


def diff(
    a: Annotated[Path, path_argument("A", "A file, a checkpoint, or a folder of them, as for verify. Also a URL.")],
    b: Annotated[Path, path_argument("B", "What to compare it with.")],
    depth: Depth = None,
    as_json: AsJson = False,
) -> None:
    """Compare two files or checkpoints: which tensors and values differ, and by how much.

    MAX ABS is the largest difference of two elements. Tensors are the same if their dtype, shape and bits are. A run's
    folder means its newest checkpoint. Runs no code from the files.

    Exit code: 0 if nothing differs, 1 if something does, 2 if something is damaged or could not be read.
    """
    from lazyckpt.tools import diff as tool  # imports torch, which takes seconds

    with progress() as report:
        found = tool.diff(placed(a), placed(b), progress=report)
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
    numbers = Counter(str(change.change) for change in document.changes)
    summary = ", ".join([*(f"{n:,} {change}" for change, n in numbers.items()), f"{document.equal:,} the same"])
    say((f"{plain(document.a)}  {plain(document.b)}", "bold"), "  ", summary)
    lines = [TreeLine(("MAX ABS",), 0, "NAME", ("", ""), style="bold")]
    for level, label, row in rows(document.root, depth):
        about, shown = plain(row.text), ""
        if (elements := row.elements) is not None:
            shown = "bits" if elements.max_abs is None else f"{elements.max_abs:.2e}"
            if row.kind == "tensor" and elements.max_abs is not None:
                about += f", {elements.differing:,} of {count(elements.compared, 'element')}"
        lines.append(TreeLine((shown,), level, plain(label), (row.change or "", about), style=STYLES[row.kind]))
    if document.changes:
        print_tree(lines)


def _to_json(document: DocumentDifference, depth: int | None) -> dict[str, Any]:
    about: dict[str, Any] = {"name": document.name, "a": document.a, "b": document.b, "same": document.equal}
    numbers = Counter(change.change for change in document.changes)
    about |= {change: numbers[change] for change in ("changed", "only in A", "only in B")}
    return about | {"entries": [_entry(row) for _, _, row in rows(document.root, depth)]}


def _entry(row: Change) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.path, "kind": row.kind, "change": row.change}
    if row.text:
        entry["text"] = row.text
    if (elements := row.elements) is not None:
        most = elements.max_abs
        entry |= {"elements": elements.compared, "differing": elements.differing}
        entry["max_abs"] = most if most is not None and math.isfinite(most) else None  # JSON has no NaN
    return entry
