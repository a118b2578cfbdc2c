"""Ways in which a process ends in a test: in a forked child, and at the n-th call that changes the file system."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

CALLS = ("mkdir", "rmdir", "rename", "link", "unlink", "fsync")


def in_a_child(body: Callable[[], object], code: int = 0) -> str:
    """Runs ``body`` in a forked child, which has imported torch already. Returns what ``body`` returns, as text.

    Fails unless the child ends with this exit code, negative for the signal that kills it."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writes, str(body()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    os.close(writes)
    with open(reads, encoding="utf-8") as file:
        said = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    return said


class Crash(BaseException):
    """The process ends here."""


class Cut:
    """Makes the n-th call that changes the file system the last, or one that fails."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int, error: BaseException) -> None:
        self.left, self.error = nth, error
        for name in CALLS:
            patch.setattr(os, name, self.wrapped(getattr(os, name)))

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0 or (self.left < 0 and isinstance(self.error, Crash)):
                raise self.error
            return function(*args, **kwargs)

        return call


def crash(act: Callable[[], object], nth: int) -> bool:
    """Ends ``act`` at the n-th call that changes the file system. Whether it came to that."""
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch, nth, Crash())
        with suppress(Crash):
            act()
        return cut.left <= 0
