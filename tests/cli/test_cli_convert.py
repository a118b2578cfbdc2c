"""``lazyckpt convert``: writes the same tensors in another format, in little memory, or writes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Graph
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

import lazyckpt
from commands import fails, peak_bytes, run, run_json
from lazyckpt.conversion import stream
from lazyckpt.formats.torch_zip_reader import read_directory


def weights(count: int = 12, seed: int = 3) -> dict[str, torch.Tensor]:
    """Sizes from nothing to several chunks, in every order, of several dtypes."""
    random = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64]
    found = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    for i in range(count):
        numel = int(10 ** (1 + 5.3 * torch.rand(1, generator=random).item()))
        found[f"h.{i}.weight"] = torch.randint(0, 200, (numel,), generator=random).to(dtypes[i % len(dtypes)])
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("batch_bytes", [stream._BATCH_BYTES, 1])
def test_there_and_back(tmp_path: Path, batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest batches reuse each buffer while the engine may still copy from it."""
    monkeypatch.setattr(stream, "_BATCH_BYTES", batch_bytes)
    tensors = weights(40)
    torch.save(tensors, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors").exit_code == 0
    assert same(load_file(tmp_path / "b.safetensors"), tensors)
    assert run("convert", tmp_path / "b.safetensors", tmp_path / "shards", "--max-shard-size", "1MB").exit_code == 0
    assert run("convert", tmp_path / "shards", tmp_path / "c.pt").exit_code == 0
    assert same(torch.load(tmp_path / "c.pt"), tensors)
    result = run("convert", tmp_path / "c.pt", tmp_path / "d.pt")
    assert result.exit_code == 0 and same(torch.load(tmp_path / "d.pt"), tensors)
    assert "without a checksum" not in result.stdout  # those that lazyckpt wrote have them
    paths = [tmp_path / name for name in ("b.safetensors", "c.pt", "d.pt", "shards")]
    assert "carries no checksums" not in (shown := run("verify", *paths).stdout) and " 0 damaged, 0 unread" in shown
    assert run("diff", tmp_path / "a.pt", tmp_path / "shards").exit_code == 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_shards_are_named_filled_and_indexed_as_hugging_face_does(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    tensors = weights(30)
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "who": "me"})
    told = run_json("convert", tmp_path / "a.safetensors", tmp_path / "shards", "--max-shard-size", "300KB")
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    ordered = {name: tensors[name] for name in safe_open(tmp_path / "a.safetensors", "pt").offset_keys()}
    split = hub.split_torch_state_dict_into_shards(ordered, max_shard_size="300KB")
    assert index == {"metadata": split.metadata, "weight_map": split.tensor_to_filename} and split.is_sharded
    assert told["files"] == sorted([*split.filename_to_tensors, "model.safetensors.index.json"])
    assert same(
        hub.load_state_dict_from_file(tmp_path / "shards" / told["files"][0]),
        {name: tensors[name] for name in split.filename_to_tensors[told["files"][0]]},
    )
    for file in split.filename_to_tensors:
        assert safe_open(tmp_path / "shards" / file, "pt").metadata()["who"] == "me"
    assert run("convert", tmp_path / "shards", tmp_path / "one", "--max-shard-size", "5GB").exit_code == 0
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]
    assert same(load_file(tmp_path / "one/model.safetensors"), tensors)


def test_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    """The rest of the file is ignored, even what torch would refuse; no code in it runs."""
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        model = torch.nn.Linear(4, 3)
        ckpt.track(model=model, extra={"a": 1})
        ckpt.save(1, blocking=True)
    assert run("convert", tmp_path / "run", tmp_path / "model.safetensors", "--key", "model").exit_code == 0
    assert same(load_file(tmp_path / "model.safetensors"), model.state_dict())
    assert safe_open(tmp_path / "model.safetensors", "pt").metadata()["format"] == "pt"  # transformers asks for it

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"args": Evil(), "a.b": {"c": {"w": torch.ones(2)}}, "w": torch.ones(3)}, tmp_path / "evil.pt")
    assert run("convert", tmp_path / "evil.pt", tmp_path / "w.pt", "--key", "a.b.c").exit_code == 0
    assert same(torch.load(tmp_path / "w.pt"), {"w": torch.ones(2)})
    line = fails(2, "convert", tmp_path / "evil.pt", tmp_path / "x.pt")
    assert "args is a posix.mkdir" in line and not (tmp_path / "ran").exists()
    line = fails(2, "convert", tmp_path / "evil.pt", tmp_path / "x.pt", "--key", "nope")
    assert "there is no 'nope'; there is: args, a.b, w" in line


def test_a_torch_archive_keeps_ties_views_and_values(tmp_path: Path, graph: Graph) -> None:
    base = torch.arange(100.0)
    obj = OrderedDict(
        model={"a": base, "tied": base, "view": base[10:20], "strided": base.view(10, 10).t()[2:5]},
        optimizer={
            "state": {0: {"step": torch.tensor(3.0), "exp": base * 2}},
            "groups": [{"lr": 0.1, "betas": (1, 2)}],
        },
        values=[None, True, "x", b"y", {1, 2}, torch.bfloat16, 2 + 3j],
    )
    lazyckpt.save(obj, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.pt").exit_code == 0
    assert graph(torch.load(tmp_path / "b.pt", weights_only=False)) == graph(obj)


def test_what_safetensors_cannot_say_is_refused(tmp_path: Path) -> None:
    base = torch.ones(4)
    target = tmp_path / "x.safetensors"
    for obj, why in [
        ({"model": {"w": base}, "epoch": 3}, "'model' is a dict; give a part of it as key: model"),
        ({"w": base, "epoch": 3}, "'epoch' is an int"),
        ({7: base}, "7 is not a name"),
        ([base], "a dict of tensors, this is a list"),
        ({"a": base, "b": base[2:]}, "'a' and 'b' show parts of the same memory"),
        ({"a": base[:2], "b": base[2:]}, "'a' and 'b' show parts of the same memory"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is a torch._utils._rebuild_sparse_tensor"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "cannot hold torch.complex128"),
        ({"a": torch.ones(2, dtype=torch.complex64).conj()}, "conjugated"),
    ]:
        torch.save(obj, tmp_path / "x.pt")
        assert why in fails(2, "convert", tmp_path / "x.pt", target), why
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("options", [[], ["--max-shard-size", "100B"]], ids=["one file", "shards"])
def test_tied_weights_are_held_once_and_tied_again(options: list[str], tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(8, 4)
    model = torch.nn.ModuleDict({"wte": embedding, "body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 8, False)})
    model["head"].weight = embedding.weight
    torch.save(model.state_dict(), tmp_path / "a.pt")
    target = tmp_path / ("shards" if options else "b.safetensors")
    told = run_json("convert", tmp_path / "a.pt", target, *options)
    assert told["tied"] == {"head.weight": "wte.weight"}
    files = [target / name for name in told["files"] if name.endswith(".safetensors")] if options else [target]
    assert len(files) == (2 if options else 1)
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert held.keys() == {"wte.weight", "body.weight", "body.bias"}
    if not options:
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        assert load_model(model, target) == (set(), [])  # safetensors' own
        assert same(dict(model.state_dict()), torch.load(tmp_path / "a.pt"))
    source = target / "model.safetensors.index.json" if options else target
    assert "tied: head.weight = wte.weight" in run("convert", source, tmp_path / "c.pt").stdout
    back = torch.load(tmp_path / "c.pt")
    assert same(back, torch.load(tmp_path / "a.pt"))
    assert back["head.weight"].data_ptr() == back["wte.weight"].data_ptr()


def test_a_view_is_written_as_what_it_shows(tmp_path: Path) -> None:
    """``lazyckpt.save`` does this, too; ``safetensors.torch.save_file`` leaves it to the caller."""
    tensors = {"t": torch.randn(6, 4).t(), "part": torch.randn(50)[10:20:3], "plain": torch.randn(3)}
    torch.save(tensors, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors").exit_code == 0
    assert same(load_file(tmp_path / "b.safetensors"), tensors)


def test_nothing_appears_unless_all_of_it_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.pt"
    lazyckpt.save(weights(), source)
    assert "exists already" in fails(2, "convert", source, source)
    wrong_way_round = fails(2, "convert", tmp_path / "b.pt", source)
    assert "b.pt: cannot be opened: No such file" in wrong_way_round
    assert "name that ends in" in fails(2, "convert", source, tmp_path / "b.zip")
    assert "No such file" in fails(2, "convert", source, tmp_path / "no/b.pt")
    assert run("convert", source, tmp_path / "b", "--max-shard-size", "5 apples").exit_code == 2
    record = max(read_directory(source).records.values(), key=lambda record: record.nbytes)
    with source.open("r+b") as file:
        file.seek(record.offset + record.nbytes // 2)
        file.write(bytes([file.read(1)[0] ^ 1]))
    for target, options in (("b.safetensors", []), ("b.pt", []), ("b", ["--max-shard-size", "1MB"])):
        assert f"checksum does not match: {record.name}" in fails(2, "convert", source, tmp_path / target, *options)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_what_is_written_is_compared_with_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a buffer were overwritten before its copy, the file would not appear."""
    torch.save(weights(), tmp_path / "a.pt")
    read = stream._read

    def read_and_spoil(wanted: Any, pointers: Any) -> dict[int, int]:
        crcs = read(wanted, pointers)
        return {source: crc ^ (source == 5) for source, crc in crcs.items()}

    monkeypatch.setattr(stream, "_read", read_and_spoil)
    assert "the written bytes differ from those read" in fails(2, "convert", tmp_path / "a.pt", tmp_path / "b.pt")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_full_disk_is_told_before_and_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazyckpt.save(weights(), tmp_path / "a.pt")
    statvfs = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize, f_blocks = 1, statvfs.f_frsize, statvfs.f_blocks

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: Full)
        assert "are free" in fails(2, "convert", tmp_path / "a.pt", tmp_path / "b.pt")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_peak_memory_is_that_of_the_largest_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the peaks of converting 120 MiB and of converting its largest tensor, 20 MiB."""
    monkeypatch.chdir(tmp_path)
    tensors = {f"x{i}": torch.full((5 << 20,), float(i)) for i in range(6)}
    peaks = []
    for saved in ({"x": tensors["x1"]}, {"x": tensors["x1"]}, tensors):
        for name in ("a.pt", "b.safetensors", "c.pt"):
            Path(name).unlink(missing_ok=True)
        shutil.rmtree("shards", ignore_errors=True)
        lazyckpt.save(saved, "a.pt")
        steps = [["a.pt", "b.safetensors"], ["b.safetensors", "shards/model.bin", "--max-shard-size", "45MB"]]
        peaks.append(max(peak_bytes("convert", *words) for words in [*steps, ["shards", "c.pt"]]))
    assert same(torch.load("c.pt", mmap=True), tensors)
    assert peaks[2] - peaks[1] < 36 << 20
