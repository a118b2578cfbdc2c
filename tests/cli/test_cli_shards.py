"""The commands on an index and its shards, in both formats."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from commands import fails, run, run_json
from lazyckpt.conversion import stream
from lazyckpt.formats.torch_zip_reader import read_directory

FORMATS = {"pytorch_model.bin": torch.save, "model.safetensors": save_file}


def tensors(count: int = 9) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    return {f"h.{i}.weight": torch.randn(100 + 40 * i, generator=random) for i in range(count)}


def tied() -> dict[str, torch.Tensor]:
    """The state of a model whose head is its embedding."""
    found = {"wte.weight": torch.randn(50, 4), **tensors(6)}
    return {**found, "lm_head.weight": found["wte.weight"]}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def sharded(folder: Path, model: str, saved: dict[str, torch.Tensor], files: int = 3) -> Path:
    """Writes shards with the format's own library; returns the index."""
    folder.mkdir()
    stem, suffix = os.path.splitext(model)
    places = {name: f"{stem}-{i % files + 1:05d}-of-{files:05d}{suffix}" for i, name in enumerate(saved)}
    for file in set(places.values()):
        FORMATS[model]({name: saved[name] for name in saved if places[name] == file}, folder / file)  # type: ignore[operator]
    return rewritten(folder / f"{model}.index.json", places)


def rewritten(index: Path, places: dict[str, Any]) -> Path:
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def places_of(index: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return found


@pytest.mark.parametrize("model", FORMATS)
def test_shards_are_one_document(model: str, tmp_path: Path) -> None:
    """Every shard of an archive has records of the same names, which must not be mixed up."""
    saved = tensors()
    index = sharded(tmp_path / "a", model, saved)
    told = run_json("inspect", tmp_path / "a")
    assert told["path"] == str(index) and told["format"].endswith("in 3 files") and told["tensors"] == 9
    assert told["tensor_bytes"] == sum(tensor.nbytes for tensor in saved.values())
    assert told["bytes"] == sum(file.stat().st_size for file in tmp_path.glob("a/*-of-*"))
    entries = {entry["name"]: entry for entry in told["entries"] if entry["kind"] == "tensor"}
    assert {name: entry["file"] for name, entry in entries.items()} == places_of(index)
    assert not any(entry["note"] for entry in entries.values())
    (target,) = run_json("verify", tmp_path / "a")["targets"]
    assert (target["path"], target["state"]) == (str(index), "ok") and target["bytes"] == told["bytes"]
    lazyckpt.save(saved, tmp_path / "one.pt")
    assert run_json("diff", index, tmp_path / "one.pt")["same"]
    lazyckpt.save(saved | {"h.4.weight": saved["h.4.weight"] + 1}, tmp_path / "one.pt")
    (document,) = run_json("diff", tmp_path / "a", tmp_path / "one.pt", code=1)["documents"]
    assert document["changed"] == 1 and document["entries"][0]["name"] == "h.4.weight"


@pytest.mark.parametrize("model", FORMATS)
def test_an_index_leads_to_nothing_outside_of_its_folder(model: str, tmp_path: Path) -> None:
    """An index leads to no other index and not to itself."""
    save = FORMATS[model]
    (tmp_path / "a/sub").mkdir(parents=True)
    for file in (tmp_path / f"secret{model}", tmp_path / f"a/sub/{model}"):
        save({"w": torch.zeros(3)}, file)  # type: ignore[operator]
    index = tmp_path / f"a/{model}.index.json"
    names: list[Any] = [f"../secret{model}", str(tmp_path / f"secret{model}"), f"sub/{model}", f"{model}\0"]
    for name in [*names, "", ".", "..", 3, None, [model], index.name]:
        rewritten(index, {"w": name})
        for words in (["inspect", index], ["diff", index, index], ["convert", tmp_path / "a", tmp_path / "x.pt"]):
            line = fails(2, *words)
            assert "outside its folder" in line or "not an index" in line or "neither a torch.save" in line, name
        (target,) = run_json("verify", index, code=2 if name == index.name else 1)["targets"]
        assert target["state"] != "ok" and target["bytes"] == 0
    for text in ("", "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "x", "a": "y"}}', "[" * 100_000):
        index.write_text(text)
        assert "index" in fails(2, "inspect", index) or text == ""
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("model", FORMATS)
def test_a_shard_that_is_missing_or_of_another_model_is_damage(model: str, tmp_path: Path) -> None:
    """Checking each shard alone would miss this."""
    index = sharded(tmp_path / "a", model, tensors())
    places = places_of(index)
    first, second, _ = sorted(set(places.values()))
    assert run("verify", tmp_path / "a").exit_code == 0
    for change, name in ((places | {"more": first}, "more"), (places | {"h.0.weight": second}, "h.0.weight")):
        rewritten(index, change)
        for words in (["verify", index], ["verify", tmp_path / "a"]):
            assert run(*words).exit_code == 1 and f"disagree about '{name}'" in run(*words).stdout
        assert f"disagree about '{name}'" in fails(2, "inspect", index)
    rewritten(index, places)
    (tmp_path / "a" / first).unlink()
    result = run("verify", tmp_path / "a")
    assert result.exit_code == 1 and f"\n    {first}: cannot be opened: No such file" in result.stdout
    assert f"{first}: cannot be opened" in fails(2, "convert", tmp_path / "a", tmp_path / "x.pt")


def test_damage_is_told_by_shard_and_tensor(tmp_path: Path) -> None:
    index = sharded(tmp_path / "a", "pytorch_model.bin", tensors())
    file = tmp_path / "a" / places_of(index)["h.4.weight"]
    data = bytearray(file.read_bytes())
    data[read_directory(file).records["data/1"].offset + 5] ^= 1
    file.write_bytes(data)
    line = run("verify", tmp_path / "a").stdout.splitlines()[1]
    assert line.startswith(f"    {file.name}: record data/1 (h.4.weight): checksum ")
    assert "checksum does not match: data/1" in fails(2, "convert", index, tmp_path / "x.pt")
    assert sorted(os.listdir(tmp_path)) == ["a"]
    file.write_bytes(file.read_bytes()[:100])
    assert f"    {file.name}: truncated" in run("verify", index).stdout
    torch.save([torch.zeros(1)], file)
    assert "a shard holds named tensors" in fails(2, "inspect", index)


@pytest.mark.parametrize("batch_bytes", [stream._BATCH_BYTES, 1])
def test_archives_are_sharded_as_hugging_face_does_it(
    batch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small files pass through two buffers; one file holds a tied weight, once."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(stream, "_BATCH_BYTES", batch_bytes)
    saved = tied()
    torch.save(saved, tmp_path / "a.pt")
    told = run_json("convert", tmp_path / "a.pt", tmp_path / "b/pytorch_model.bin", "--max-shard-size", "1800B")
    split = hub.split_torch_state_dict_into_shards(
        saved, max_shard_size=1800, filename_pattern="pytorch_model{suffix}.bin"
    )
    index = json.loads((tmp_path / "b/pytorch_model.bin.index.json").read_text())
    assert index == {"metadata": split.metadata, "weight_map": split.tensor_to_filename} and split.is_sharded
    assert told["path"] == str(tmp_path / "b")
    assert told["files"] == sorted([*split.filename_to_tensors, "pytorch_model.bin.index.json"])
    loaded: dict[str, torch.Tensor] = {}
    for file, names in split.filename_to_tensors.items():
        part = torch.load(tmp_path / "b" / file)
        assert same(part, {name: saved[name] for name in names})
        loaded |= part
    assert loaded["lm_head.weight"].data_ptr() == loaded["wte.weight"].data_ptr()
    assert run("convert", tmp_path / "b", tmp_path / "c.pt").exit_code == 0
    back = torch.load(tmp_path / "c.pt")
    assert same(back, saved) and back["lm_head.weight"].data_ptr() == back["wte.weight"].data_ptr()
    assert run("convert", tmp_path / "b", tmp_path / "d.safetensors").exit_code == 0
    assert same(load_file(tmp_path / "d.safetensors"), {n: t for n, t in saved.items() if n != "lm_head.weight"})
    assert run("convert", tmp_path / "b", tmp_path / "e", "--max-shard-size", "1800B").exit_code == 0
    assert run("convert", tmp_path / "e", tmp_path / "f/model.bin", "--max-shard-size", "1GB").exit_code == 0
    assert os.listdir(tmp_path / "f") == ["model.bin"] and same(torch.load(tmp_path / "f/model.bin"), saved)
    assert run("diff", tmp_path / "b", tmp_path / "f").exit_code == 0
    assert "carries no" not in (shown := run("verify", tmp_path).stdout) and ", 0 damaged, 0 unreadable" in shown


def test_shards_hold_tensors_and_go_into_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lazyckpt.save({"model": tensors(2), "epoch": 3}, "a.pt")
    wanted = ["--max-shard-size", "1GB"]
    assert "'model' is a dict; give a part of it as key: model" in fails(2, "convert", "a.pt", "b/model.bin", *wanted)
    line = fails(2, "convert", "a.pt", "model.bin", "--key", "model", *wanted)
    assert ".: exists already; shards need a new folder: use DIR or DIR/model.bin" in line
    assert "at least one byte" in fails(2, "convert", "a.pt", "b", "--key", "model", "--max-shard-size", "0.5")
    assert os.listdir() == ["a.pt"]


def test_transformers_loads_what_convert_writes(tmp_path: Path) -> None:
    """Converts a tiny model with tied weights through every form that transformers knows."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).eval()
    words = torch.arange(8)[None]
    expected = model(words).logits
    model.save_pretrained(tmp_path / "0", max_shard_size="5KB")
    assert (tmp_path / "0/model.safetensors.index.json").exists()
    forms = [("pytorch_model.bin", "5KB"), ("model.safetensors", "5KB"), ("pytorch_model.bin", "5GB")]
    for number, (name, size) in enumerate([*forms, ("model.safetensors", "5GB")], 1):
        target = tmp_path / str(number)
        written = run_json("convert", tmp_path / str(number - 1), target / name, "--max-shard-size", size)["files"]
        assert (f"{name}.index.json" in written) == (size == "5KB")
        config.save_pretrained(target)
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(target, output_loading_info=True)
        assert not any(info.values()), info
        assert torch.equal(loaded.eval()(words).logits, expected)


def test_a_variant_has_its_name_inside_that_of_its_index(tmp_path: Path) -> None:
    """transformers and diffusers use model.safetensors.index.fp16.json and model.fp16-00001-of-…"""
    index = sharded(tmp_path / "a", "model.safetensors", tensors())
    for file in sorted(tmp_path.glob("a/*.safetensors")):
        file.rename(file.with_name(file.name.replace("model", "model.fp16")))
    rewritten(index, {name: file.replace("model", "model.fp16") for name, file in places_of(index).items()})
    index.rename(tmp_path / "a/model.safetensors.index.fp16.json")
    assert run_json("inspect", tmp_path / "a")["tensors"] == 9
    sharded(tmp_path / "b", "model.safetensors", tensors())
    assert run("diff", tmp_path / "a", tmp_path / "b").exit_code == 0


def test_what_an_index_does_not_name_is_a_file_of_its_own(tmp_path: Path) -> None:
    """No file of a folder is skipped, not even a shard of another split."""
    index = sharded(tmp_path / "a", "model.safetensors", tensors())
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "optimizer.bin"):
        lazyckpt.save({"w": torch.zeros(3)}, tmp_path / "a" / name)
    named = sorted([index.name, "model.safetensors", "model-00001-of-00002.safetensors", "optimizer.bin"])
    assert [Path(target["path"]).name for target in run_json("verify", tmp_path / "a")["targets"]] == named
    assert f"give one of them: {', '.join(named)}" in fails(2, "inspect", tmp_path / "a")
    index.write_text("{}")
    result = run("verify", tmp_path / "a")
    assert result.exit_code == 1 and "6 ok, 1 damaged, 0 unreadable" in result.stdout


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """Every file of a snapshot links to a name without suffix; a link to the same folder is just an alias."""
    index = sharded(tmp_path / "a", "pytorch_model.bin", tensors())
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(sorted((tmp_path / "a").iterdir())):
        file.rename(tmp_path / f"blobs/{number}")
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{number}")
    (tmp_path / "a").rmdir()
    assert run_json("inspect", tmp_path / "snapshot")["tensors"] == 9
    assert [target["state"] for target in run_json("verify", tmp_path)["targets"]] == ["ok"]
    (tmp_path / "snapshot/last.bin").symlink_to(places_of(tmp_path / f"snapshot/{index.name}")["h.0.weight"])
    assert len(run_json("verify", tmp_path)["targets"]) == 1
    (tmp_path / "blobs/0").unlink()
    assert run("verify", tmp_path).exit_code == 1
