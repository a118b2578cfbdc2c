"""Every later version reads what this one wrote, bit for bit."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import lazyckpt
from golden import make
from lazyckpt.cli import app

ROOT = Path(__file__).parents[2]
VERSIONS = sorted(path for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name[0].isdigit())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Path:
    version: Path = request.param
    return version


def test_every_version_has_golden_files() -> None:
    """Those that CHANGELOG.md names, and this one. A folder that is gone is missed here."""
    released = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert [version.name for version in VERSIONS] == sorted({*released, lazyckpt.__version__})


def test_golden_files_stay_as_they_were_written(golden: Path) -> None:
    sums = dict(reversed(line.split("  ")) for line in (golden / "SHA256SUMS").read_text().splitlines())
    files = (path for path in golden.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    assert {str(p.relative_to(golden)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files} == sums


def test_golden_files_are_small() -> None:
    nbytes = sum(p.stat().st_size for version in VERSIONS for p in version.rglob("*") if p.is_file())
    assert nbytes < 300_000 * len(VERSIONS)


HAS_ALL_DTYPES = pytest.mark.skipif(not hasattr(torch, make.DTYPES[-1]), reason="this torch lacks a dtype of the file")


@HAS_ALL_DTYPES
def test_an_archive(golden: Path, graph: Any) -> None:
    expected = graph(make.tensors())
    assert graph(lazyckpt.load(golden / "tensors.pt")) == expected
    assert graph(torch.load(golden / "tensors.pt")) == expected


@HAS_ALL_DTYPES
def test_safetensors(golden: Path, graph: Any) -> None:
    expected = make.dtypes() | {"scalar": torch.tensor(7), "empty": torch.empty(0, 3)}
    for found in (lazyckpt.load(golden / "tensors.safetensors"), load_file(golden / "tensors.safetensors")):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert graph(found[name].clone()) == graph(tensor), name


def drop_other_versions(found: Any, expected: Any) -> None:
    """Removes the options of optimizers and schedulers that only one version of torch has."""
    if isinstance(found, dict) and isinstance(expected, dict):
        shared = found.keys() & expected.keys()
        if not shared.isdisjoint({"params", "base_lrs"}):
            for options in (found, expected):
                kept = {name: options[name] for name in sorted(shared)}
                options.clear()
                options.update(kept)
        for name in shared:
            drop_other_versions(found[name], expected[name])
    elif isinstance(found, list) and isinstance(expected, list):
        for pair in zip(found, expected, strict=True):
            drop_other_versions(*pair)


def state_of(parts: dict[str, Any]) -> dict[str, Any]:
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in parts.items()}


def test_a_checkpoint(golden: Path, tmp_path: Path, graph: Any) -> None:
    """Into a training of another state: model, moments, schedule, random numbers, and the rest of the epoch."""
    shutil.copytree(golden / "run", tmp_path / "run")
    whole = [batch.tolist() for batch in make.loader()]
    parts = make.training(5)
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(**parts)
        loader = ckpt.track_loader(make.loader())
        assert ckpt.restore() == 1
        drawn = random.random(), numpy.random.rand(), torch.rand(3).tolist()
        assert [batch.tolist() for batch in loader] == whole[make.LOADER_BATCHES :]
    found, expected = state_of(parts), state_of(make.training(1))
    drop_other_versions(found, expected)
    assert graph(found) == graph(expected)
    make.seed_all()
    assert drawn == (random.random(), numpy.random.rand(), torch.rand(3).tolist())


def test_a_checkpoint_of_two_ranks(golden: Path, tmp_path: Path, graph: Any) -> None:
    shutil.copytree(golden / "sharded", tmp_path / "sharded")
    parts = make.pair(5)
    with lazyckpt.Checkpointer(tmp_path / "sharded") as ckpt:
        ckpt.track(**parts)
        assert ckpt.restore() == 1
    found, expected = state_of(parts), state_of(make.pair(1))
    drop_other_versions(found, expected)
    assert graph(found) == graph(expected)


def test_a_lightning_file(golden: Path, graph: Any) -> None:
    for load in (lazyckpt.load, torch.load):
        found, expected = load(golden / "lightning.ckpt"), make.lightning_checkpoint()
        drop_other_versions(found, expected)
        assert graph(found) == graph(expected)


def test_an_accelerate_folder(golden: Path, graph: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    parts = make.training(5)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(parts["model"], parts["optimizer"], parts["scheduler"])
    accelerator.load_state(str(golden / "accelerate"))
    drawn = torch.rand(3)
    expected = make.training(3)
    assert parts.pop("extra") and expected.pop("extra")  # not what accelerate saves
    found, expected = state_of(parts), state_of(expected)
    drop_other_versions(found, expected)
    assert graph(found) == graph(expected)
    make.seed_all()
    assert torch.equal(drawn, torch.rand(3))


def test_all_checksums(golden: Path) -> None:
    paths = [golden / name for name in ("tensors.pt", "tensors.safetensors", "run", "sharded", "lightning.ckpt")]
    result = CliRunner().invoke(app, ["verify", *map(str, paths)])
    assert result.exit_code == 0 and "5 ok" in result.stdout, result.output
