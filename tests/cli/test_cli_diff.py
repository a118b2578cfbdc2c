"""``lazyckpt diff``: finds every kind of change, measures it as torch would, and needs little memory."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from commands import fails, peak_bytes, run, run_json
from lazyckpt.conversion import elements
from lazyckpt.errors import CorruptFileError
from lazyckpt.formats.torch_zip_reader import read_directory


def entries(a: Path, b: Path, code: int = 1) -> dict[str, Any]:
    (document,) = run_json("diff", a, b, code=code)["documents"]
    return {entry["name"]: entry for entry in document["entries"]}


def saved(obj: Any, path: Path) -> Path:
    torch.save(obj, path)
    return path


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    weights = {"h.0.weight": torch.randn(40, 30), "h.0.bias": torch.randn(30), "h.1.weight": torch.randn(7)}
    return {"model": weights, "step": 3, "lr": [0.1, 0.2], "half": torch.randn(9).to(torch.bfloat16)}


def test_what_is_the_same_is_the_same_whoever_wrote_it(tmp_path: Path) -> None:
    a = saved(state(), tmp_path / "a.pt")
    lazyckpt.save(state(), tmp_path / "b.pt")
    result = run("diff", a, tmp_path / "b.pt")
    assert result.exit_code == 0 and "6 the same" in result.stdout and len(result.stdout.splitlines()) == 1
    save_file(state()["model"], tmp_path / "a.safetensors")
    saved(state()["model"], tmp_path / "weights.pt")
    assert run_json("diff", tmp_path / "a.safetensors", tmp_path / "weights.pt")["same"]
    save_file(state()["model"], tmp_path / "b.safetensors", {"who": "me"})
    found = entries(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found["__metadata__.who"]["text"] == "nothing -> 'me'"
    conjugated = saved({"x": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "c.pt")
    assert entries(saved({"x": torch.ones(2, dtype=torch.complex64)}, tmp_path / "d.pt"), conjugated)


@pytest.mark.parametrize("piece_bytes", [elements._PIECE_BYTES, 64])
def test_the_largest_difference_is_that_of_torch(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces that tensors are cut into do not matter."""
    monkeypatch.setattr(elements, "_PIECE_BYTES", piece_bytes)
    old, new = state(), state()
    new["model"]["h.0.weight"][3, :5] += torch.randn(5)
    new["model"]["h.1.weight"] *= 1.5
    found = entries(saved(old, tmp_path / "a.pt"), saved(new, tmp_path / "b.pt"))
    largest = []
    for name in ("h.0.weight", "h.1.weight"):
        x, y = old["model"][name].double(), new["model"][name].double()
        entry = found[f"model.{name}"]
        assert entry["change"] == "changed" and entry["elements"] == x.numel()
        assert entry["differing"] == int((x != y).sum())
        largest.append(float((y - x).abs().max()))
        assert entry["max_abs"] == pytest.approx(largest[-1])
    assert found["model.h"]["max_abs"] == pytest.approx(max(largest)) and found["model.h"]["change"] is None
    assert set(found) == {"model.h", "model.h.0.weight", "model.h.1.weight"}


def test_every_kind_of_change_is_named(tmp_path: Path) -> None:
    old, new = state(), state()
    new["model"]["h.0.bias"] = torch.zeros(31)
    new["model"]["h.1.weight"] = new["model"]["h.1.weight"].double()
    new["model"]["new"] = torch.zeros(2, 2)
    new["lr"] = [0.1, 0.3]
    new["half"] = 7
    del new["step"]
    a, b = saved(old, tmp_path / "a.pt"), saved(new, tmp_path / "b.pt")
    found = {name: (e["change"], e["text"]) for name, e in entries(a, b).items() if e["change"]}
    assert found == {
        "model.h.0.bias": ("changed", "float32 30 -> float32 31"),
        "model.h.1.weight": ("changed", "float32 7 -> float64 7"),
        "model.new": ("only in B", "float32 2 x 2"),
        "lr": ("changed", "[0.1, 0.2] -> [0.1, 0.3]"),
        "half": ("changed", "bfloat16 9 -> 7"),
        "step": ("only in A", "3"),
    }
    shown = run("diff", a, b)
    assert shown.exit_code == 1 and "4 changed, 1 only in B, 1 only in A, 1 the same" in shown.stdout
    assert run("diff", a, b, "--depth", "1").stdout.count("─ ") == 4
    assert entries(b, a)["step"]["change"] == "only in B"


def test_a_value_is_compared_whole_not_as_it_is_shown(tmp_path: Path) -> None:
    """NaN equals itself; 0.0 differs from -0.0, and 1 from True."""
    cycle: list[Any] = [1]
    cycle.append(cycle)
    same = {"nan": math.nan, "set": {"b", "a"}, "cycle": cycle, "array": numpy.arange(3), "rng": random.Random(1)}
    a = saved(same | {"long": [0] * 5000, "text": "x" * 500 + "a", "zero": 0.0, "one": 1}, tmp_path / "a.pt")
    b = saved(same | {"long": [0] * 4999 + [1], "text": "x" * 500 + "b", "zero": -0.0, "one": True}, tmp_path / "b.pt")
    assert set(entries(a, b)) == {"long", "text", "zero", "one"}
    assert run_json("diff", a, a)["same"]
    assert set(entries(saved({"a": numpy.arange(3)}, a), saved({"a": numpy.arange(1, 4)}, b))) == {"a"}


def test_bits_decide_not_values(tmp_path: Path) -> None:
    old = torch.tensor([math.nan, math.inf, 0.0, 1.0])
    new = torch.tensor([math.nan, math.inf, -0.0, 3.0])
    entry = entries(saved({"x": old}, tmp_path / "a.pt"), saved({"x": new}, tmp_path / "b.pt"))["x"]
    assert entry["differing"] == 2 and entry["max_abs"] == 2
    assert run("diff", tmp_path / "a.pt", tmp_path / "a.pt").exit_code == 0
    saved({"x": torch.tensor([0.0, math.inf, 0.0, 1.0])}, tmp_path / "b.pt")
    assert entries(tmp_path / "a.pt", tmp_path / "b.pt")["x"]["max_abs"] is None
    assert "nan" in run("diff", tmp_path / "a.pt", tmp_path / "b.pt").stdout


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float16, torch.uint8]
)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    old, new = torch.zeros(6).to(dtype), torch.tensor([0.0, 0, 1, 0, 0, 0]).to(dtype)
    entry = entries(saved({"x": old}, tmp_path / "a.pt"), saved({"x": new}, tmp_path / "b.pt"))["x"]
    assert (entry["differing"], entry["elements"], entry["max_abs"]) == (1, 6, 1.0)


def test_strides_do_not_matter_what_tensors_show_does(tmp_path: Path) -> None:
    x = torch.randn(6, 8)
    padded = torch.zeros(6, 20)
    padded[:, 2:18:2] = x
    saved({"x": x}, tmp_path / "x.pt")
    for same in (x.t().contiguous().t(), padded[:, 2:18:2], torch.cat([x, x])[6:]):
        assert run("diff", tmp_path / "x.pt", saved({"x": same}, tmp_path / "same.pt")).exit_code == 0
    other = x.t().contiguous().t()
    other[1, 2] += 1
    assert entries(tmp_path / "x.pt", saved({"x": other}, tmp_path / "y.pt"))["x"]["differing"] == 1
    array = numpy.arange(120 * 120, dtype="f8").reshape(120, 120)
    lazyckpt.save({"x": array}, tmp_path / "c.pt")
    lazyckpt.save({"x": numpy.asfortranarray(array)}, tmp_path / "f.pt")
    lazyckpt.save({"x": array.T}, tmp_path / "t.pt")
    assert run("diff", tmp_path / "c.pt", tmp_path / "f.pt").exit_code == 0
    assert entries(tmp_path / "c.pt", tmp_path / "t.pt")["x"]["differing"] == 120 * 119


def test_damage_around_a_view_is_found(tmp_path: Path) -> None:
    """Regression: of a tensor that views a part of its storage, no byte was checked."""
    whole = torch.randn(3000)
    torch.save({"a": whole[:10], "b": whole[1000:]}, tmp_path / "a.pt")
    torch.save({"a": torch.zeros(10), "b": whole[1000:].clone()}, tmp_path / "b.pt")
    data = (tmp_path / "a.pt").read_bytes()
    at = data.index(whole.numpy().tobytes())
    for damaged in (at, at + 4 * 500, at + 4 * 1500):
        (tmp_path / "a.pt").write_bytes(data[:damaged] + bytes([data[damaged] ^ 1]) + data[damaged + 1 :])
        with pytest.raises(CorruptFileError, match="data/0"):
            lazyckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")


def test_ties_are_part_of_what_is_saved(tmp_path: Path) -> None:
    x = torch.randn(4)
    tied, apart = saved({"a": x, "b": x}, tmp_path / "a.pt"), saved({"a": x, "b": x.clone()}, tmp_path / "b.pt")
    assert entries(tied, apart)["b"]["text"] == "float32 4, tied to a -> not tied"
    assert run("diff", tied, tied).exit_code == 0


def test_checkpoints_and_trainers_folders(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(model=model)
        first = ckpt.save(1, blocking=True).result()
        torch.nn.init.zeros_(model.bias)
        ckpt.save(2, blocking=True)
    assert list(entries(first, tmp_path / "run")) == ["model.bias"]  # the run's newest
    assert run_json("diff", tmp_path / "run", tmp_path / "run/step-00000002/state.pt")["same"]
    for trainer in ("one", "two"):
        (tmp_path / trainer).mkdir()
        save_file({"x": torch.ones(3)}, tmp_path / trainer / "model.safetensors")
        saved({"lr": 0.1}, tmp_path / trainer / "scheduler.pt")
    assert run_json("diff", tmp_path / "one", tmp_path / "two")["same"]
    saved({"lr": 0.2}, tmp_path / "two/scheduler.pt")
    saved({"x": 1}, tmp_path / "two/optimizer.pt")
    found = run_json("diff", tmp_path / "one", tmp_path / "two", code=1)
    assert found["only_in_b"] == ["optimizer.pt"] and found["only_in_a"] == []
    assert {d["name"]: d["changed"] for d in found["documents"]} == {"model.safetensors": 0, "scheduler.pt": 1}
    assert "optimizer.pt  only in" in run("diff", tmp_path / "one", tmp_path / "two").stdout


def test_trouble_is_not_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    lazyckpt.save({"x": torch.zeros(4000)}, path)
    lazyckpt.save({"x": torch.zeros(4000)}, tmp_path / "b.pt")
    assert "No such file" in fails(2, "diff", path, tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "no checkpoint in this folder" in fails(2, "diff", path, tmp_path / "empty")
    with path.open("r+b") as file:
        file.seek(read_directory(path).records["data/0"].offset + 77)
        file.write(b"\x01")
    assert "data/0: checksum does not match" in fails(2, "diff", path, tmp_path / "b.pt")


def test_two_large_files_do_not_need_their_memory(tmp_path: Path) -> None:
    tensors = {f"x{i}": torch.full((8 << 20,), 0.5) for i in range(4)}  # 128 MiB
    lazyckpt.save(tensors, tmp_path / "a.pt")
    tensors["x3"][7] += 1
    lazyckpt.save(tensors, tmp_path / "b.pt")
    small = saved({"x": torch.zeros(3)}, tmp_path / "small.pt"), saved({"x": torch.ones(3)}, tmp_path / "other.pt")
    peak_bytes("diff", *small)  # imports what diff needs
    assert peak_bytes("diff", tmp_path / "a.pt", tmp_path / "b.pt") < 120 << 20  # less than one of the files
    assert "1 of 8,388,608 elements" in run("diff", tmp_path / "a.pt", tmp_path / "b.pt").stdout
