"""Looking at a part of a file, and converting a part of it under other names and dtypes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from commands import run, run_json
from lazyckpt.errors import ConfigError, CorruptFileError, UnsupportedFormatError

STATE = {
    "module.encoder.weight": torch.randn(300, 40),
    "module.encoder.bias": torch.randn(40).bfloat16(),
    "module.head.weight": torch.randn(40, 30).t(),
    "module.steps": torch.tensor(7),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tied = {**STATE, "module.tied": STATE["module.encoder.weight"]}
    torch.save({"model": tied, "epoch": 3}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


# convert


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_convert_takes_a_part_under_other_names_and_dtypes(file: Path, suffix: str, dtype: torch.dtype | None) -> None:
    made = lazyckpt.convert(
        file,
        file.with_name(f"y{suffix}"),
        key="model",
        only=["module.encoder.*", "*.steps"],
        rename={"module.": ""},
        dtype=dtype,
    )
    loaded = lazyckpt.load(made.path)
    assert sorted(loaded) == ["encoder.bias", "encoder.weight", "steps"]
    for name, tensor in loaded.items():
        expected = STATE[f"module.{name}"]
        expected = expected.to(dtype) if dtype and expected.is_floating_point() else expected
        assert tensor.dtype is expected.dtype and torch.equal(tensor, expected)
    assert made.bytes == made.path.stat().st_size
    assert lazyckpt.verify(made.path).ok


def test_convert_keeps_ties_and_shapes_in_another_dtype(file: Path) -> None:
    made = lazyckpt.convert(file, file.with_name("y.pt"), dtype=torch.float16)
    loaded = torch.load(made.path)["model"]
    assert loaded["module.tied"].untyped_storage()._cdata == loaded["module.encoder.weight"].untyped_storage()._cdata
    for name, expected in STATE.items():
        assert torch.equal(loaded[name], expected.half() if expected.is_floating_point() else expected)


def test_convert_in_shards(file: Path) -> None:
    done: list[tuple[int, int]] = []
    folder = file.with_name("shards")
    made = lazyckpt.convert(
        file,
        folder,
        key="model",
        dtype=torch.bfloat16,
        max_shard_bytes=5000,
        progress=lambda _, now, all: done.append((now, all)),
    )
    assert len(made.files) > 2 and done[-1][0] == done[-1][1] == sum(t.numel() * 2 for t in STATE.values()) + 6


@pytest.mark.parametrize(
    "how, message",
    [
        ({"key": "model", "only": ["nothing*"]}, r"no name matches nothing\*; there is: module\.encoder\.weight"),
        ({"only": ["*"], "key": "epoch"}, "with names as keys; give a key"),
        ({"key": "model", "rename": lambda name: "a"}, "both .* become 'a'"),
        ({"dtype": torch.int8}, "expected a floating-point dtype"),
        ({"key": "modl"}, "there is no 'modl'; there is: model, epoch"),
    ],
)
def test_convert_refuses_what_makes_no_sense(file: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lazyckpt.convert(file, file.with_name("y.pt"), **how)
    assert not file.with_name("y.pt").exists()


def test_convert_on_the_command_line(file: Path) -> None:
    target = file.with_name("y.safetensors")
    options = ["--key", "model", "--only", "*weight", "--strip-prefix", "module.", "--rename", "module.head.=top."]
    run_json("convert", file, target, *options, "--dtype", "bfloat16")
    loaded = lazyckpt.load(target)
    assert {k: v.dtype for k, v in loaded.items()} == dict.fromkeys(["encoder.weight", "top.weight"], torch.bfloat16)
    for option, wrong, message in (("--rename", "a", "OLD=NEW"), ("--dtype", "bfloat", "no dtype of torch")):
        done = run("convert", file, file.with_name("z.pt"), option, wrong)
        assert done.exit_code == 2 and message in done.output


# inspect


def test_inspect_shows_what_is_filtered(file: Path) -> None:
    assert list(lazyckpt.inspect(file, filter="encoder").tensors) == [
        "model.module.encoder.weight",
        "model.module.encoder.bias",
    ]
    found = lazyckpt.inspect(file, filter="*.weight")
    assert list(found.tensors) == ["model.module.encoder.weight", "model.module.head.weight"]
    assert found.root.tensors == 2 and found.root.nbytes == 4 * (300 * 40 + 40 * 30)
    assert lazyckpt.inspect(file, filter="nothing").root.children == []
    assert list(lazyckpt.inspect(file, filter="model.module").tensors) == list(
        lazyckpt.inspect(file, filter="model").tensors
    )


def test_inspect_computes_statistics(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(2_000_000),  # more than one piece
        "holes": torch.tensor([1.0, math.nan, -2.0, math.inf, -math.inf, math.nan]),
        "all nan": torch.full((3,), math.nan),
        "integers": torch.arange(-3, 9),
        "bools": torch.tensor([True, False, True]),
        "half": torch.tensor([0.5, 1.5]).half(),
        "empty": torch.empty(0),
        "view": torch.arange(10.0)[2:5],
        "transposed": torch.arange(6.0).view(2, 3).t(),
    }
    lazyckpt.save(state, tmp_path / "x.pt")
    read: list[tuple[int, int]] = []
    found = lazyckpt.inspect(tmp_path / "x.pt", stats=True, progress=lambda _, now, all: read.append((now, all)))
    for name, node in found.tensors.items():
        values = state[name].double()
        finite = values[values.isfinite()]
        expected = [finite.min(), finite.max(), finite.mean()] if len(finite) else [None] * 3
        assert [node.stats.min, node.stats.max] == expected[:2], name
        assert node.stats.mean == (None if expected[2] is None else pytest.approx(float(expected[2])))
        assert (node.stats.nan, node.stats.inf) == (int(values.isnan().sum()), int(values.isinf().sum()))
    assert read[-1][0] == read[-1][1] == sum(tensor.nbytes for tensor in state.values())
    shown = run("inspect", tmp_path / "x.pt", "--stats", "--filter", "holes").output
    assert "MEAN" in shown and "-2   1    -0.5  2    2" in shown
    told = run_json("inspect", tmp_path / "x.pt", "--stats", "--filter", "holes")["entries"]
    assert told[0]["stats"] == {"min": -2.0, "max": 1.0, "mean": -0.5, "nan": 2, "inf": 2}


def test_statistics_of_damaged_tensors_are_refused(file: Path) -> None:
    data = bytearray(file.read_bytes())
    at = data.index(STATE["module.encoder.weight"].numpy().tobytes())
    data[at + 5] ^= 1
    file.write_bytes(data)
    lazyckpt.inspect(file)
    with pytest.raises(CorruptFileError, match="checksum"):
        lazyckpt.inspect(file, stats=True)


# ls


def test_ls_shows_metrics(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(state={})
        ckpt.save(1, metrics={"loss": 0.123456, "accuracy": math.nan}).result()
        ckpt.save(2).result()
    assert "loss 0.1235, accuracy nan  ok" in run("ls", tmp_path).output
    assert [c["metrics"] for c in run_json("ls", tmp_path)["checkpoints"]] == [{}, {"loss": 0.123456, "accuracy": None}]


def test_ls_knows_the_folders_of_trainers(tmp_path: Path) -> None:
    for number, step in enumerate((100, 200, 1000)):
        folder = tmp_path / "hf" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * (number + 1))
        (folder / "trainer_state.json").write_text(
            json.dumps({"best_model_checkpoint": str(tmp_path / "hf/checkpoint-200")})
        )
    told = run_json("ls", tmp_path / "hf")["checkpoints"]
    assert [(c["name"], c["step"], c["note"]) for c in told] == [
        ("checkpoint-1000", 1000, "newest"),
        ("checkpoint-200", 200, "best"),
        ("checkpoint-100", 100, ""),
    ]
    pl = tmp_path / "pl"
    pl.mkdir()
    (pl / "epoch=0-step=50.ckpt").write_bytes(b"x")
    os.symlink("epoch=0-step=50.ckpt", pl / "last.ckpt")
    shown = run("ls", pl).output
    assert "newest" in shown and "link to epoch=0-step=50.ckpt" in shown


def test_ls_knows_checkpoints_by_what_they_hold(tmp_path: Path) -> None:
    """Regression: Accelerate's step_20 and torchtitan's step-20 were "no checkpoints"."""
    for name, file in (
        ("step_20", "random_states_0.pkl"),
        ("step_100", "random_states_1.pkl"),
        ("best", "random_states_0.pkl"),
        ("step-300", ".metadata"),
        (".tmp-step_400-abc123", "random_states_0.pkl"),
        ("step_500", "figure.png"),
        ("logs", "events"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(b"x")
    (tmp_path / "step_600").write_bytes(b"a file")
    told = [(c["name"], c["step"]) for c in run_json("ls", tmp_path)["checkpoints"]]
    assert told == [("step-300", 300), ("step_100", 100), ("step_20", 20), ("best", None)]


# other files


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda path: np.savez(path.open("wb"), a=np.ones(3)), "numpy.load"),
        (lambda path: np.save(path.open("wb"), np.ones(3)), "numpy.load"),
        (lambda path: path.write_bytes(b"\x80\x04}\x94."), "a plain pickle, not of torch.save: pickle.load"),
        (
            lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path),
            "a TorchScript module: torch.jit.load",
        ),
        (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(50)), "an HDF5 file: h5py"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_files_are_told_with_what_reads_them(make: Any, what: str, tmp_path: Path) -> None:
    make(tmp_path / "x.pt")
    for use in (lazyckpt.load, lazyckpt.inspect):
        with pytest.raises(UnsupportedFormatError, match=what):
            use(tmp_path / "x.pt")  # type: ignore[operator]
