"""Finds the code that a mutant names, wherever its file lies, and changes it.

A Python anchor is the end of the dotted name of a function, a class or a module, such as ``Gate.watch``, ``Snapshot``
or ``in_place``, or a folder, such as ``pipeline``. A C++ anchor is ``Function`` or ``Class::Function``. Exactly one
place of that name must contain the code to replace.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
_FOLDERS = ("lazyckpt", "integrations")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A comment, a string, a name or number, or one other character.
_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|\w+|::|\S', re.DOTALL)


class NoAnchor(Exception):
    """A mutant's function, or the code to replace in it, is not there."""


class Change(NamedTuple):
    """What to look for in a Python function, in words, and a call that edits its tree and counts what it replaced."""

    what: str
    edit: Callable[[ast.AST], int]


class Python:
    """A change of one Python function, class or module."""

    is_native = False

    def __init__(self, anchor: str, change: Change) -> None:
        self.anchor, self._change = anchor, change

    def apply(self) -> tuple[Path, str]:
        """Returns the file, relative to the repository, and its text with the change."""
        found = [(path, text, name) for path, text in _python_files() for name in _names(path, text)]
        named = [(path, text, name) for path, text, name in found if self._is_named(path, name)]
        changed = set()  # a module and its function of the same name are one place
        for path, text, name in named:
            tree = ast.parse(text)
            if self._change.edit(dict(_places(tree, _module(path)))[name]) > 0:
                changed.add((path, ast.unparse(ast.fix_missing_locations(tree))))
        if len(changed) != 1:
            what = f"{len(changed)} of {len(named)} places named {self.anchor} contain {self._change.what}, not 1"
            raise NoAnchor(what)
        return changed.pop()

    def _is_named(self, path: Path, name: str) -> bool:
        in_folder = name == _module(path) and f".{self.anchor}." in f".{name}"
        return in_folder or f".{name}".endswith(f".{self.anchor}")


class Native:
    """A change of one C++ function: `old`, whatever its whitespace and comments, becomes `new`."""

    is_native = True

    def __init__(self, anchor: str, old: str, new: str) -> None:
        self.anchor, self._old, self._new = anchor, old, new

    def apply(self) -> tuple[Path, str]:
        """Returns the file, relative to the repository, and its text with the change."""
        old = [token[0] for token in _tokens(self._old)]
        found = []
        for path, text in _native_files():
            for tokens in _bodies(text, self.anchor):
                words = [token[0] for token in tokens]
                at = [i for i in range(len(words)) if words[i : i + len(old)] == old]
                found += [(path, text, tokens[i].start(), tokens[i + len(old) - 1].end()) for i in at]
        if len(found) != 1:
            raise NoAnchor(f"C++ functions named {self.anchor} contain {self._old!r} {len(found)} times, not once")
        ((path, text, begin, end),) = found
        return path, text[:begin] + self._new + text[end:]


# Changes of a Python function


def swap(old: str, new: str = "None") -> Change:
    """Replaces each expression like `old`, in which ``_`` stands for any expression and ``...`` for any arguments."""
    pattern = ast.parse(old, mode="eval").body

    def change(function: ast.AST) -> int:
        swapper = _Swapper(pattern, new)
        swapper.visit(function)
        return swapper.swapped

    return Change(old, change)


def never_raises(error: str) -> Change:
    """Makes each condition false that decides to raise `error`."""

    def change(function: ast.AST) -> int:
        guards = [n for n in ast.walk(function) if isinstance(n, ast.If) and any(_raises(s, error) for s in n.body)]
        for guard in guards:
            guard.test = ast.Constant(False)
        return len(guards)

    return Change(f"a condition that raises {error}", change)


def body(new: str) -> Change:
    """Replaces the whole body."""

    def change(function: ast.AST) -> int:
        assert isinstance(function, _FUNCTIONS)
        function.body = ast.parse(new).body
        return 1

    return Change("a body", change)


class _Swapper(ast.NodeTransformer):
    def __init__(self, pattern: ast.expr, new: str) -> None:
        self._pattern, self._new = pattern, new
        self.swapped = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if _like(self._pattern, node) and not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            self.swapped += 1
            return ast.parse(self._new, mode="eval").body
        return self.generic_visit(node)


def _like(pattern: Any, node: Any) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id == "_":
        return isinstance(node, ast.expr)
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(map(_like, pattern, node))
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        called = node.func
        if isinstance(pattern.func, ast.Name) and isinstance(called, ast.Attribute):  # `f(...)` is also `module.f(...)`
            called = ast.Name(called.attr)
        arguments = (pattern.args, pattern.keywords), (node.args, node.keywords)
        return _like(pattern.func, called) and (_is_any(pattern.args) or all(map(_like, *arguments)))
    fields = [field for field in pattern._fields if field not in ("ctx", "kind")]
    return type(pattern) is type(node) and all(_like(getattr(pattern, f), getattr(node, f)) for f in fields)


def _is_any(arguments: list[ast.expr]) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], ast.Constant) and arguments[0].value is ...


def _raises(statement: ast.stmt, error: str) -> bool:
    if not isinstance(statement, ast.Raise) or statement.exc is None:
        return False
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return ast.unparse(raised).rpartition(".")[2] == error


# Python code by name


@cache
def _python_files() -> list[tuple[Path, str]]:
    return [(p.relative_to(ROOT), p.read_text()) for f in _FOLDERS for p in sorted((ROOT / f).rglob("*.py"))]


@cache
def _names(path: Path, text: str) -> list[str]:
    return [name for name, _ in _places(ast.parse(text), _module(path))]


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def _places(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Everything inside `node` that an anchor may name, and `node` itself."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)):
        yield name, node
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (*_FUNCTIONS, ast.ClassDef))
        yield from _places(child, f"{name}.{child.name}" if named else name)


# C++ functions by name


@cache
def _native_files() -> list[tuple[Path, str]]:
    return [(p.relative_to(ROOT), p.read_text()) for p in sorted((ROOT / "csrc").rglob("*.cc"))]


def _tokens(text: str) -> list[re.Match[str]]:
    return [token for token in _TOKEN.finditer(text) if not token[0].startswith(("//", "/*"))]


def _bodies(text: str, anchor: str) -> Iterator[list[re.Match[str]]]:
    """The tokens of each definition of `anchor`, which is ``Function`` or ``Class::Function``."""
    wanted = anchor.split("::")
    if wanted[-1] not in text:
        return
    tokens = _tokens(text)
    words = [token[0] for token in tokens]
    classes: list[tuple[str, int]] = []  # around a token: the name, and where the class ends
    for i, word in enumerate(words):
        classes = [(name, end) for name, end in classes if i < end]
        if word in ("class", "struct"):
            brace = next(k for k in range(i, len(words)) if words[k] in "{;),>")
            if words[brace] == "{":
                name = words[i + 3] if words[i + 2] == "::" else words[i + 1]
                classes.append((name, _closing(words, brace)))
        if word != wanted[-1] or words[i + 1] != "(":
            continue
        scopes = [name for name, _ in classes] + ([words[i - 2]] if words[i - 1] == "::" else [])
        at = _closing(words, i + 1) + 1
        while words[at] in ("const", "noexcept", "override"):
            at += 1
        if words[at] == "{" and (len(wanted) == 1 or scopes[-1:] == wanted[:-1]):
            yield tokens[at : _closing(words, at) + 1]


def _closing(words: list[str], at: int) -> int:
    """Where the bracket that opens at `at` is closed."""
    depth = 0
    while True:
        depth += (words[at] in "({[") - (words[at] in ")}]")
        if depth == 0:
            return at
        at += 1
