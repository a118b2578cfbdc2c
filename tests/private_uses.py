"""Finds the private names of other packages in sources of lazyckpt, in Python and in C++.

A name that begins with one underscore is ours if a class of the module, one above it, or one of a module of ours that
it imports has it, or if it is a variable or function of the module. Every other one belongs to another package. Of
``super()``, a name is ours only if a class above has it. Private, too, is every name in a private module or class.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_DOTTED = re.compile(r"\.?(\w+\.)*\w+")


class Use(NamedTuple):
    module: str
    line: int
    name: str
    kind: str
    """``full``: the name is a path from a package. ``attribute`` of some object, or ``text`` (which ``getattr`` may
    get): only the end of a path is known. ``override``: a class with a foreign class above it defines the name."""


def is_private(path: str) -> bool:
    return any(re.match("_[^_]", part) for part in path.split("."))


def uses_in(sources: Mapping[str, str]) -> list[Use]:
    """``sources``: of Python modules, by name."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    nodes = {module: list(ast.walk(tree)) for module, tree in trees.items()}
    classes = {node.name: node for inside in nodes.values() for node in inside if isinstance(node, ast.ClassDef)}
    defined: dict[str, set[str]] = {}
    for module, inside in nodes.items():
        defined[module] = set().union(*(_members(node) for node in inside if isinstance(node, ast.ClassDef)))
    found = []
    for module, tree in trees.items():
        ours = defined[module] | {name for statement in tree.body for name in _bound(statement)}
        for imported in _ours_imported(nodes[module], trees):
            ours |= defined[imported]
        for kind in [node for node in nodes[module] if isinstance(node, ast.ClassDef)]:
            ours |= set().union(*map(_members, _above(kind, classes)))
        visitor = _Visitor(module, ours, classes)
        visitor.visit(tree)
        found += visitor.uses
    return found


def uses_in_native(sources: Mapping[str, str]) -> list[Use]:
    """``sources``: of C++ files, by name. A path begins with ``_C``, of torch."""
    found = []
    for file, text in sources.items():
        for match in re.finditer(r'(\.attr\("\w+"\))+', text):
            path = ".".join(re.findall(r'"(\w+)"', match[0]))
            if path.startswith("_C."):
                found.append(Use(file, text.count("\n", 0, match.start()) + 1, f"torch.{path}", "full"))
        for match in re.finditer(r'"([\w.]+)"(?!_a)', text):
            if (is_private(match[1]) and match[1] != "_C") or match[1].startswith("aoti_torch_"):
                found.append(Use(file, text.count("\n", 0, match.start()) + 1, match[1], "text"))
    return found


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The variables, functions and classes that a statement at the top of a module or a class defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif not isinstance(statement, ast.Import | ast.ImportFrom):
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        yield from (node.id for node in names if isinstance(node.ctx, ast.Store))


def _members(kind: ast.ClassDef) -> set[str]:
    """The attributes that a class defines, also of its instances."""
    found = {name for statement in kind.body for name in _bound(statement)}
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Assign) and "__slots__" in {getattr(target, "id", None) for target in node.targets}:
            found |= {text.value for text in ast.walk(node.value) if isinstance(text, ast.Constant)}
    return found


def _above(kind: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The classes of ours above a class, by their names."""
    found = [kind]
    for below in found:  # which grows
        above = [classes[name] for name in map(_last_word, below.bases) if name in classes]
        found += [one for one in above if one not in found]
    return found[1:]


def _last_word(base: ast.expr) -> str:
    return ast.unparse(base).split("[")[0].split(".")[-1]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _ours_imported(nodes: list[ast.AST], ours: Mapping[str, object]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            paths = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            yield from (path for path in paths if path in ours)


class _Visitor(ast.NodeVisitor):
    def __init__(self, module: str, ours: set[str], classes: Mapping[str, ast.ClassDef]) -> None:
        self.uses: list[Use] = []
        self._module = module
        self._ours = ours
        self._classes = classes
        self._paths: dict[str, str] = {}  # of names that were imported from other packages
        self._inside: list[ast.ClassDef] = []

    def _add(self, node: ast.AST, name: str, kind: str) -> None:
        self.uses.append(Use(self._module, getattr(node, "lineno", 0), name, kind))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not alias.name.startswith("lazyckpt"):
                if is_private(alias.name):
                    self._add(node, alias.name, "full")
                first = alias.name.partition(".")[0]
                self._paths[alias.asname or first] = alias.name if alias.asname else first

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names if not (node.module or "").startswith("lazyckpt") else ():
            path = f"{node.module}.{alias.name}"
            if is_private(path):
                self._add(node, path, "full")
            self._paths[alias.asname or alias.name] = path

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(_last_word(base) not in self._classes for base in node.bases):
            for name in filter(is_private, _members(node)):
                self._add(node, name, "override")
        self._inside.append(node)
        self._visit_without_docstring(node)
        self._inside.pop()

    def _visit_without_docstring(self, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> None:
        """Skips all texts that are statements: they are docstrings."""
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                self.visit(child)

    visit_Module = visit_FunctionDef = visit_AsyncFunctionDef = _visit_without_docstring

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            path.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self._paths:
            full = ".".join([self._paths[inner.id], *reversed(path)]).removesuffix(".__name__")
            if is_private(full):
                self._add(node, full, "full")
            return
        at: ast.expr = node
        while isinstance(at, ast.Attribute):
            if is_private(at.attr) and not self._is_ours(at):
                self._add(at, at.attr, "attribute")
            at = at.value
        self.visit(at)

    def _is_ours(self, node: ast.Attribute) -> bool:
        if not _is_super(node.value):
            return node.attr in self._ours
        return any(node.attr in _members(kind) for kind in _above(self._inside[-1], self._classes))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            text = node.value.removeprefix(".")
            if is_private(text) and text not in self._ours:
                self._add(node, text, "text")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # an annotation is not evaluated
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in (*node.defaults, *filter(None, node.kw_defaults)):
            self.visit(default)
