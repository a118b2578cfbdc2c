"""The table of element types is torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lazyckpt
from commands import fails, run_json
from lazyckpt.conversion.inert import _STORAGE_DTYPES
from lazyckpt.formats.dtypes import DTYPES


def test_every_dtype_of_torch_is_known() -> None:
    dtypes = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
    assert {str(dtype): dtype.itemsize for dtype in dtypes}.items() <= {
        repr(dtype): dtype.itemsize for dtype in DTYPES.values()
    }.items()
    storages = torch.storage._dtype_to_storage_type_map()
    assert {name: repr(dtype) for name, dtype in _STORAGE_DTYPES.items()} == {
        name: str(dtype) for dtype, name in storages.items()
    }


def test_an_older_torch_shows_what_it_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions that lazyckpt works with lack some of the small floats."""
    lazyckpt.save({"w": torch.zeros(8).to(torch.float8_e5m2)}, tmp_path / "a.safetensors")
    torch.save({"kind": torch.float8_e5m2}, tmp_path / "a.pt")
    monkeypatch.delattr(torch, "float8_e5m2")
    (entry,) = run_json("inspect", tmp_path / "a.safetensors")["entries"]
    assert entry["dtype"] == "float8_e5m2" and entry["bytes"] == 8
    (entry,) = run_json("inspect", tmp_path / "a.pt")["entries"]
    assert entry["value"] == "torch.float8_e5m2"
    with pytest.raises(lazyckpt.UnsupportedFormatError, match=r"'w': this torch has no torch\.float8_e5m2"):
        lazyckpt.load(tmp_path / "a.safetensors")
    assert "'w' is a tensor of float8_e5m2" in fails(2, "convert", tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert "kind is a Dtype" in fails(2, "convert", tmp_path / "a.pt", tmp_path / "b.pt")
