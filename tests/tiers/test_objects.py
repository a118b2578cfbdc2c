"""Objects on a real server, over sockets that fail."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from file_server import Files, InMemory
from object_store import S3, Asked

from lazyckpt import waits
from lazyckpt.stores.objects import PART_BYTES, ObjectStore
from lazyckpt.stores.store import Store
from lazyckpt.stores.urls import opened

LARGE = 2 * PART_BYTES + 5


@pytest.fixture
def store(s3: S3) -> ObjectStore:
    return ObjectStore(s3.url(), s3.options)


@pytest.fixture
def any_store(place: S3 | Files | InMemory) -> Store:
    return opened(place.url(), place.options)


def parts(nbytes: int, fail_at: int = -1) -> Iterator[bytes]:
    for number, begin in enumerate(range(0, nbytes, PART_BYTES)):
        if number == fail_at:
            raise ValueError("rotten")
        yield bytes([number + 1]) * min(PART_BYTES, nbytes - begin)


def is_part(asked: Asked) -> bool:
    return asked.method == "PUT" and "partNumber" in asked.path


def test_what_is_written_is_read(any_store: Store, place: S3 | Files | InMemory) -> None:
    store = any_store
    store.write("step-1/state.pt", parts(LARGE), LARGE, "crc32-00000000")
    assert bytes(store.read("step-1/state.pt", PART_BYTES - 1, PART_BYTES + 1)) == b"\1\2"
    entry = store.entry("step-1/state.pt")
    assert entry.nbytes == LARGE and abs(entry.modified - time.time()) < 600
    assert store.label(entry.name) == ("crc32-00000000" if isinstance(place, S3) else "")
    assert store.entries("step-1") == [entry] == store.entries() and store.entries("step") == []
    assert place.names() == ["run/step-1/state.pt"]
    store.write("step-1/state.pt", [b"again"], 5)
    assert store.entry("step-1/state.pt").tag != entry.tag
    store.remove(["step-1/state.pt", "never there"])
    assert place.names() == []
    for act in (store.entry, store.label, lambda name: store.read(name, 0, 1), lambda name: store.whole(name, 5)):
        with pytest.raises(FileNotFoundError):
            act("step-1/state.pt")


def test_a_small_object_is_read_whole_if_it_is_small(any_store: Store) -> None:
    any_store.write("run.json", [b"12", b"345"], 5)
    assert any_store.whole("run.json", 5) == b"12345" and bytes(any_store.read("run.json", 2, 2)) == b""
    with pytest.raises(OSError, match="5 bytes, where at most 4 are expected"):
        any_store.whole("run.json", 4)
    with pytest.raises(OSError):
        any_store.read("run.json", 3, 9)


def test_only_the_first_of_two_creates(any_store: Store) -> None:
    assert any_store.create("manifest.json", b"first") and not any_store.create("manifest.json", b"second")
    assert bytes(any_store.read("manifest.json", 0, 5)) == b"first"
    assert any_store.create("step-1.pin", b"") and any_store.entry("step-1.pin").nbytes == 0


@pytest.mark.parametrize("how", ["the server", "an option"])
def test_where_a_server_has_no_conditional_writes_it_looks_first(s3: S3, how: str) -> None:
    disabled = {"aws_conditional_put": "disabled"} if how == "an option" else {}
    store = ObjectStore(s3.url(), {**s3.options, **disabled})
    s3.proxy.inject("status", lambda asked: asked.conditional, times=1000, status=501, code="NotImplemented")
    assert store.create("manifest.json", b"first") and not store.create("manifest.json", b"second")
    assert store.whole("manifest.json", 5) == b"first" and store.looks_first
    begin = len(s3.proxy.asked)
    assert store.create("other.json", b"") and not any(asked.conditional for asked in s3.proxy.asked[begin:])


def test_parts_that_fail_leave_nothing(any_store: Store, place: S3 | Files | InMemory) -> None:
    with pytest.raises(ValueError, match="rotten"):
        any_store.write("state.pt", parts(LARGE, fail_at=2), LARGE)
    gc.collect()
    assert place.names() == []
    any_store.write("state.pt", [b"first"], 5)
    with pytest.raises(ValueError, match="rotten"):
        any_store.write("state.pt", parts(LARGE, fail_at=2), LARGE)
    assert place.body("run/state.pt") == b"first"
    if isinstance(place, S3):
        assert not place.client.list_multipart_uploads(Bucket=place.bucket).get("Uploads")


def test_many_threads_read_at_once(any_store: Store) -> None:
    data = os.urandom(400_000)
    any_store.write("state.pt", [data], len(data))
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda at: bytes(any_store.read("state.pt", at, at + 1000)), range(0, 400_000, 4000))
    assert b"".join(found) == b"".join(data[at : at + 1000] for at in range(0, 400_000, 4000))


@pytest.mark.parametrize(
    "fault",
    [
        {"how": "status", "status": 503, "code": "SlowDown", "times": 3},
        {"how": "status", "status": 500, "code": "InternalError", "times": 2},
        {"how": "reset", "times": 2},
    ],
)
def test_a_fault_that_passes_is_not_seen(store: ObjectStore, s3: S3, fault: dict[str, Any]) -> None:
    s3.proxy.inject(matches=is_part, **fault)
    store.write("state.pt", parts(LARGE), LARGE)
    found = s3.proxy.inject(matches=lambda asked: asked.method == "GET", **fault)
    assert bytes(store.read("state.pt", LARGE - 5, LARGE)) == b"\3" * 5
    assert found.seen.is_set() and s3.body("run/state.pt") == b"".join(parts(LARGE))


def test_a_body_that_is_cut_off_is_an_error_or_read_again(store: ObjectStore, s3: S3) -> None:
    s3.put("run/state.pt", b"x" * 100_000)
    fault = s3.proxy.inject("truncate", lambda asked: asked.method == "GET")
    try:
        found = store.read("state.pt", 0, 100_000)
    except OSError as error:
        assert error.errno in (errno.EIO, errno.ECONNABORTED)
    else:
        assert bytes(found) == b"x" * 100_000
    assert fault.seen.is_set()


@pytest.mark.parametrize("times", [1, 3])
def test_a_stream_that_is_cut_off_goes_on_where_it_ended(store: ObjectStore, s3: S3, times: int) -> None:
    data = os.urandom(3_000_000)
    s3.put("run/state.pt", data)
    s3.proxy.inject("truncate", lambda asked: asked.method == "GET", times=times)
    assert b"".join(store.stream("state.pt", 5, len(data))) == data[5:]
    assert sum(asked.method == "GET" for asked in s3.proxy.asked) == 1 + times


def test_a_stream_that_never_goes_on_ends_with_an_error(store: ObjectStore, s3: S3) -> None:
    s3.put("run/state.pt", b"x" * 100_000)
    s3.proxy.inject("truncate", lambda asked: asked.method == "GET", times=1000)
    got = 0
    with pytest.raises(OSError, match="the connection failed"):
        for part in store.stream("state.pt", 0, 100_000):
            got += len(part)
    assert got < 100_000


def test_a_server_that_falls_silent_is_asked_again(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "STORE_SILENCE_S", 0.5)
    store = ObjectStore(s3.url(), s3.options)
    s3.put("run/state.pt", b"abc")
    fault = s3.proxy.inject("stall", lambda asked: asked.method == "GET")
    assert bytes(store.read("state.pt", 0, 3)) == b"abc"
    assert fault.seen.is_set()


@pytest.mark.long(first=5)
@pytest.mark.parametrize(
    ("status", "code", "number", "told"),
    [
        (403, "AccessDenied", errno.EACCES, "AccessDenied"),
        (400, "ExpiredToken", errno.EACCES, "ExpiredToken"),
        (403, "SignatureDoesNotMatch", errno.EACCES, "SignatureDoesNotMatch"),
        (403, "RequestTimeTooSkewed", errno.EACCES, "RequestTimeTooSkewed"),
        (403, "QuotaExceeded", errno.ENOSPC, "full"),
        (507, "InsufficientStorage", errno.ENOSPC, "full"),
        (404, "NoSuchBucket", errno.ENOENT, "no such object or bucket"),
        (400, "SomethingElse", errno.EIO, "SomethingElse"),
    ],
)
def test_what_the_server_refuses_is_told_without_secrets(
    store: ObjectStore, s3: S3, monkeypatch: pytest.MonkeyPatch, status: int, code: str, number: int, told: str
) -> None:
    s3.proxy.inject("status", times=100, status=status, code=code)
    for act in (
        lambda: store.read("state.pt", 0, 1),
        lambda: store.write("state.pt", parts(5), 5),
        lambda: store.entries(),
        lambda: store.create("manifest.json", b"{}"),
    ):
        with pytest.raises(OSError) as caught:
            act()
        error: BaseException | None = caught.value
        assert caught.value.errno == number and told in str(caught.value)
        assert s3.url() in str(caught.value)
        while error is not None:
            assert "of-tests" not in str(error)  # neither the key nor the secret
            error = error.__cause__


def test_nothing_listens(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "STORE_RETRIES_S", 0.1)
    store = ObjectStore(s3.url(), {"endpoint": "http://127.0.0.1:9"})
    with pytest.raises(OSError, match="the connection failed"):
        store.read("state.pt", 0, 1)


def test_plain_http_takes_an_endpoint_that_asks_for_it(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setattr(waits, "STORE_RETRIES_S", 0.1)
    store = ObjectStore(s3.url(), {"endpoint": s3.proxy.endpoint.replace("http:", "https:")})
    with pytest.raises(OSError, match="the connection failed"):
        store.entries()
    assert s3.proxy.asked == []
