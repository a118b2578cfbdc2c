"""Proves from the code of an optimizer's ``step`` that it runs its closure before anything could write to parameters.

The proof reads the syntax tree of the function that is about to run, and accepts only statements that surely write
nothing before the closure:

    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()

or ``super().step(closure)``, in front of which torch calls the gate again. An error before it may depend on a flag, as
in schedule-free's ``if not self.param_groups[0]["train_mode"]: raise …``. Everything else is unproven.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from lazyckpt.gate.proof import PURE_METHODS, Proof
from lazyckpt.gate.step_layers import GRAD_MODES, HOOKED, cell, without_hooks, without_layers


class Unproven(Exception):
    """The code before the closure is not known to be harmless."""


def prove(function: FunctionType, kind: type[Any], *, by_name: bool) -> tuple[Proof, bool]:
    """Tries to prove it for the ``step`` of a class, called with the closure as its second argument or ``by_name``.
    Returns the facts that the result rests on, and whether it is proven."""
    proof = Proof()
    with contextlib.suppress(Exception):  # Unproven, or an error on code that this module does not know
        _Walk(proof, function, kind).step(by_name)
        return proof, True
    return proof, False


_CLOSURE = object()  # as a value of a name: the closure, which is callable
_SELF = object()
_OTHER = object()
_POSITIONAL = object()  # *args
_BY_NAME = object()  # **kwargs


class _Walk:
    """Walks a function in the order in which Python runs it, up to the call of the closure."""

    def __init__(self, proof: Proof, function: FunctionType, kind: type[Any]) -> None:
        self._proof = proof
        self._function = function
        self._kind = kind
        self._by_name = False
        self._first = ""  # the parameter that super() takes for self
        self._names: dict[str, Any] = {}

    def step(self, by_name: bool) -> None:
        """Raises Unproven unless everything runs the closure, or nothing, before it could write."""
        self._by_name = by_name
        if self._proof.of_class(self._kind, "__getattribute__") is not object.__getattribute__:
            raise Unproven  # reading an attribute may run code
        node = _tree_of(self._function.__code__)
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        self._names = {a.arg: _OTHER for a in (*positional, *arguments.kwonlyargs)}
        rest = (arguments.vararg, _POSITIONAL), (arguments.kwarg, _BY_NAME)
        self._names.update((a.arg, kind) for a, kind in rest if a is not None)
        if not positional:
            raise Unproven
        self._first = positional[0].arg
        self._names[self._first] = _SELF
        if by_name:
            named = [a.arg for a in (*arguments.args, *arguments.kwonlyargs) if a.arg == "closure"]
        else:
            named = [a.arg for a in positional[1:2]]
        self._names.update((name, _CLOSURE) for name in named)
        if not self._block(node.body):
            return  # it ends without a call that could write

    def _block(self, statements: list[ast.stmt]) -> bool:
        """Returns True if every path through the block has called the closure or ended the function; False if no path
        has."""
        return any(self._statement(statement) for statement in statements)

    def _statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Pass():
                return False
            case ast.Expr(value=value):
                return self._evaluate(value)[0]
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                called, self._names[name] = self._evaluate(value)
                return called
            case ast.If(test=test, body=body, orelse=orelse):
                return self._if(test, body, orelse)
            case ast.With(items=items, body=body):
                return any(self._context(item) for item in items) or self._block(body)
            case ast.Return(value=None):
                return True
            case ast.Return(value=ast.expr() as value):
                self._evaluate(value)
                return True
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[ast.Constant()], keywords=[])):
                error = self._proof.resolve(self._function.__globals__, name)
                if isinstance(error, type) and error.__module__ == "builtins" and issubclass(error, BaseException):
                    return True
        raise Unproven

    def _if(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> bool:
        truth = self._truth(test)
        if truth is not None:
            return self._block(body if truth else orelse)
        before = dict(self._names)
        ways = []
        for branch in (body, orelse):
            self._names = dict(before)
            ways.append(self._block(branch))
        self._names = before
        if isinstance(body[-1], ast.Raise) and not orelse:
            return False  # only the path around it continues
        if ways[0] != ways[1] or any(
            isinstance(n, ast.Assign | ast.AnnAssign) for s in (*body, *orelse) for n in ast.walk(s)
        ):
            raise Unproven
        return ways[0]

    def _context(self, item: ast.withitem) -> bool:
        if item.optional_vars is None and self._is_grad_mode(item.context_expr):
            return False
        raise Unproven

    def _is_grad_mode(self, node: ast.expr) -> bool:
        """Whether the expression makes one of torch's contexts for gradients."""
        match node:
            case ast.Call(func=function, args=arguments, keywords=[]):
                plain = all(isinstance(a, ast.Constant) for a in arguments)
                return plain and any(self._constant(function) is mode for mode in GRAD_MODES)
        return False

    def _constant(self, node: ast.expr) -> Any:
        """A global, or an attribute of a module. Raises Unproven for anything else."""
        match node:
            case ast.Name(id=name) if name not in self._names and name not in self._function.__code__.co_freevars:
                return self._proof.resolve(self._function.__globals__, name)
            case ast.Attribute(value=value, attr=name):
                module = self._constant(value)
                if type(module) is ModuleType and name in vars(module):
                    return self._proof.resolve(vars(module), name)
        raise Unproven

    def _truth(self, node: ast.expr) -> bool | None:
        """Whether a condition that writes nothing holds; None if that depends."""
        match node:
            case ast.Name(id=name) if self._names.get(name) is _CLOSURE:
                return True
            case ast.Constant(value=value):
                return bool(value)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                truth = self._truth(operand)
                return None if truth is None else not truth
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                called, value = self._evaluate(left)
                if called:
                    raise Unproven
                return isinstance(op, ast.IsNot) if value is _CLOSURE else None
            case ast.Subscript(
                value=ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id=owner), attr="param_groups"), slice=ast.Constant(value=0)
                ),
                slice=ast.Constant(value=str() as key),
            ) if self._names.get(owner) is _SELF:
                self._proof.flag(key)
                return None
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
                return self._truth_of_call(self._constant(ast.Name(id=name)), argument)
        raise Unproven

    def _truth_of_call(self, function: Any, argument: ast.expr) -> bool | None:
        """The truth of callable(closure), or of a function that only returns such a condition."""
        called, value = self._evaluate(argument)
        if called or value is not _CLOSURE:
            raise Unproven
        if function is callable:
            return True
        if type(function) is not FunctionType:
            raise Unproven
        node = _tree_of(self._proof.code_of(function))
        match node.args, node.body:
            case ast.arguments(posonlyargs=[], args=[parameter], vararg=None, kwonlyargs=[], kwarg=None), [
                ast.Return(value=ast.expr() as condition)
            ]:
                inner = _Walk(self._proof, function, self._kind)
                inner._names = {parameter.arg: _CLOSURE}
                return inner._truth(condition)
        raise Unproven

    def _evaluate(self, node: ast.expr) -> tuple[bool, Any]:
        """Whether the expression calls the closure before anything else, and its value."""
        match node:
            case ast.Constant():
                return False, _OTHER
            case ast.Name(id=name):
                if name in self._names:
                    return False, self._names[name]
                self._constant(node)
                return False, _OTHER
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if self._names.get(name) is _CLOSURE:
                return True, _OTHER
            case ast.Call(func=mode, args=[closure], keywords=[]) if isinstance(mode, ast.Call):
                if self._is_grad_mode(mode) and self._evaluate(closure) == (False, _CLOSURE):
                    return False, _CLOSURE  # torch.enable_grad()(closure)
            case ast.Call(func=ast.Name(id="float"), args=[argument], keywords=[]):
                if self._constant(node.func) is float and self._evaluate(argument)[0]:
                    return True, _OTHER
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=[], keywords=[]):
                known = self._names.get(owner) is _SELF and name in PURE_METHODS
                if known and self._proof.of_class(self._kind, name) is vars(torch.optim.Optimizer)[name]:
                    return False, _OTHER
            case ast.Call(func=ast.Attribute(value=ast.Call() as parent, attr="step")):
                if self._is_super(parent) and all(map(self._is_argument, _arguments(node))):
                    self._next_step(node)
                    return True, _OTHER
        raise Unproven

    def _is_super(self, node: ast.Call) -> bool:
        match node:
            case ast.Call(func=ast.Name(id="super") as function, args=[], keywords=[]):
                return self._names.get(self._first) is _SELF and self._constant(function) is super
            case ast.Call(func=ast.Name(id="super") as function, args=[ast.expr(), ast.Name(id=owner)], keywords=[]):
                known = self._names.get(owner) is _SELF and isinstance(node.args[0], ast.Name)
                return known and self._constant(function) is super and self._constant(node.args[0]) is self._class()
        return False

    def _class(self) -> Any:
        """The class that the function was defined in."""
        if "__class__" in self._function.__code__.co_freevars:
            return cell(self._function, "__class__")
        found = [
            cls
            for cls in self._kind.__mro__
            if without_layers(without_hooks(vars(cls).get("step")), cls) is self._function
        ]
        return found[0] if found else None

    def _next_step(self, call: ast.Call) -> None:
        """Raises Unproven unless ``super().step``, called like this, runs the closure first."""
        mro = self._kind.__mro__
        above = mro[mro.index(self._class()) + 1 :]
        step = next(self._proof.of_class(cls, "step") for cls in above if "step" in vars(cls))
        if getattr(step, "__code__", None) is HOOKED:
            return  # the gate stands in front of it
        function = without_layers(step, self._kind)
        if function is None:
            raise Unproven
        self._proof.code_of(function)
        by_name = self._by_name
        if any(self._is_closure(argument) for argument in call.args):
            if not self._is_closure(call.args[0]):
                raise Unproven
            by_name = False
        elif any(keyword.arg == "closure" and self._is_closure(keyword.value) for keyword in call.keywords):
            by_name = True
        elif not self._passes_on(call):
            raise Unproven  # the next step does not get the closure
        _Walk(self._proof, function, self._kind).step(by_name)

    def _is_closure(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and self._names.get(node.id) is _CLOSURE

    def _passes_on(self, call: ast.Call) -> bool:
        """Whether a call passes on the *args or **kwargs that hold the closure, in the same place."""
        if _CLOSURE in self._names.values():
            return False  # the closure is a parameter of its own
        if self._by_name:
            values = [keyword.value for keyword in call.keywords if keyword.arg is None]
            return any(isinstance(value, ast.Name) and self._names.get(value.id) is _BY_NAME for value in values)
        match call.args:
            case [ast.Starred(value=ast.Name(id=name)), *_]:
                return self._names.get(name) is _POSITIONAL
        return False

    def _is_argument(self, node: ast.expr) -> bool:
        match node:
            case ast.Name() | ast.Constant():
                return not self._evaluate(node)[0]
            case ast.Starred(value=ast.Name(id=name)):
                return self._names.get(name) in (_POSITIONAL, _BY_NAME)
        return False


def _arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    for keyword in call.keywords:
        yield keyword.value if keyword.arg is not None else ast.Starred(value=keyword.value)


def _tree_of(code: CodeType) -> ast.FunctionDef:
    """The syntax tree of a function. Raises Unproven unless it surely is that of this code: the source may be gone, or
    have changed since it was imported."""
    source = "".join(linecache.getlines(code.co_filename))
    tree = ast.parse(source)
    compiled = compile(tree, code.co_filename, "exec", dont_inherit=True)
    if not any(found == code for found in _codes_in(compiled)):
        raise Unproven
    named = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == code.co_name)
    for node in named:
        if min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) == code.co_firstlineno:
            return node
    raise Unproven


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
