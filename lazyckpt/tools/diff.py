"""Compares two files or checkpoints: which tensors and values differ, and by how much."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lazyckpt.reading.inert import InertObject
from lazyckpt.reading.tree import Kind, Node, rows, short, shown_shape
from lazyckpt.tools import Progress
from lazyckpt.tools.contents import documents_in, read
from lazyckpt.tools.norms import Norms, compare
from lazyckpt.tools.units import count

ChangeKind = Literal["changed", "only in A", "only in B"]


@dataclass(frozen=True)
class Change:
    """One difference between two documents, or a module with differences below it.

    Attributes:
        name: The path to it: keys joined by dots.
        label: The part of ``name`` that its parent does not have.
        level: 1 for what has no parent, 2 for what is in those, and so on.
        kind: "module", "tensor" or "value".
        change: What happened; None for a module.
        text: Both sides in words.
        elements: Elements compared; None, like the next three, if none were.
        differing: Elements whose bits differ.
        relative_l2: |B - A| / |A| of the tensors that differ; None if their elements are not comparable as numbers.
        max_abs: The largest difference of two elements; None like ``relative_l2``.
    """

    name: str
    label: str
    level: int
    kind: Kind
    change: ChangeKind | None
    text: str
    elements: int | None
    differing: int | None
    relative_l2: float | None
    max_abs: float | None


@dataclass(frozen=True)
class DocumentDifference:
    """What differs between two documents: files, or models in several files.

    Attributes:
        name: The name that both have in their folders, or that of A.
        a: The one.
        b: The other.
        equal: Tensors and values that are the same.
        changes: What differs, with the modules that it is in, parents first.
    """

    name: str
    a: Path
    b: Path
    equal: int
    changes: tuple[Change, ...]

    def number(self, change: ChangeKind) -> int:
        """Returns how many changes are of this kind."""
        return sum(row.change == change for row in self.changes)


@dataclass(frozen=True)
class Difference:
    """What differs between two paths.

    Attributes:
        documents: The documents that both have, compared.
        only_in_a: Names of those that only A has.
        only_in_b: Names of those that only B has.
    """

    documents: tuple[DocumentDifference, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_in_a or self.only_in_b or any(document.changes for document in self.documents))


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], *, progress: Progress | None = None) -> Difference:
    """Compares two files, checkpoints or folders, a few megabytes at a time; runs no code from them.

    Tensors are the same if their dtype, shape and bits are; values, if they are saved alike. A run's folder means its
    newest checkpoint. Two single files are compared whatever their names, the files of folders by name. Raises
    LoadError, and CorruptFileError if a checksum does not match.
    """
    found_a, found_b = documents_in(Path(a)), documents_in(Path(b))
    if len(found_a) == len(found_b) == 1:
        found_b = dict(zip(found_a, found_b.values(), strict=True))
    report = progress or (lambda name, done, total: None)
    return Difference(
        tuple(_Comparison(name, found_a[name], found_b[name], report).result() for name in found_a if name in found_b),
        tuple(sorted(found_a.keys() - found_b.keys())),
        tuple(sorted(found_b.keys() - found_a.keys())),
    )


@dataclass
class _Row(Node):
    """What differs at one place; ``change`` is None for a module above differences."""

    change: ChangeKind | None = None
    norms: Norms | None = None
    children: list[_Row] = field(default_factory=list)  # type: ignore[assignment]


class _Comparison:
    """Compares two documents. ``root`` holds what differs and nothing else."""

    def __init__(self, name: str, a: Path, b: Path, progress: Progress) -> None:
        self.name, self.a, self.b = name, a, b
        self.equal = self._done = 0
        contents_a, contents_b = read(a), read(b)
        root_a, root_b = contents_a.tree(), contents_b.tree()
        self._total, self._progress = root_a.nbytes, progress
        self.root = _Row(name, "", "module", 0)
        self._compare_children(self.root, root_a, root_b)
        if contents_a.metadata is not None and contents_b.metadata is not None:
            self._compare_metadata(contents_a.metadata, contents_b.metadata)

    def result(self) -> DocumentDifference:
        changes = tuple(_change(level, label, row) for level, label, row in rows(self.root))
        return DocumentDifference(self.name, self.a, self.b, self.equal, changes)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self.name, self._done, self._total)

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
                if norms := [child.norms for child in row.children if child.norms is not None]:
                    row.norms = Norms.sum(norms)
        elif a.kind == b.kind == "tensor" and _describe(a) == _describe(b):
            self._compare_tensors(into, a, b)
        elif a.kind == b.kind == "value" and a.text == b.text and _equal(a.value, b.value):
            self.equal += 1
        else:
            told_a, told_b = _describe(a), _describe(b)
            both = f"{told_a} -> {told_b}" if told_a != told_b else f"{told_a}, and it is not the same"
            self._note(into, a, "changed", both)

    def _compare_tensors(self, into: _Row, a: Node, b: Node) -> None:
        told = f"{a.dtype} {shown_shape(a.shape)}"
        if a.tied_to != b.tied_to:
            ties = [f"tied to {n.tied_to}" if n.tied_to else "not tied" for n in (a, b)]
            self._note(into, a, "changed", f"{told}, {ties[0]} -> {ties[1]}")
        elif a.tied_to is None and (norms := compare(a.value, b.value, self._advance)).differing:
            self._note(into, a, "changed", told, norms)
        else:
            self.equal += 1

    def _note(self, into: _Row, node: Node, change: ChangeKind, text: str, norms: Norms | None = None) -> None:
        kind: Kind = node.kind if node.kind != "module" else "value"  # a row without children
        into.children.append(_Row(node.name, node.path, kind, node.depth, text=text, change=change, norms=norms))


def _change(level: int, label: str, row: _Row) -> Change:
    norms = row.norms
    return Change(
        name=row.path,
        label=label,
        level=level,
        kind=row.kind,
        change=row.change,
        text=row.text,
        elements=None if norms is None else norms.elements,
        differing=None if norms is None else norms.differing,
        relative_l2=None if norms is None else norms.relative_l2,
        max_abs=None if norms is None else norms.largest,
    )


def _by_name(node: Node) -> dict[tuple[str, int], Node]:
    """The children by name and number: both 7 and "7" may be keys."""
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
    """Whether two values are saved alike. They hold no tensors, but may hold themselves."""
    todo, met = [(a, b)], set()
    while todo:
        a, b = todo.pop()
        if (id(a), id(b)) in met:
            continue
        parts: list[Sequence[Any]]
        if isinstance(a, InertObject) and isinstance(b, InertObject):
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
