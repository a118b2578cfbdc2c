"""Tries what a mirror needs of an object store: rights, conditional writes, and speed."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from lazyckpt.config import MIB
from lazyckpt.stores.store import Store, StorePath
from lazyckpt.stores.urls import opened

_BYTES = 64 * MIB
_PART_BYTES = 8 * MIB
_ONCE = "put only what does not exist"


@dataclass(frozen=True)
class Trial:
    """One thing that was tried: ``fault`` says why it failed, "" if it did not; ``note`` what was measured."""

    what: str
    fault: str = ""
    note: str = ""


def try_out(url: StorePath) -> list[Trial]:
    """Tries everything below the URL, with objects of its own that it removes. Raises ConfigError for the URL."""
    store = opened(str(url))
    name = f"lazyckpt-doctor-{uuid.uuid4().hex}"
    data = os.urandom(_PART_BYTES)
    speeds: dict[str, float] = {}

    def timed(what: str, act: Callable[[], object]) -> Callable[[], object]:
        def act_timed() -> object:
            begin = time.perf_counter()
            found = act()
            speeds[what] = _BYTES / (time.perf_counter() - begin) / 1e6
            return found

        return act_timed

    def put() -> None:
        store.write(name, (data for _ in range(_BYTES // _PART_BYTES)), _BYTES)

    def read() -> None:
        for begin in range(0, _BYTES, _PART_BYTES):
            if bytes(store.read(name, begin, begin + _PART_BYTES)) != data:
                raise OSError(0, "other bytes came back than were sent")

    trials = [
        _tried("list", store.level),
        _tried("put, in parts", timed("put, in parts", put)),
        _tried("get a range", timed("get a range", read)),
        _tried(_ONCE, lambda: _creates_once(store, f"{name}-once")),
        _tried("delete", lambda: _removes(store, name, f"{name}-once")),
    ]
    notes = {what: f"{speed:.0f} MB/s" for what, speed in speeds.items()}
    if store.looks_first:
        notes[_ONCE] = "by looking first: two processes that commit one step in the same moment are not noticed"
    return [Trial(t.what, t.fault, notes.get(t.what, "")) for t in trials]


def _tried(what: str, act: Callable[[], object]) -> Trial:
    try:
        act()
    except OSError as error:
        return Trial(what, str(error.strerror or error))
    return Trial(what)


def _creates_once(store: Store, name: str) -> None:
    if not store.create(name, b"1") or store.create(name, b"2") or store.whole(name, 1) != b"1":
        raise OSError(
            0, "the store replaces objects that exist (no If-None-Match), so it cannot tell two writers apart"
        )


def _removes(store: Store, *names: str) -> None:
    store.remove(names)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            store.entry(name)
            raise OSError(0, f"{name} is still there")
