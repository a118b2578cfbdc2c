"""Calls of one thread that another one cancels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from lazyckpt.stores.calls import CancelScope, each, interruptible

CALLS: dict[str, Callable[[Callable[[], int]], object]] = {
    "one": interruptible,
    "several": lambda call: each(lambda _: call(), [1, 2, 3], 2),
}


@pytest.mark.parametrize("how", CALLS)
def test_an_exception_in_the_scope_ends_the_calls_of_its_threads(how: str) -> None:
    begun, answers = threading.Event(), threading.Event()

    def call() -> int:
        begun.set()
        assert answers.wait(60)
        return 1

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt), CancelScope() as scope:
            asked = pool.submit(scope.run, CALLS[how], call)
            assert begun.wait(60)
            raise KeyboardInterrupt
        with pytest.raises(CancelledError):
            asked.result(60)
        with pytest.raises(CancelledError):
            pool.submit(scope.run, CALLS[how], call).result(60)
        answers.set()
        assert pool.submit(interruptible, call).result(60) == 1  # out of the scope


def test_without_an_exception_calls_end_as_ever() -> None:
    with ThreadPoolExecutor(1) as pool, CancelScope() as scope:
        assert pool.submit(scope.run, interruptible, lambda: 1).result(60) == 1
        with pytest.raises(ZeroDivisionError):
            pool.submit(scope.run, interruptible, lambda: 1 // 0).result(60)
        assert pool.submit(scope.run, each, str, [1, 2], 2).result(60) == ["1", "2"]


def test_what_ends_a_call_is_called_once_and_only_while_it_lasts() -> None:
    ended: list[str] = []
    inside, after = threading.Event(), threading.Event()

    def work(scope: CancelScope) -> None:
        with scope.ending(lambda: ended.append("before")):
            pass
        with scope.ending(lambda: ended.append("call")):
            inside.set()
            assert after.wait(60)
        with scope.ending(lambda: ended.append("behind")):
            pass

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt), CancelScope() as scope:
            work_ends = pool.submit(scope.run, work, scope)
            assert inside.wait(60)
            raise KeyboardInterrupt
        after.set()
        with pytest.raises(CancelledError):
            work_ends.result(60)
    assert ended == ["call"]
