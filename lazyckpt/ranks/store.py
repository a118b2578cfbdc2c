"""Reaches the store of torch.distributed over connections of our own.

A client of torch's TCPStore serves one call at a time, so a wait that blocks delays all other users of that client,
such as training and its watchdogs. ``TcpClient`` therefore runs every call on a connection and a thread of its own.
The caller waits for the thread, so it can give up, even if the host has disappeared. Waits on the connection have no
timeout, because torch prints two warnings for every one that expires.

Other stores (``FileStore``, ``HashStore``) are shared by all their users: ``PollingClient`` asks them, and never waits
in them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lazyckpt import waits
from lazyckpt.ranks.rounds import StoreLost

_LISTENS = "0A"  # in /proc/net/tcp
_FOREVER = timedelta(days=14)  # torch counts milliseconds in 32 bits
_ABSENT = b"~lazyckpt: nothing~"  # no key has this value
_RELEASED = b"~lazyckpt: released~"
_LOOKS = 8  # for the answer of one call
Result = TypeVar("Result")


class Reply(Protocol):
    """The value of a key that may not be set yet."""

    def wait(self, seconds: float) -> bytes | None:
        """Returns the value as soon as it is there, None after so many seconds. Raises StoreLost."""

    def abandon(self) -> None:
        """Stops waiting. The request ends, and frees its connection, when the key is set."""


class Client(Protocol):
    """The operations of a store that we use. Any thread may call; none waits for another. Every call raises
    StoreLost."""

    def set(self, key: str, value: bytes) -> None: ...

    def claim(self, key: str, value: bytes) -> bytes:
        """Sets a key unless a rank has set it. Returns its value."""

    def look(self, key: str) -> bytes | None:
        """Returns the value of a key, or None, at once."""

    def count(self, key: str) -> int:
        """Adds one. Returns the sum."""

    def delete(self, key: str) -> None: ...

    def ask(self, key: str) -> Reply:
        """Asks for the value of a key. Until that is set, the request takes a connection."""

    def release(self, key: str) -> None:
        """Ends abandoned requests for a key that no rank will set, and deletes it."""

    def close(self) -> None:
        """Ends the connections that no request holds."""

    def disown(self) -> None:
        """In a forked child: makes every further call raise StoreLost. The connections and their threads are the
        parent's."""


def client_of(store: Any, timeout_s: float) -> Client:
    """Makes a client of the store that lies below the prefixes of ``store``."""
    root = root_of(store)
    if isinstance(root, TCPStore):
        return TcpClient(root, timeout_s)
    return PollingClient(root)


def root_of(store: Any) -> Any:
    """Returns the store without prefixes. All processes that use it see the same keys."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def serves(root: Any) -> bool:
    """Whether this process serves the store ``root``: it listens at the port of a TCPStore."""
    if not isinstance(root, TCPStore):
        return False
    with contextlib.suppress(OSError):
        sockets = set()
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
                sockets.add(os.readlink(fd))
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                address, state, inode = fields[1], fields[3], fields[9]
                if state == _LISTENS and int(address[-4:], 16) == root.port and f"socket:[{inode}]" in sockets:
                    return True
    return False


class PollingClient:
    """A client of a store that any thread may call at any time."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lost: str | None = None

    def set(self, key: str, value: bytes) -> None:
        # torch sends it without waiting for an answer. With one, no later call on another connection overtakes it.
        self._call(lambda store: (store.set(key, value), store.check([key])))

    def claim(self, key: str, value: bytes) -> bytes:
        return self._call(lambda store: bytes(store.compare_set(key, "", value)))

    def look(self, key: str) -> bytes | None:
        return self._call(lambda store: _look(store, key))

    def count(self, key: str) -> int:
        return self._call(lambda store: int(store.add(key, 1)))

    def delete(self, key: str) -> None:
        self._call(lambda store: store.delete_key(key))

    def ask(self, key: str) -> Reply:
        return _Polled(self, key)

    def release(self, key: str) -> None:
        """Nothing waits in the store."""

    def close(self) -> None:
        """Does nothing; training owns this store."""

    def disown(self) -> None:
        self._lost = "it is that of the parent of this process"

    def _call(self, call: Callable[[Any], Result]) -> Result:
        if self._lost is not None:
            raise StoreLost(self._lost)
        try:
            return call(self._store)
        except (RuntimeError, OSError) as error:
            raise StoreLost(_first_line(error)) from error


class _Polled:
    def __init__(self, client: PollingClient, key: str) -> None:
        self._client, self._key = client, key

    def wait(self, seconds: float) -> bytes | None:
        end = time.monotonic() + seconds
        pause_s = waits.STORE_FIRST_LOOK_S
        while (told := self._client.look(self._key)) is None and (left_s := end - time.monotonic()) > 0:
            waits.pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, waits.STORE_LAST_LOOK_S)
        return told

    def abandon(self) -> None:
        """Nothing waits in the store."""


class TcpClient(PollingClient):
    """A client of a TCPStore, with as many connections as it has had calls at once: usually two."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        super().__init__(store)  # rank 0's own serves the others, as long as it exists
        self._timeout_s = timeout_s
        self._idle: collections.deque[_Connection] = collections.deque()
        self._abandoned: dict[str, list[Future[bytes]]] = {}

    def ask(self, key: str) -> Reply:
        return _Asked(self, key)

    def release(self, key: str) -> None:
        self.claim(key, _RELEASED)
        # A request that has not reached the store yet must find the key, or it would wait for ever.
        concurrent.futures.wait(self._abandoned.pop(key, ()), self._timeout_s)
        self.delete(key)

    def abandon(self, key: str, request: Future[bytes]) -> None:
        """Notes an abandoned request until ``release`` ends it."""
        self._abandoned.setdefault(key, []).append(request)

    def close(self) -> None:
        self._lost = self._lost or "it was closed"
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().end()

    def _call(self, call: Callable[[Any], Result]) -> Result:
        return self.result(self.begin(call), self._timeout_s)

    def begin(self, call: Callable[[Any], Result]) -> Future[Result]:
        """Starts a call on a connection of its own. Raises StoreLost."""
        if self._lost is not None:
            raise StoreLost(self._lost)
        try:
            connection = self._idle.pop()
        except IndexError:
            try:
                connection = _Connection(self._connect)
            except RuntimeError as error:  # no thread
                raise StoreLost(_first_line(error)) from error
        return connection.do(call, self._back)

    def _back(self, connection: _Connection) -> None:
        if self._lost is None:
            self._idle.append(connection)
        else:
            connection.end()

    def _connect(self) -> Any:
        if hasattr(self._store, "clone"):
            store = self._store.clone()
        else:  # torch 2.6
            patience = timedelta(seconds=self._timeout_s)
            store = TCPStore(self._store.host, self._store.port, None, False, patience, wait_for_workers=False)
        store.set_timeout(_FOREVER)
        return store

    def result(self, future: Future[Result], seconds: float) -> Result:
        """Returns the answer of a connection. Raises StoreLost if it fails, or after so many seconds.

        Seconds in which this process was stopped do not count: the answer may have arrived, unseen."""
        for _ in range(_LOOKS):
            if concurrent.futures.wait([future], seconds / _LOOKS).done:
                break
        else:
            self._lost = f"it does not answer within {seconds:g} s"
            raise StoreLost(self._lost)
        try:
            return future.result()
        except (RuntimeError, OSError) as error:
            self._lost = self._lost or _first_line(error)
        raise StoreLost(self._lost)


class _Asked:
    def __init__(self, client: TcpClient, key: str) -> None:
        self._client, self._key = client, key
        self._abandoned = False
        self._future = client.begin(self._get)

    def _get(self, store: Any) -> bytes:
        # torch wakes us without a value when a process compares a key that is not set, or deletes one just set.
        while not (told := bytes(store.get(self._key))) and not self._abandoned:
            pass
        return told

    def abandon(self) -> None:
        self._abandoned = True
        self._client.abandon(self._key, self._future)

    def wait(self, seconds: float) -> bytes | None:
        done = threading.Event()
        self._future.add_done_callback(lambda _: done.set())
        return self._client.result(self._future, 0) if done.wait(seconds) else None


class _Connection:
    """A thread with a connection. Does one call at a time."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._calls: SimpleQueue[Callable[[Any], None] | None] = SimpleQueue()
        # A daemon: a call to a host that has disappeared must not keep the process.
        threading.Thread(target=self._run, args=(connect,), name="lazyckpt-store", daemon=True).start()

    def do(self, call: Callable[[Any], Result], back: Callable[[_Connection], None]) -> Future[Result]:
        """Calls ``back`` when the connection is free again. It never is after an error."""
        future: Future[Result] = Future()

        def run(store: Any) -> None:
            try:
                if isinstance(store, Exception):
                    raise store
                result = call(store)
            except Exception as error:
                future.set_exception(error)
            else:
                back(self)
                future.set_result(result)

        self._calls.put(run)
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _run(self, connect: Callable[[], Any]) -> None:
        try:
            store = connect()
        except Exception as error:
            store = error
        while (call := self._calls.get()) is not None:
            call(store)


def _look(store: Any, key: str) -> bytes | None:
    if not store.check([key]):
        return None
    # ``get`` would wait for a key that was deleted just now. This compares with a value that no key has, and sets
    # nothing.
    told = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return None if told == _ABSENT else told


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
