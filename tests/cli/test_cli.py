"""The commands: what they print as text and as JSON, where, and how they exit."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from commands import commands, complete, fails, run, run_json
from lazyckpt import _engine
from lazyckpt.conversion.inert import read_inert
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.pipeline.budget import auto_ring_bytes
from lazyckpt.tools import checksums, inspect, verify
from lazyckpt.tools.tree import MAX_DEPTH, Tree
from lazyckpt.tools.units import size


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def offset_of(path: Path, record: str) -> int:
    return read_directory(path).records[record].offset


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 10, 20, 30, then a rollback to 10 and step 15: the newest."""
    root = tmp_path / "run"
    model = Tied()
    with lazyckpt.Checkpointer(root) as ckpt:
        ckpt.track(model=model, extra={"note": "hello", "values": [1, 2, 3]})
        for step in (10, 20, 30):
            ckpt.save(step, blocking=True)
        ckpt.restore(step=10)
        ckpt.save(15, blocking=True)
    return root


# ls


def test_ls_shows_the_last_saved_first_and_its_parent(folder: Path) -> None:
    header, *lines = run("ls", folder).stdout.splitlines()
    assert header.split() == ["STEP", "SEQUENCE", "PARENT", "AGE", "SIZE", "STATE"]
    assert [" ".join(line.split()[:3]) for line in lines] == ["15 4 1", "30 3 2", "20 2 1", "10 1 -"]
    assert ["newest" in line for line in lines] == [True, False, False, False]
    rows = run_json("ls", folder)["checkpoints"]
    assert [(row["step"], row["newest"]) for row in rows] == [(15, True), (30, False), (20, False), (10, False)]
    assert rows[0]["bytes"] == (folder / "step-00000015/state.pt").stat().st_size


def test_ls_shows_metrics(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, metrics={"loss": 0.123456, "acc\033": float("nan")}, blocking=True)
        ckpt.save(2, blocking=True)
    header, *lines = run("ls", tmp_path).stdout.splitlines()
    assert header.split()[-2:] == ["METRICS", "STATE"]
    assert "loss 0.1235, acc\\x1b nan" in lines[1] and lines[0].split()[-3:] == ["-", "ok,", "newest"]
    assert [row["metrics"] for row in run_json("ls", tmp_path)["checkpoints"]] == [
        {},
        {"loss": 0.123456, "acc\033": None},
    ]


def test_ls_says_why_a_checkpoint_is_broken(folder: Path) -> None:
    os.truncate(folder / "step-00000020/state.pt", 100)
    (folder / "step-00000030/manifest.json").write_text("{")
    (folder / "step-00000010/manifest.json").unlink()
    lines = {line.split()[0]: line for line in run("ls", folder).stdout.splitlines()[1:]}
    assert "broken: state.pt has 100 bytes" in lines["20"]
    assert "broken: not a manifest" in lines["30"]
    assert "broken: no checkpoint: there is no manifest.json" in lines["10"]
    assert "ok, newest" in lines["15"]
    rows = {row["step"]: row for row in run_json("ls", folder)["checkpoints"]}
    assert not rows[20]["ok"] and rows[20]["reason"].startswith("state.pt has 100 bytes") and rows[20]["bytes"] > 100


def test_ls_tells_a_checkpoint_being_written_from_one_left_behind(folder: Path) -> None:
    dead, alive, lone = (f".tmp-{name}-{0:032x}" for name in ("step-00000040", "step-00000050", "lone.pt"))
    for name in (dead, alive):
        (folder / name).mkdir()
    (folder / dead / "state.pt").write_bytes(bytes(2048))
    (folder / lone).write_bytes(b"x")
    (folder / ".tmp-theirs").mkdir()
    lock = os.open(folder / alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        shown = run("ls", folder).stdout
        found = {entry["name"]: entry for entry in run_json("ls", folder)["leftovers"]}
    finally:
        os.close(lock)
    states = {name: entry["state"] for name, entry in found.items()}
    assert states == {dead: "abandoned", alive: "in use", lone: "unknown"}
    assert found[dead]["bytes"] == 2048
    assert f"{dead} (2.00 KiB): left by a run that died" in shown
    assert f"{alive} (0 B): being written now" in shown


def test_ls_of_what_is_no_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    line = run("ls", tmp_path / "empty").stdout
    assert line.startswith("no checkpoints in")
    assert "No such file" in fails(2, "ls", tmp_path / "missing")
    assert "a checkpoint itself" in fails(2, "ls", folder / "step-00000010")


def test_a_folder_of_runs_says_which(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "other").mkdir()
    assert "; there are some in its folders hf, run" in run("ls", tmp_path).stdout
    assert fails(2, "inspect", tmp_path).endswith("no checkpoint in this folder; there are some in its folders hf, run")
    for number in range(10):
        (tmp_path / f"r{number}" / "step-00000001").mkdir(parents=True)
    assert fails(2, "inspect", tmp_path).endswith(" hf, r0, r1, r2, r3, r4, r5, r6, r7, r8, …")


# inspect


def test_inspect_shows_modules_with_their_sums_and_counts_tied_tensors_once(folder: Path) -> None:
    """The numbers equal those of the model."""
    entries = {entry["name"]: entry for entry in run_json("inspect", folder)["entries"]}
    embed, linear = 50 * 8 * 4, (8 * 8 + 8) * 4
    assert entries["model"]["bytes"] == embed + 2 * linear and entries["model"]["tensors"] == 6
    assert entries["model.blocks"]["bytes"] == 2 * linear
    weight = entries["model.blocks.1.weight"]
    assert weight["shape"] == [8, 8] and weight["dtype"] == "float32"
    assert entries["model.embed.weight"]["bytes"] == embed
    head = entries["model.head.weight"]
    assert head["tied_to"] == "model.embed.weight" and head["bytes"] == 0
    assert head["record"] == entries["model.embed.weight"]["record"]
    assert entries["extra.note"]["value"] == "'hello'" and entries["extra.values"]["value"] == "[1, 2, 3]"

    shown = run("inspect", folder).stdout
    assert shown.startswith(str(folder / "step-00000015/state.pt")) and "step 15, sequence 4" in shown
    (line,) = [line for line in shown.splitlines() if "head.weight" in line]
    assert line.split()[-3:] == ["tied", "to", "model.embed.weight"] and "50 x 8" in line
    (line,) = [line for line in shown.splitlines() if "─ blocks" in line]
    assert line.startswith("   576 B  ") and "4 tensors" in line


def test_inspect_to_a_depth_keeps_the_sums(folder: Path) -> None:
    deep, flat = run_json("inspect", folder), run_json("inspect", folder, "--depth", "1")
    assert {entry["name"] for entry in flat["entries"]} == {"model", "extra", "rng"}
    sums = {entry["name"]: entry["bytes"] for entry in deep["entries"]}
    assert all(sums[entry["name"]] == entry["bytes"] for entry in flat["entries"])
    assert run_json("inspect", folder, "--depth", "0")["entries"] == []


def test_inspect_reads_no_tensor(folder: Path) -> None:
    file = folder / "step-00000015/state.pt"
    before = run("inspect", file, "--json").stdout
    flip(file, offset_of(file, "data/0"))
    assert run("verify", file).exit_code == 1
    assert run("inspect", file, "--json").stdout == before


def test_inspect_runs_no_code_of_the_file(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "evil.pt"
    torch.save({"a": torch.zeros(3), "evil": Evil()}, path)
    assert "mkdir(" in run("inspect", path).stdout
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists()  # the trap works


def test_inspect_of_a_whole_module_needs_none_of_its_classes(tmp_path: Path) -> None:
    torch.save(Tied(), tmp_path / "model.pt")
    names = {e["name"] for e in run_json("inspect", tmp_path / "model.pt")["entries"] if e["kind"] == "tensor"}
    assert names == set(Tied().state_dict())


def test_inspect_of_every_kind_of_tensor_and_value(tmp_path: Path) -> None:
    base = torch.zeros(100)
    obj = {
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "half": torch.zeros(2, dtype=torch.bfloat16),
        "unsigned": torch.zeros(2, dtype=torch.uint16),
        "parameter": torch.nn.Parameter(torch.zeros(2, 2)),
        "view": base[:10],
        "other_view": base[10:20],
        "sparse": torch.eye(4).to_sparse(),
        "storage": torch.zeros(4).untyped_storage(),
        "meta": torch.zeros(5, device="meta"),
        "array": numpy.arange(3),
        "large": numpy.zeros((100, 200)),
        "long": "y" * 5000,
        "number": 10**5000,
        "bytes": b"x" * 5000,
        "list": list(range(5000)),
        "nothing": {},
        7: None,
    }
    lazyckpt.save(obj, tmp_path / "odd.pt")
    entries = {entry["name"]: entry for entry in run_json("inspect", tmp_path / "odd.pt")["entries"]}
    assert entries["scalar"]["shape"] == [] and entries["scalar"]["dtype"] == "int64"
    assert entries["empty"]["shape"] == [0, 3] and entries["empty"]["bytes"] == 0
    assert entries["half"]["dtype"] == "bfloat16" and entries["unsigned"]["dtype"] == "uint16"
    assert entries["parameter"]["shape"] == [2, 2]
    assert entries["view"]["bytes"] == 400 and entries["view"]["note"] == "a view: 40 bytes of 400"
    assert entries["other_view"]["note"] == "shares memory with view" and entries["other_view"]["bytes"] == 0
    assert entries["sparse"]["bytes"] == 2 * 4 * 8 + 4 * 4 and entries["sparse"]["tensors"] == 2
    assert entries["storage"]["shape"] == [16]
    assert entries["meta"]["shape"] == [5] and entries["meta"]["bytes"] == 0
    assert entries["array"]["value"] == "NumPy array (3,)"
    large = entries["large"]
    assert (large["shape"], large["dtype"], large["bytes"]) == ([100, 200], "f8", 160_000)
    assert large["note"] == "NumPy array"
    assert entries["7"]["value"] == "None" and entries["nothing"]["value"] == "{}"
    assert max(len(entry.get("value", "")) for entry in entries.values()) < 100


def test_inspect_of_safetensors(tmp_path: Path) -> None:
    save_file({"h.0.a": torch.zeros(4, 2), "h.1.a": torch.zeros(3)}, tmp_path / "a.safetensors", {"who": "me"})
    entries = {entry["name"]: entry for entry in run_json("inspect", tmp_path / "a.safetensors")["entries"]}
    assert entries["h"]["bytes"] == 44 and entries["h.0.a"]["shape"] == [4, 2] and entries["h.0.a"]["crc32"] is None
    assert "who: 'me'" in run("inspect", tmp_path / "a.safetensors").stdout


def test_inspect_survives_hostile_shapes_of_objects(tmp_path: Path) -> None:
    cycle: list[Any] = [torch.zeros(1)]
    cycle.append(cycle)
    bomb: list[Any] = [torch.zeros(1)]
    for _ in range(60):
        bomb = [bomb, bomb, bomb]  # 3^60 paths
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep, 1]
    obj = {"cycle": cycle, "bomb": bomb, "deep": deep, ".".join("a" * 500): torch.zeros(1), "\x1b[31m\n[b]": 1}
    torch.save(obj, tmp_path / "hostile.pt")
    result = run("inspect", tmp_path / "hostile.pt")
    assert result.exit_code == 0
    assert "the same object as cycle" in result.stdout and "nested too deep" in result.stdout
    assert "\x1b" not in result.stdout and "\\x1b[31m\\n[b]" in result.stdout
    entries = run_json("inspect", tmp_path / "hostile.pt")["entries"]
    assert len(entries) < 60 * 3 * 3
    root = Tree("x", read_inert(tmp_path / "hostile.pt", read_directory(tmp_path / "hostile.pt"))).root
    assert max(node.depth for node in root.walk()) == MAX_DEPTH


def test_inspect_of_what_cannot_be_told(tmp_path: Path, folder: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "torch before 1.6" in fails(2, "inspect", tmp_path / "old.pt")
    (tmp_path / "text").write_text("hello world")
    assert "neither a torch.save archive" in fails(2, "inspect", tmp_path / "text")
    assert "No such file" in fails(2, "inspect", tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "no checkpoint in this folder" in fails(2, "inspect", tmp_path / "empty")
    (tmp_path / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull fetches it" in fails(2, "inspect", tmp_path / "a.safetensors")
    file = folder / "step-00000015/state.pt"
    flip(file, offset_of(file, "data.pkl") + 30)
    assert "data.pkl: checksum does not match" in fails(2, "inspect", folder)


@pytest.mark.filterwarnings("ignore")  # torch warns that nothing is distributed
def test_a_distributed_checkpoint_is_told_from_an_empty_folder(tmp_path: Path) -> None:
    """It is read as any file, and one whose save did not end is not passed over."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "a/dcp")
    lazyckpt.save({"w": torch.arange(4.0)}, tmp_path / "a/optimizer.pt")
    states = {Path(t["path"]).parent.name: t["state"] for t in run_json("verify", tmp_path / "a")["targets"]}
    assert states == {"dcp": "ok", "a": "ok"}
    (tmp_path / "a/dcp/.metadata").unlink()
    states = {Path(t["path"]).name: t["state"] for t in run_json("verify", tmp_path / "a", code=2)["targets"]}
    assert states == {"dcp": "unreadable", "optimizer.pt": "ok"}  # a file that was not read is not whole
    for words in (["inspect", tmp_path / "a/dcp"], ["verify", tmp_path / "a/dcp"], ["diff", *[tmp_path / "a/dcp"] * 2]):
        assert "their save did not end" in fails(2, *words)


# verify


@pytest.mark.parametrize("read_bytes", [checksums._READ_BYTES, 4096])
def test_verify_names_the_damaged_record_and_its_tensor(
    folder: Path, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Combines the checksums of parts, however the file is cut into reads."""
    monkeypatch.setattr(checksums, "_READ_BYTES", read_bytes)
    assert run("verify", folder).exit_code == 0
    file = folder / "step-00000020/state.pt"
    entries = {entry["name"]: entry for entry in run_json("inspect", file)["entries"]}
    flip(file, entries["model.blocks.1.bias"]["offset"])
    record = entries["model.blocks.1.bias"]["record"]
    result = run("verify", folder)
    assert result.exit_code == 1
    assert f"state.pt: record {record} (model.blocks.1.bias): checksum" in result.stdout
    assert "state.pt: the whole file: checksum" in result.stdout and result.stdout.count("record ") == 1
    assert "3 ok, 1 damaged, 0 unreadable" in result.stdout
    assert run("verify", folder / "step-00000015").exit_code == 0
    alone = run("verify", file)
    assert alone.exit_code == 1 and f"record {record} (model.blocks.1.bias)" in alone.stdout


def test_verify_finds_any_flipped_bit_of_a_checkpoint(folder: Path, trials: Any) -> None:
    checkpoint = folder / "step-00000010"
    file = checkpoint / "state.pt"
    nbytes = file.stat().st_size
    for offset in [0, 5, nbytes - 1, *(trials.random.randrange(nbytes) for _ in range(trials.count(20, 200)))]:
        flip(file, offset)
        result = run("verify", checkpoint)
        assert result.exit_code == 1, (offset, result.output)
        assert "the whole file: checksum" in result.stdout
        flip(file, offset)
    assert run("verify", checkpoint).exit_code == 0


def test_verify_of_damage_outside_the_records(folder: Path) -> None:
    file = folder / "step-00000010/state.pt"
    directory = read_directory(file)
    first = min(directory.records.values(), key=lambda record: record.offset)
    flip(file, first.offset - 1)  # padding: no reader would notice
    result = run("verify", folder / "step-00000010")
    assert result.exit_code == 1 and "outside the records, or in the manifest" in result.stdout


def test_verify_of_safetensors_with_checksums_and_without(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    lazyckpt.save({"x": torch.randn(100), "y": torch.randn(100)}, ours)
    save_file({"a": torch.randn(10)}, theirs)
    shown = run("verify", ours, theirs).stdout
    assert shown.count("carries no checksums") == 1 and "2 ok, 0 damaged, 0 unreadable" in shown
    flip(ours, ours.stat().st_size - 1)
    result = run("verify", ours)
    assert result.exit_code == 1 and "record y: checksum" in result.stdout and "record x" not in result.stdout
    os.truncate(theirs, 90)
    assert ": truncated" in fails(2, "inspect", theirs) and run("verify", theirs).exit_code == 1


def test_verify_compares_lengths_with_the_manifest(folder: Path) -> None:
    os.truncate(folder / "step-00000030/state.pt", 1000)
    result = run("verify", folder)
    assert result.exit_code == 1 and "state.pt has 1000 bytes" in result.stdout


def test_verify_tells_damage_from_what_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    assert "No such file" in fails(2, "verify", tmp_path / "missing")
    (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    torch.save({}, tmp_path / "empty" / ".hidden" / "a.pt")
    assert "no checkpoint in this folder" in fails(2, "verify", tmp_path / "empty")
    result = run("verify", tmp_path / "missing", folder)
    assert result.exit_code == 2 and "4 ok, 0 damaged, 1 unreadable" in result.stdout
    os.truncate(folder / "step-00000030/state.pt", 1000)
    assert run("verify", tmp_path / "missing", folder).exit_code == 1
    assert run("verify").exit_code == 2


def test_verify_reads_the_files_of_a_trainers_folder_and_folders_inside(folder: Path, tmp_path: Path) -> None:
    """Folders of the Hugging Face Trainer, Accelerate and Lightning have no manifest."""
    output = tmp_path / "output_dir"
    output.mkdir()
    for name in ("model.safetensors", "optimizer.pt", "epoch=1.ckpt"):
        lazyckpt.save({"x": torch.randn(100)}, output / name)
    (output / "last.ckpt").symlink_to("epoch=1.ckpt")
    (output / "trainer_state.json").write_text("{}")
    found = [Path(target["path"]).name for target in run_json("verify", tmp_path)["targets"]]
    files = ["epoch=1.ckpt", "model.safetensors", "optimizer.pt"]
    assert found == [*files, *(f"step-000000{step}" for step in (15, 30, 20, 10))]
    (output / "optimizer.pt").write_bytes(b"damaged at its very beginning")
    assert run("verify", tmp_path).exit_code == 2


def test_verify_minds_no_checkpoint_that_a_running_job_removes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = list(verify._targets(folder))

    def all_but_removed(path: Path) -> Iterator[Any]:
        (folder / "step-00000010").rename(folder / f".trash-step-00000010-{0:032x}")
        return iter(targets)

    monkeypatch.setattr(verify, "_targets", all_but_removed)
    result = run("verify", folder)
    assert result.exit_code == 0 and "gone  " in result.stdout


# doctor


def test_doctor_tells_what_there_is(tmp_path: Path) -> None:
    result = run("doctor", tmp_path)
    assert result.exit_code == 0 and not result.stderr
    facts = _engine.probe(str(tmp_path))
    lines = {line[2:13].strip(): line[13:].strip() for line in result.stdout.splitlines()}
    assert lines["io_uring"] == facts["io_uring"]
    assert lines["O_DIRECT"].startswith(facts["o_direct"])
    assert lines["pages"].startswith(f"watched for writes: {facts['page_witness']}")
    assert lines["huge pages"].endswith(facts["huge_pages"])
    assert lines["lazyckpt"].startswith(lazyckpt.__version__) and lines["torch"].startswith(torch.__version__)
    assert os.uname().release in lines["kernel"] and " on /" in lines["file system"]
    assert not list(tmp_path.iterdir())
    ring = auto_ring_bytes(lazyckpt.Config.chunk_bytes)
    shown = result.stdout.split("A quarter of the available memory, ")[1].split(", is the most")[0]
    assert abs(float(shown.split()[0]) / float(size(ring).split()[0]) - 1) < 0.2  # memory moves
    assert "loses every checkpoint" in run("doctor", "/dev/shm").stdout
    assert "loses every checkpoint" not in run("doctor", "/proc").stdout


def test_doctor_concludes_from_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poor = {"io_uring": "no: Operation not permitted", "o_direct": "no: Invalid argument", "fuse": "no"}
    poor["crc32"] = "zlib"
    poor["page_witness"] = "no: userfaultfd: Function not implemented"
    poor["huge_pages"] = "no: MADV_COLLAPSE: Invalid argument"
    monkeypatch.setattr(_engine, "probe", lambda directory: {**poor, "cuda_driver": "yes"})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    shown = run("doctor", tmp_path / "not" / "yet").stdout
    assert "pool of threads, since io_uring is refused (Operation not permitted)" in shown
    assert "does not watch pages (userfaultfd: Function not implemented)" in " ".join(shown.split())
    assert "Use the page cache" in shown or "Write to memory" in shown
    assert "may not write to the folder" in shown
    assert f"{tmp_path} (the nearest folder of" in shown
    assert "checksums with zlib, which takes three times as long" in " ".join(shown.split())
    poor["io_uring"] = "no: built without liburing: Function not implemented"
    shown = " ".join(run("doctor", tmp_path).stdout.split())
    assert "lazyckpt was built without liburing. To have io_uring, install liburing-dev" in shown


def test_doctor_tells_what_it_makes_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = {key: text for key, text in _engine.probe(str(tmp_path)).items() if not key.startswith("cuda")}
    found = {"cuda_driver": "yes", "cuda_version": "12.8", "cuda_batches": "yes", "cuda_pinning": "yes"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr("lazyckpt.tools.doctor.refused_batches", lambda: refusal)
    refusal = ""

    def shown(**facts: str) -> str:
        monkeypatch.setattr(_engine, "probe", lambda directory: {**plain, **facts})
        return " ".join(run("doctor", tmp_path).stdout.split())

    assert "NVIDIA H200; driver of CUDA 12.8" in shown(**found)
    assert "during training" in (text := shown(**found)) and "in one call" in text and "cannot be pinned" not in text
    assert "cannot be pinned (device 0 cannot)" in shown(**{**found, "cuda_pinning": "no: device 0 cannot"})
    assert "one by one (CUDA < 12.8)" in shown(**{**found, "cuda_batches": "no"})
    refusal = "cuMemcpyBatchAsync: CUDA_ERROR_NOT_SUPPORTED (801)"
    assert f"one by one ({refusal})" in shown(**found)
    assert "Let torch copy tensors from the GPU" in shown(cuda_driver="no: no CUDA driver: libcuda.so.1")


# the program


def test_version_usage_and_help() -> None:
    assert run("--version").stdout.startswith(f"lazyckpt {lazyckpt.__version__} (torch {torch.__version__}")
    for wrong in (["nonsense"], ["inspect"], ["inspect", "x", "--depth", "-1"]):
        assert run(*wrong).exit_code == 2
    for name in commands():
        shown = run(name, "--help").stdout
        assert "--json" in shown, name
        assert "<bool>" not in shown.partition("--help")[0], f"{name}: a flag has no value"


def test_a_command_that_was_removed_says_what_to_use() -> None:
    for words in (["config"], ["config", "--default", "--config_file", "x.yaml"], ["--help"], []):
        line = fails(2, "accelerate", *words)
        assert "questions were dropped" in line and "lazyckpt.yaml" in line and "LAZYCKPT_*" in line
    assert "accelerate" not in run("--help").stdout


def test_an_error_is_one_line_unless_debug_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--debug`` works before the command and behind it. An unexpected error has the same exit code."""
    assert "No such file" in fails(2, "inspect", tmp_path / "missing")
    for words in (["--debug", "inspect", tmp_path / "missing"], ["inspect", tmp_path / "missing", "--debug"]):
        result = run(*words)
        assert result.exit_code == 2 and "Traceback" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("error: ")
    torch.save({}, tmp_path / "--debug")
    monkeypatch.chdir(tmp_path)
    assert run("inspect", "--", "--debug").exit_code == 0
    monkeypatch.setattr(inspect, "read", lambda file: {}[file])
    assert "KeyError" in (line := fails(2, "inspect", tmp_path / "missing")) and "--debug shows where" in line


def test_json_of_every_command_is_json_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes((folder / "step-00000020/state.pt").read_bytes())
    flip(damaged, offset_of(damaged, "data/0"))
    verified = json.loads(run("verify", folder, damaged, tmp_path / "missing", "--json").stdout)["targets"]
    assert [target["state"] for target in verified] == ["ok"] * 4 + ["damaged", "unreadable"]
    assert "data/0" in verified[4]["damage"][0] and "No such file" in verified[5]["damage"][0]
    assert verified[0]["bytes"] == (folder / "step-00000015/state.pt").stat().st_size
    doctor = run_json("doctor", tmp_path)
    assert doctor["facts"]["io_uring"] == _engine.probe(str(tmp_path))["io_uring"]
    assert any("Refuse a checkpoint larger than" in found["text"] for found in doctor["conclusions"])
    (tmp_path / "empty").mkdir()
    wrong = [["inspect", tmp_path / "empty"], ["diff", damaged, folder], ["prune", folder, "--keep-last", "0"]]
    wrong += [["verify"], ["pin", folder, "x"], ["ls", tmp_path / "missing"], ["advise"], ["trace", damaged]]
    for words in wrong:
        result = run(*words, "--json")
        assert result.exit_code == 2 and result.stderr, words
        assert list(json.loads(result.stdout)) == ["error"], words


def test_the_shell_completes_commands_and_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(option in run("--help").stdout for option in ("--install-completion", "--show-completion"))
    assert complete("ver") == ["verify"]
    assert complete("pin", folder, "1") == ["15", "10"]
    assert complete("unpin", folder, "") == [""]
    assert run("pin", folder, "10").exit_code == 0
    assert complete("pin", folder, "1") == ["15"] and complete("unpin", folder, "") == ["10"]
    monkeypatch.setenv("HOME", str(folder.parent))
    assert complete("unpin", "~/run", "") == complete("unpin", "$HOME/run", "") == ["10"]
    assert complete("unpin", "~nobody/run", "") == complete("unpin", folder / "missing", "") == [""]


def test_the_shell_completes_steps_of_a_trace_and_parts_of_a_file(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path / "run", trace=tmp_path / "t.json") as ckpt:
        ckpt.track(extra={"ema": {"a.b": {"w": torch.zeros(1)}}, "w": torch.zeros(1)})
        for step in (9, 10, 11, 10):
            ckpt.save(step, blocking=True)
    assert complete("trace", tmp_path / "t.json", "--step", "") == ["10", "11", "9"]
    assert complete("trace", tmp_path / "t.json", "--step", "1") == ["10", "11"]
    assert complete("trace", tmp_path / "run", "--step", "") == [""]
    assert complete("convert", tmp_path / "run", "x.pt", "--key", "")[:2] == ["extra", "rng"]
    parts = complete("convert", tmp_path / "run", "x.pt", "--key", "e")
    assert parts == ["extra", "extra.ema", "extra.ema.a.b"]
    for part in parts:
        assert run("convert", tmp_path / "run", tmp_path / f"{part}.pt", "--key", part).exit_code == 0
    (told,) = complete("trace", tmp_path / "t.json", "--step", "9", shell="fish")
    assert told.startswith("9\tstep-00000009, ") and told.endswith("B")


def test_sizes() -> None:
    sizes = [0, 1023, 1024, 10 * 1024 - 1, 1024**2 - 1, 38.6 * 2**20, 1.5 * 2**40]
    shown = ["0 B", "1023 B", "1.00 KiB", "10.0 KiB", "1.00 MiB", "38.6 MiB", "1.50 TiB"]
    assert [size(int(n)) for n in sizes] == shown


def test_what_needs_no_tensors_does_without_torch(folder: Path) -> None:
    """Importing torch takes seconds. The help of every command needs none either."""
    shown = [["--help"], ["--version"], *([name, "--help"] for name in commands()), ["pin", str(folder), "10"]]
    shown += [[name, str(folder)] for name in ("ls", "inspect", "verify", "prune")]
    code = (
        "import json, sys\n"
        "from commands import complete, run\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    assert run(*words).exit_code == 0 and 'torch' not in sys.modules, words\n"
        "assert run('x').exit_code == 2 and 'torch' not in sys.modules\n"
        "assert complete('pin', sys.argv[2], '1') == ['15'] and 'torch' not in sys.modules\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), *sys.path]))
    }
    subprocess.run([sys.executable, "-c", code, json.dumps(shown), str(folder)], env=environment, check=True)


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """``python -m lazyckpt`` writes more than a pipe holds."""
    lazyckpt.save({f"layers.{i}.weight.with.a.long.name": torch.zeros(1) for i in range(3000)}, tmp_path / "many.pt")
    shown = run("inspect", tmp_path / "many.pt").stdout
    assert shown.count("float32") == 3000 and all(line == line.rstrip() for line in shown.splitlines())
    command = [sys.executable, "-m", "lazyckpt", "inspect", str(tmp_path / "many.pt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(str(tmp_path / "many.pt"))
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


@pytest.mark.parametrize("words", [["ls", "."], ["ls", "missing", "--json"]])
def test_output_that_finds_no_room_is_one_line(tmp_path: Path, words: list[str]) -> None:
    """Buffered output fails only when the interpreter ends."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lazyckpt", *words], stdout=full, stderr=subprocess.PIPE, env=kept, cwd=tmp_path
        )
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 2 and line.startswith("error: ")


def on_terminal(cells: int, *words: str, cwd: Path, **variables: str) -> str:
    """Returns what a terminal of that width shows."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, cells, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "lazyckpt", *words]
    environment = kept | {"TERM": "xterm"} | variables
    subprocess.run(command, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=environment, check=True)
    os.close(slave)
    shown = os.read(master, 10_000).decode().replace("\r", "")
    os.close(master)
    return shown


def test_a_terminal_has_colours_if_wanted_and_cuts_lines_as_a_pipe_does_not(tmp_path: Path) -> None:
    lazyckpt.save({"x" * 100: torch.zeros(1)}, tmp_path / "a.pt")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(60, "inspect", "a.pt", cwd=tmp_path, NO_COLOR="1")).splitlines()
    assert max(map(len, lines)) <= 60 and "x…" in lines[-1]
    assert "\x1b[3" not in on_terminal(60, "verify", "a.pt", cwd=tmp_path, NO_COLOR="1")
    assert "\x1b[32mok" in on_terminal(60, "verify", "a.pt", cwd=tmp_path)
    assert "x" * 100 + "  float32" in run("inspect", tmp_path / "a.pt").stdout
