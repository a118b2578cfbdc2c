"""``lazyckpt diff``: what changed between two files or checkpoints, and by how much."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import TreeLine, count, plain, print_json, print_tree, progress, stdout
from lazyckpt.reading.skeleton import Opaque
from lazyckpt.reading.tree import STYLES, Node, drawn_rows, join_single_children, short, shown_shape
from lazyckpt.tools.contents import documents_in, read

if TYPE_CHECKING:
    from lazyckpt.tools.norms import Norms


def diff(
    a: Annotated[Path, path_argument("A", "A file, a checkpoint, or a folder of them: see verify.")],
    b: Annotated[Path, path_argument("B", "What to compare it with.")],
    depth: Annotated[int | None, typer.Option(min=0, help="Show this many levels; their sums count all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two files or checkpoints: which tensors and values differ, and by how much.

    REL L2 is |B - A| / |A| of what differs, MAX ABS the largest difference of two elements. Tensors are the same if
    their dtype, shape and bits are. Of a run's folder its newest checkpoint is meant. Runs no code from the files.

    Exit code: 0 nothing differs, 1 something does, 2 something is damaged or could not be read.
    """
    found_a, found_b = documents_in(a), documents_in(b)
    if len(found_a) == len(found_b) == 1:  # whatever their names
        pairs = [(name, file, next(iter(found_b.values()))) for name, file in found_a.items()]
    else:
        pairs = [(n, found_a[n], found_b[n]) for n in found_a if n in found_b]
    results = [_Comparison(name, *files) for name, *files in pairs]
    lonely = [] if len(found_a) == len(found_b) == 1 else sorted(found_a.keys() ^ found_b.keys())
    same = not lonely and all(not result.root.children for result in results)
    if as_json:
        print_json(
            {
                "same": same,
                "only_in_a": [name for name in lonely if name in found_a],
                "only_in_b": [name for name in lonely if name in found_b],
                "documents": [result.to_json(depth) for result in results],
            }
        )
    else:
        for result in results:
            result.show(depth)
        for name in lonely:
            stdout().print(Text.assemble((plain(name), "bold"), f"  only in {plain(a if name in found_a else b)}"))
    raise typer.Exit(0 if same else 1)


@dataclass
class _Row(Node):
    """What differs at one place; ``change`` is empty for a module that only holds such."""

    change: str = ""
    norms: Norms | None = None
    children: list[_Row] = field(default_factory=list)  # type: ignore[assignment]


class _Comparison:
    """Of two documents. ``root`` has what differs and nothing else."""

    def __init__(self, name: str, a: Path, b: Path) -> None:
        from lazyckpt.tools import norms  # imports torch, which takes seconds

        self._norms = norms
        self.name, self.a, self.b = name, a, b
        self.same = 0
        self.changes: dict[str, int] = defaultdict(int)
        contents_a, contents_b = read(a), read(b)
        root_a, root_b = contents_a.tree(join=False).root, contents_b.tree(join=False).root
        with progress() as bar:
            task = bar.add_task(plain(name), total=root_a.nbytes)
            self._advance: Callable[[int], None] = lambda nbytes: bar.advance(task, nbytes)
            self.root = _Row(name, "", "module", 0)
            self._compare_children(self.root, root_a, root_b)
        if contents_a.metadata is not None and contents_b.metadata is not None:
            self._compare_metadata(contents_a.metadata, contents_b.metadata)
        join_single_children(self.root)

    def _compare_metadata(self, a: dict[str, str], b: dict[str, str]) -> None:
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                told = " -> ".join(short(text) if text is not None else "nothing" for text in (a.get(key), b.get(key)))
                self._note(self.root, Node(key, f"__metadata__.{key}", "value", 1), "changed", told)

    def _compare_children(self, into: _Row, a: Node, b: Node) -> None:
        ours, theirs = _by_name(a), _by_name(b)
        for key, child in ours.items():
            if (other := theirs.get(key)) is None:
                self._note(into, child, "only in A", _describe(child))
            else:
                self._compare(into, child, other)
        for key, child in theirs.items():
            if key not in ours:
                self._note(into, child, "only in B", _describe(child))

    def _compare(self, into: _Row, a: Node, b: Node) -> None:
        if a.kind == b.kind == "module" and a.text == b.text:
            row = _Row(a.name, a.path, "module", a.depth)
            self._compare_children(row, a, b)
            if row.children:
                into.children.append(row)
                norms = [child.norms for child in row.children if child.norms is not None]
                if norms:
                    row.norms = self._norms.Norms()
                    for part in norms:
                        row.norms.add(part)
        elif a.kind == b.kind == "tensor" and _describe(a) == _describe(b):
            self._compare_tensors(into, a, b)
        elif a.kind == b.kind == "value" and a.text == b.text and _equal(a.value, b.value):
            self.same += 1
        else:
            told_a, told_b = _describe(a), _describe(b)
            both = f"{told_a} -> {told_b}" if told_a != told_b else f"{told_a}, and it is not the same"
            self._note(into, a, "changed", both)

    def _compare_tensors(self, into: _Row, a: Node, b: Node) -> None:
        told = f"{a.dtype} {shown_shape(a.shape)}"
        if a.tied_to != b.tied_to:
            ties = [f"tied to {n.tied_to}" if n.tied_to else "not tied" for n in (a, b)]
            self._note(into, a, "changed", f"{told}, {ties[0]} -> {ties[1]}")
        elif a.tied_to is not None:  # compared where it is tied to
            self.same += 1
        elif (norms := self._norms.compare(a.value, b.value, self._advance)).differing:
            self._note(into, a, "changed", told, norms)
        else:
            self.same += 1

    def _note(self, into: _Row, node: Node, change: str, text: str, norms: Norms | None = None) -> None:
        self.changes[change] += 1
        kind = node.kind if node.kind != "module" else "value"  # shown as one row
        into.children.append(_Row(node.name, node.path, kind, node.depth, text=text, change=change, norms=norms))

    def _summary(self) -> str:
        parts = [f"{number:,} {change}" for change, number in self.changes.items()]
        return ", ".join([*parts, f"{self.same:,} the same"])

    def show(self, depth: int | None) -> None:
        console = stdout()
        console.print(
            Text.assemble((f"{plain(self.a)}  {plain(self.b)}", "bold"), "  ", self._summary()), soft_wrap=True
        )
        if not self.root.children:
            return
        lines = [TreeLine(("REL L2", "MAX ABS"), "", "NAME", ("", ""), style="bold")]
        for drawn, row in drawn_rows(self.root, depth):
            assert isinstance(row, _Row)
            about = plain(row.text)
            if row.norms is not None and row.kind == "tensor" and row.norms.comparable:
                about += f", {row.norms.differing:,} of {count(row.norms.elements, 'element')}"
            line = TreeLine(_shown(row.norms), drawn, plain(row.name), (row.change, about), style=STYLES[row.kind])
            lines.append(line)
        print_tree(console, lines)

    def to_json(self, depth: int | None) -> dict[str, Any]:
        rows = (row for _, row in drawn_rows(self.root, depth) if isinstance(row, _Row))
        entries = [_entry(row) for row in rows]
        changes = {change: self.changes[change] for change in ("changed", "only in A", "only in B")}
        return {"name": self.name, "a": str(self.a), "b": str(self.b), "same": self.same, **changes, "entries": entries}


def _shown(norms: Norms | None) -> tuple[str, str]:
    if norms is None:
        return "", ""
    if not norms.comparable:
        return "bits", ""
    return f"{norms.relative:.2e}", f"{norms.max_abs:.2e}"


def _entry(row: _Row) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.path, "kind": row.kind, "change": row.change or None}
    if row.text:
        entry["text"] = row.text
    if (norms := row.norms) is not None:
        finite = norms.comparable and math.isfinite(norms.relative)  # JSON has no word for the others
        entry |= {"elements": norms.elements, "differing": norms.differing}
        entry["relative_l2"] = norms.relative if finite else None
        entry["max_abs"] = norms.max_abs if norms.comparable and math.isfinite(norms.max_abs) else None
    return entry


def _by_name(node: Node) -> dict[tuple[str, int], Node]:
    """The children; the second of a name (7 and "7") is counted."""
    found: dict[tuple[str, int], Node] = {}
    seen: dict[str, int] = defaultdict(int)
    for child in node.children:
        found[child.name, seen[child.name]] = child
        seen[child.name] += 1
    return found


def _describe(node: Node) -> str:
    if node.kind == "tensor":
        return f"{node.dtype} {shown_shape(node.shape)}" + (f", {node.value.kind}" if node.value.kind else "")
    return node.text if node.kind == "value" else f"{node.text} {count(node.tensors, 'tensor')}".strip()


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are saved alike. They hold no tensors; they may hold themselves."""
    todo, met = [(a, b)], set()
    while todo:
        a, b = todo.pop()
        if (id(a), id(b)) in met:
            continue
        parts: list[Sequence[Any]]
        if isinstance(a, Opaque) and isinstance(b, Opaque):
            parts = [(o.global_name, o.args, o.state, o.entries, o.members) for o in (a, b)]
        elif type(a) is not type(b):
            return False
        elif isinstance(a, list | tuple):
            parts = [a, b]
        elif isinstance(a, Mapping):
            parts = [(*a.keys(), *a.values()), (*b.keys(), *b.values())]
        elif isinstance(a, set | frozenset) and a != b:
            parts = [sorted(a, key=short), sorted(b, key=short)]
        else:
            if repr(a) != repr(b):  # not ==: NaN is itself, -0.0 is not 0.0
                return False
            continue
        if len(parts[0]) != len(parts[1]):
            return False
        met.add((id(a), id(b)))
        todo += zip(*parts, strict=True)
    return True
