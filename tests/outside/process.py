"""What holds in every process of a run: pytest's own, and each rank that a test starts.

Two changes hold with torch's storage as well: ``cpu.py``, and ranks are forked from a server that has imported torch,
which saves seconds for each test. Nothing of lazyckpt is imported then.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing
from torch.testing._internal.common_distributed import MultiProcessTestCase

from outside import cpu

STORAGE = "LAZYCKPT_OUTSIDE_STORAGE"  # "lazyckpt" or "torch"
FOLDER = "LAZYCKPT_OUTSIDE_FOLDER"  # of this run: the log of what tests used, and what was moved
WRITER, READER, MOVED = "writer", "reader", "moved"

_test = ""  # the running one


def begin(test: str) -> None:
    """Names the test that uses the storage from now on, in this process and in the ranks that it starts."""
    global _test
    if not _test:
        cpu.begin()
    _test = test


def log() -> Path:
    """To which every process appends what a test used: lines of the test, a tab, and WRITER, READER or MOVED."""
    return Path(os.environ[FOLDER], "log")


def note(what: str) -> None:
    with open(log(), "a", encoding="utf-8") as file:
        file.write(f"{_test}\t{what}\n")


def _fork_from_server(self: MultiProcessTestCase) -> None:
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    self._start_processes(lambda target, **others: context.Process(target=_Rank(target, _test), **others))


class _Rank:
    """What a rank runs. It imports the test's module only after this one."""

    def __init__(self, target: Callable[..., None], test: str) -> None:
        self._pickled = pickle.dumps(target)
        self._test = test

    def __call__(self, *args: Any, **others: Any) -> None:
        begin(self._test)
        pickle.loads(self._pickled)(*args, **others)


cpu.install()
MultiProcessTestCase._spawn_processes = _fork_from_server
if os.environ[STORAGE] == "lazyckpt":
    importlib.import_module("outside.storage").install()
