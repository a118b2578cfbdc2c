"""The pause of the garbage collector ends with the block, for all threads."""

from __future__ import annotations

import gc
import os
import threading

from lazyckpt.collector import collector_paused


def test_the_pause_ends_with_the_block() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_the_user_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_forked_in_a_pause_of_another_thread_collects() -> None:
    """Regression: only the thread that paused would have enabled the collector, and the child lacks it."""
    paused, over = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            paused.set()
            over.wait(30)

    thread = threading.Thread(target=pause)
    thread.start()
    assert paused.wait(30)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.isenabled() else 1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gc.isenabled()
