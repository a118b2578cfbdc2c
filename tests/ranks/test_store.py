"""The client of torch.distributed's store (ranks/store.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from lazyckpt.ranks.rounds import StoreLost
from lazyckpt.ranks.store import Client, TcpClient, client_of, root_of, serves

Make = Callable[[], Any]


def tcp_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture(params=["tcp", "prefix", "hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Every kind of store that torch.distributed may have."""
    if request.param == "hash":
        return HashStore()
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), 2)
    return tcp_store() if request.param == "tcp" else PrefixStore("b", PrefixStore("a", tcp_store()))


@pytest.fixture
def client(store: Any) -> Iterator[Client]:
    client = client_of(store, 30.0)
    yield client
    client.close()


@pytest.fixture
def tcp() -> Iterator[TcpClient]:
    client = client_of(tcp_store(), 30.0)
    assert isinstance(client, TcpClient)
    yield client
    client.close()


@pytest.fixture
def served() -> Iterator[tuple[int, int]]:
    """A process that serves a store: its id and port."""
    serve = (
        "import time, datetime\n"
        "from torch._C._distributed_c10d import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, None, True, datetime.timedelta(seconds=60), wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def of(port: int) -> TcpClient:
    client = client_of(TCPStore("127.0.0.1", port, None, False, wait_for_workers=False), 30.0)
    assert isinstance(client, TcpClient)
    return client


def test_the_first_to_claim_a_key_sets_it(client: Client) -> None:
    assert client.claim("key", b"\0\xff first") == b"\0\xff first"
    assert client.claim("key", b"second") == b"\0\xff first" == client.look("key")


def test_a_key_that_is_not_set_has_no_value(client: Client) -> None:
    assert client.look("key") is None
    client.set("key", b"value")
    assert client.look("key") == b"value"
    client.delete("key")
    client.delete("key")
    assert client.look("key") is None


def test_counts_add_up(client: Client) -> None:
    assert [client.count("key") for _ in range(3)] == [1, 2, 3]


def test_an_answer_comes_as_soon_as_the_key_is_set(client: Client) -> None:
    reply = client.ask("key")
    assert reply.wait(0.05) is None
    timer = threading.Timer(0.1, client.set, ("key", b"value"))
    timer.start()
    begin = time.monotonic()
    assert reply.wait(30) == b"value"
    assert time.monotonic() - begin < 10
    timer.join()
    assert client.ask("key").wait(30) == b"value"


def test_a_wait_holds_up_nobody(client: Client, store: Any) -> None:
    """Neither another thread of ours nor training, which uses the store itself."""
    replies = [client.ask(f"key {i}") for i in range(4)]
    begin = time.monotonic()
    store.set("training", "goes on")
    assert store.get("training") == b"goes on"
    client.set("other", b"1")
    assert client.look("other") == b"1"
    assert time.monotonic() - begin < 3
    for i, reply in enumerate(replies):
        client.set(f"key {i}", b"done")
        assert reply.wait(30) == b"done"


def test_a_look_at_a_missing_key_does_not_answer_those_who_wait_for_it(tcp: TcpClient) -> None:
    """Regression: torch wakes them when somebody compares a key that is not set."""
    reply = tcp.ask("key")
    for _ in range(100):
        assert tcp.look("key") is None
    tcp._call(lambda store: store.compare_set("key", "not this", "nothing"))
    assert reply.wait(0.2) is None
    tcp.set("key", b"value")
    assert reply.wait(30) == b"value"


def test_a_released_request_gives_its_connection_back_and_leaves_no_key(tcp: TcpClient) -> None:
    before = threading.active_count()
    for _ in range(20):
        reply = tcp.ask("key")
        assert reply.wait(0.001) is None
        reply.abandon()
        tcp.release("key")
        assert reply.wait(30) is not None
        assert tcp.look("key") is None
    assert threading.active_count() <= before + 2


def test_waiting_prints_nothing(tcp: TcpClient, capfd: pytest.CaptureFixture[str]) -> None:
    """torch warns twice for every wait that ends without an answer."""
    reply = tcp.ask("key")
    for _ in range(3):
        assert reply.wait(0.05) is None
    reply.abandon()
    tcp.release("key")
    assert capfd.readouterr() == ("", "")


def test_every_call_fails_at_once_when_the_store_is_lost(served: tuple[int, int]) -> None:
    pid, port = served
    client = of(port)
    reply = client.ask("key")
    client.set("other", b"1")
    assert reply.wait(1) is None  # its connection stands
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    for call in (lambda: reply.wait(30), lambda: client.look("other"), lambda: client.claim("key", b"1")):
        with pytest.raises(StoreLost):
            call()
    assert time.monotonic() - begin < 4
    client.close()


def test_a_store_that_does_not_answer_is_lost_after_the_timeout(served: tuple[int, int]) -> None:
    """Its machine may have disappeared."""
    pid, port = served
    client = of(port)
    client.set("key", b"1")
    client._timeout_s = 0.5  # of calls on a connection that stands
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # all of its threads
    begin = time.monotonic()
    with pytest.raises(StoreLost, match=r"does not answer within 0\.5 s"):
        client.look("key")
    with pytest.raises(StoreLost):
        client.look("key")
    assert time.monotonic() - begin < 2
    os.kill(pid, signal.SIGCONT)
    client.close()


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    """Regression: a rank that was stopped for longer than the timeout took the store for lost, and saved no more."""
    store = tcp_store()
    ask = (
        "import time\n"
        "from torch._C._distributed_c10d import TCPStore\n"
        "from lazyckpt.ranks.store import client_of\n"
        f"client = client_of(TCPStore('127.0.0.1', {store.port}, None, False, wait_for_workers=False), 30.0)\n"
        "client.set('key', b'1')\n"
        "client._timeout_s = 0.8\n"
        "def slowly(store):\n"
        "    print('asked', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    return store.get('key')\n"
        "print(client._call(slowly), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "b'1'\n"


def test_a_torch_without_clones_gets_connections_of_its_own(tcp: TcpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 has none."""
    plain = tcp._connect
    monkeypatch.setattr("lazyckpt.ranks.store.hasattr", lambda *_: False, raising=False)
    store = plain()
    store.set("key", "value")
    assert tcp.look("key") == b"value"


def test_a_process_knows_whether_it_serves_the_store(served: tuple[int, int], tmp_path: Path) -> None:
    assert serves(root_of(PrefixStore("a", tcp_store())))
    _, port = served
    assert not serves(TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False))
    assert not serves(HashStore()) and not serves(FileStore(str(tmp_path / "store"), 1))
