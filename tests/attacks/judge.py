"""The rules that must hold for any bytes at all."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
from conftest import describe_graph, torch_load_with_our_globals

import lazyckpt
from lazyckpt.errors import LazyCkptError
from lazyckpt.tools.inspect import inspect


class Violation(AssertionError):
    """A reader broke a rule."""


def judge(path: Path) -> str:
    """Reads a file in every way. Returns "refused" or "accepted".

    Errors that are not lazyckpt's own pass through. Raises Violation if load reads something that the format's own
    library does not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(LazyCkptError):
            inspect(path)
        try:
            found = lazyckpt.load(path)
        except LazyCkptError:
            return "refused"
        _compare(path, found)
    return "accepted"


def _compare(path: Path, found: Any) -> None:
    tensors = not path.read_bytes().startswith(b"PK")
    try:
        theirs = safetensors.torch.load_file(path) if tensors else torch_load_with_our_globals(path)
    except Exception as error:
        raise Violation(f"accepted what its own library refuses: {type(error).__name__}: {error}") from error
    if tensors:
        found, theirs = ({k: v.clone() for k, v in sorted(x.items())} for x in (found, theirs))
    try:
        ours = describe_graph(found)
    except (RecursionError, TypeError, RuntimeError):  # a tensor too odd to be described
        return
    if ours != describe_graph(theirs):
        raise Violation("read something else than its own library")
