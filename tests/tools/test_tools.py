"""The tools as functions: what they return for whole, damaged, sharded and mismatched files; they print nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lazyckpt


@pytest.fixture(autouse=True)
def nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with two checkpoints of a model with tied weights; only its bias changes between them."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(50, 8), "head": torch.nn.Linear(8, 50)})
    model["head"].weight = model["embed"].weight
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(model=model, extra={"note": "hello"})
        ckpt.save(1, blocking=True)
        with torch.no_grad():
            model["head"].bias += 1
        ckpt.save(2, blocking=True)
    return tmp_path / "run"


def test_inspect(folder: Path) -> None:
    found = lazyckpt.inspect(str(folder))
    assert found.checkpoint is not None and (found.checkpoint.step, found.checkpoint.sequence) == (2, 2)
    assert found.path == folder / "step-00000002/state.pt" and found.bytes == found.path.stat().st_size
    weight, tied = found.tensors["model.embed.weight"], found.tensors["model.head.weight"]
    assert (weight.shape, weight.dtype, weight.nbytes) == ((50, 8), "float32", 1600)
    assert tied.storage is not None and weight.storage is not None and tied.storage.record is weight.storage.record
    assert (tied.tied_to, tied.nbytes) == (weight.path, 0)
    assert "extra.note" not in found.tensors and found.root.nbytes < found.bytes
    assert repr(weight) == "Node('model.embed.weight', tensor, float32 50 x 8, 1600 bytes)"
    shown = [line.split() for line in repr(found).splitlines()]
    assert ["1.56", "KiB", "embed.weight", "float32", "50", "x", "8"] in shown
    os.truncate(found.path, 100)
    with pytest.raises(lazyckpt.CorruptFileError, match="has 100 bytes"):
        lazyckpt.inspect(found.path.parent)
    with pytest.raises(lazyckpt.LoadError, match="No such file"):
        lazyckpt.inspect(folder / "missing")


def test_a_notebook_shows_as_many_levels_as_fit(tmp_path: Path) -> None:
    """Regression: it showed `Inspection(path=…, root=Node('', module, …))`."""
    blocks = {f"{block}.weight": torch.ones(2) for block in range(90)}
    lazyckpt.save({"model": blocks, "\x1b[1mvil": 1}, tmp_path / "a.pt")
    whole = repr(lazyckpt.inspect(tmp_path / "a.pt")).splitlines()
    assert len(whole) == 93 and whole[0].endswith(", 90 tensors")
    assert whole[-1].split() == ["\\x1b[1mvil", "1"]
    deep = {f"{block}.{part}": torch.ones(2) for block in range(60) for part in ("w", "b")}
    lazyckpt.save({"model": deep}, tmp_path / "b.pt")
    shown = repr(lazyckpt.inspect(tmp_path / "b.pt")).splitlines()
    assert len(shown) == 63 and shown[-1] == "… 120 more rows: see root and tensors"


def test_unknown_urls_are_refused(tmp_path: Path) -> None:
    for tool in (lazyckpt.inspect, lazyckpt.verify):
        with pytest.raises(lazyckpt.ConfigError, match="expected one of s3://"):
            tool("gopher://host/run")
    with pytest.raises(lazyckpt.ConfigError, match="expected one of s3://"):
        lazyckpt.diff("gopher://host/run", tmp_path / "a.pt")
    with pytest.raises(lazyckpt.ConfigError, match="URLs are not supported"):
        lazyckpt.convert("s3://bucket/run", tmp_path / "a.pt")


def test_verify(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    found = lazyckpt.verify(folder, progress=lambda *news: told.append(news))
    assert found.ok and [finding.path.name for finding in found.findings] == ["step-00000002", "step-00000001"]
    assert [done for _, done, _ in told] == [total for *_, total in told] == [f.bytes for f in found.findings]
    os.truncate(folder / "step-00000002/state.pt", 100)
    found = lazyckpt.verify(folder)
    assert not found.ok and [finding.state for finding in found.findings] == ["damaged", "ok"]
    assert "has 100 bytes" in found.findings[0].damage[0]
    (missing,) = lazyckpt.verify(folder / "missing").findings
    assert missing.state == "unreadable" and "No such file" in missing.damage[0]


def test_diff(folder: Path) -> None:
    found = lazyckpt.diff(folder / "step-00000001", folder)
    (document,) = found.documents
    (change,) = [change for change in document.changes if not change.path.startswith("rng")]
    assert not found.same and (change.path, change.kind, change.change) == ("model.head.bias", "tensor", "changed")
    assert change.elements is not None and change.elements.differing == change.elements.compared == 50
    assert change.elements.max_abs == pytest.approx(1)
    assert lazyckpt.diff(folder, folder).same and document.equal > 0


def test_convert(folder: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    found = lazyckpt.convert(folder, tmp_path / "a.safetensors", key="model", progress=lambda *new: told.append(new))
    assert (found.path, found.files) == (tmp_path / "a.safetensors", ("a.safetensors",))
    assert found.tied == {"head.weight": "embed.weight"} and (found.records, found.without_checksum) == (2, 0)
    assert load_file(found.path).keys() == {"embed.weight", "head.bias"} and told[-1][1] == told[-1][2] == 1800
    shards = lazyckpt.convert(found.path, tmp_path / "shards", max_shard_bytes=1700)
    assert len(shards.files) == 3 and lazyckpt.verify(shards.path).ok
    assert lazyckpt.inspect(shards.path).format == "safetensors in 2 files"
    assert lazyckpt.diff(shards.path, found.path).same
    with pytest.raises(lazyckpt.ConfigError, match="exists already"):
        lazyckpt.convert(folder, tmp_path / "a.safetensors", key="model")
