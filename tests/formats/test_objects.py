"""Reads of objects of a store, where each request takes a while."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from counted_requests import Requests

from lazyckpt.formats.reader import FileReader
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.stores.store import StorePath

TENSORS = 100
KIB = 1024


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests("memory://formats", monkeypatch)


def put(requests: Requests, data: bytes) -> StorePath:
    requests.store.write("state.pt", [data], len(data))
    return StorePath(requests.store, "state.pt")


def test_the_headers_of_large_records_come_together_and_without_what_lies_between(
    tmp_path: Path, requests: Requests
) -> None:
    torch.save([torch.full((100 * KIB,), float(n)) for n in range(TENSORS)], tmp_path / "state.pt")
    path = put(requests, (tmp_path / "state.pt").read_bytes())
    assert read_directory(path) == read_directory(tmp_path / "state.pt")
    assert sum(end - begin for begin, end in requests.asked) < 1024 * KIB
    assert len(requests.asked) <= TENSORS + 4


def test_headers_that_lie_close_share_a_request(tmp_path: Path, requests: Requests) -> None:
    torch.save([torch.full((10 * KIB,), float(n)) for n in range(10 * TENSORS)], tmp_path / "state.pt")
    path = put(requests, (tmp_path / "state.pt").read_bytes())
    assert read_directory(path) == read_directory(tmp_path / "state.pt")
    assert len(requests.asked) <= 10 * TENSORS // 20


def test_reads_that_differ_from_those_that_were_announced(requests: Requests) -> None:
    data = bytes(range(256)) * 16 * KIB
    requests.several.set()
    with FileReader(put(requests, data)) as file:
        far = 1 << 20
        file.will_need([(0, 10), (far, far + 10), (2 * far, 2 * far + 10), (3 * far, 3 * far + 10)])
        assert file.read(far, 10) == data[far : far + 10]  # the first is passed over
        assert file.read(2 * far, 12) == data[2 * far : 2 * far + 12]
        assert file.read(3 * far, 10) == data[3 * far : 3 * far + 10]
        assert file.read(5, 300 * KIB) == data[5 : 5 + 300 * KIB]
        assert requests.asked.count((3 * far, 3 * far + 10)) == 1
