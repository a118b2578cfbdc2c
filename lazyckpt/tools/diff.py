"""Compares two files or checkpoints: which tensors and values differ, and by how much."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lazyckpt.conversion.elements import dtype_of, numbers, pieces
from lazyckpt.conversion.inert import InertObject, InertTensor
from lazyckpt.stores.store import AnyPath
from lazyckpt.stores.urls import located
from lazyckpt.tools import Progress
from lazyckpt.tools.contents import documents_in, read
from lazyckpt.tools.tree import Kind, Node, short, shown_shape
from lazyckpt.tools.units import count

ChangeKind = Literal["changed", "only in A", "only in B"]


@dataclass(frozen=True)
class Elements:
    """How the elements of two tensors differ, or those of all differing tensors of a module."""

    compared: int
    differing: int  # elements whose bits differ
    max_abs: float | None  # the largest difference of two elements; None if some are not numbers

    @staticmethod
    def of_all(parts: Iterable[Elements]) -> Elements:
        """Adds up the parts of a tensor or of a module."""
        compared = differing = 0
        max_abs: float | None = 0.0
        for part in parts:
            compared += part.compared
            differing += part.differing
            if max_abs is not None:
                new = part.max_abs
                max_abs = new if new is None or math.isnan(new) else max(max_abs, new)
        return Elements(compared, differing, max_abs)


@dataclass(frozen=True)
class Change:
    """A difference between two documents, or a module with differences in it."""

    name: str
    path: str  # the keys that lead to it, joined by dots
    kind: Kind
    change: ChangeKind | None = None  # None for a module
    text: str = ""  # both sides in words
    elements: Elements | None = None  # None if no elements were compared
    children: tuple[Change, ...] = ()


@dataclass(frozen=True)
class DocumentDifference:
    """The differences between two documents: files, or models in several files."""

    name: str  # that both have in their folders, or that of A
    a: AnyPath
    b: AnyPath
    equal: int  # tensors and values that are the same
    root: Change  # the module of all changes

    @property
    def changes(self) -> list[Change]:
        """The changes of tensors and values."""
        return list(_leaves(self.root))


def _leaves(module: Change) -> Iterator[Change]:
    for child in module.children:
        if child.change is not None:
            yield child
        yield from _leaves(child)


@dataclass(frozen=True)
class Difference:
    """The differences between two paths.

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

    Tensors are the same if their dtype, shape and bits are, even if the ranks held other parts; values, if they are
    saved alike. A run's folder means its newest checkpoint. Two single files are compared even under other names, the
    files of folders by name. Raises LoadError, and CorruptFileError if a checksum does not match.
    """
    found_a, found_b = documents_in(located(a)), documents_in(located(b))
    if len(found_a) == len(found_b) == 1:
        found_b = dict(zip(found_a, found_b.values(), strict=True))
    report = progress or (lambda name, done, total: None)
    return Difference(
        tuple(_Comparison(name, found_a[name], found_b[name], report).result for name in found_a if name in found_b),
        tuple(sorted(found_a.keys() - found_b.keys())),
        tuple(sorted(found_b.keys() - found_a.keys())),
    )


class _Comparison:
    """Compares two documents."""

    def __init__(self, name: str, a: AnyPath, b: AnyPath, progress: Progress) -> None:
        contents_a, contents_b = read(a), read(b)
        root_a, root_b = contents_a.tree(), contents_b.tree()
        self._name, self._total, self._progress = name, root_a.nbytes, progress
        self._equal = self._done = 0
        changes = [*self._compare_children(root_a, root_b)]
        if contents_a.metadata is not None and contents_b.metadata is not None:
            changes += _compare_metadata(contents_a.metadata, contents_b.metadata)
        root = Change(name, "", "module", children=tuple(changes))
        self.result = DocumentDifference(name, a, b, self._equal, root)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._name, self._done, self._total)

    def _compare_children(self, a: Node, b: Node) -> Iterator[Change]:
        ours, theirs = _by_name(a), _by_name(b)
        for key, child in ours.items():
            if key in theirs:
                yield from self._compare(child, theirs[key])
            else:
                yield _change(child, "only in A", _describe(child))
        yield from (_change(child, "only in B", _describe(child)) for key, child in theirs.items() if key not in ours)

    def _compare(self, a: Node, b: Node) -> Iterator[Change]:
        told_a, told_b = _describe(a), _describe(b)
        if a.kind == b.kind == "module" and a.text == b.text:
            if changes := tuple(self._compare_children(a, b)):
                inside = [change.elements for change in changes if change.elements is not None]
                elements = Elements.of_all(inside) if inside else None
                yield Change(a.name, a.path, "module", elements=elements, children=changes)
        elif a.kind == b.kind == "tensor" and told_a == told_b:
            yield from self._compare_tensors(a, b)
        elif a.kind == b.kind == "value" and a.text == b.text and _equal(a.value, b.value):
            self._equal += 1
        else:
            both = f"{told_a} -> {told_b}" if told_a != told_b else f"{told_a}, and it is not the same"
            yield _change(a, "changed", both)

    def _compare_tensors(self, a: Node, b: Node) -> Iterator[Change]:
        told = f"{a.dtype} {shown_shape(a.shape)}"
        if a.tied_to != b.tied_to:
            ties = [f"tied to {n.tied_to}" if n.tied_to else "not tied" for n in (a, b)]
            yield _change(a, "changed", f"{told}, {ties[0]} -> {ties[1]}")
        elif a.tied_to is None and (elements := Elements.of_all(self._compare_elements(a.value, b.value))).differing:
            yield _change(a, "changed", told, elements)
        else:
            self._equal += 1

    def _compare_elements(self, a: InertTensor, b: InertTensor) -> Iterator[Elements]:
        """Compares tensors of one dtype and shape piece by piece. Raises CorruptFileError if a checksum does not
        match."""
        if a.storage is None or b.storage is None:  # meta tensors
            return
        dtype = dtype_of(a)
        for ours, theirs in zip(pieces(a, b), pieces(b, a), strict=True):
            yield _compare_pieces(ours, theirs, dtype)
            self._advance(len(ours))


def _compare_pieces(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None) -> Elements:
    itemsize = 1 if dtype is None else dtype.itemsize
    compared = len(a) // itemsize
    if torch.equal(a, b):
        return Elements(compared, 0, 0.0)
    differ = (a.view(-1, itemsize) != b.view(-1, itemsize)).any(dim=1)
    old, new = numbers(a, dtype), numbers(b, dtype)
    max_abs = None
    if old is not None and new is not None:
        # Subtract only where bits differ: inf - inf is NaN, but no difference.
        apart = new.view(compared, -1)[differ] - old.view(compared, -1)[differ]
        max_abs = float(torch.linalg.vector_norm(apart, dim=1).max())
    return Elements(compared, int(differ.sum()), max_abs)


def _change(node: Node, change: ChangeKind, text: str, elements: Elements | None = None) -> Change:
    kind: Kind = node.kind if node.kind != "module" else "value"  # a row without children
    return Change(node.name, node.path, kind, change, text, elements)


def _compare_metadata(a: dict[str, str], b: dict[str, str]) -> Iterator[Change]:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            told = " -> ".join("nothing" if text is None else short(text) for text in (a.get(key), b.get(key)))
            yield Change(key, f"__metadata__.{key}", "value", "changed", told)


def _by_name(node: Node) -> dict[tuple[str, int], Node]:
    """The children by name and number: both 7 and "7" may be keys."""
    found: dict[tuple[str, int], Node] = {}
    seen: Counter[str] = Counter()
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
