"""Folders of torch.distributed.checkpoint, ours and those of plain DCP, in every tool."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import Ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import lazyckpt
from commands import fails, run, run_json
from lazyckpt.errors import ConfigError, CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.formats.distcp import item_directory
from lazyckpt.formats.reader import FileReader
from lazyckpt.reading.sharded.folder import open_folder

pytestmark = pytest.mark.filterwarnings("ignore")


def whole(tree: Any) -> Any:
    if isinstance(tree, DTensor):
        return tree.full_tensor().detach().clone()
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list) else tree


def save_all(path: str) -> None:
    """One training of two ranks, saved by a Checkpointer, by plain DCP in rows and in columns, and whole."""
    folder = Path(path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 77), torch.nn.Linear(77, 5, bias=False))
    fully_shard(model, mesh=(mesh := init_device_mesh("cpu", (2,))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with lazyckpt.Checkpointer(folder / "run", trace=folder / "trace.json") as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        for step in (1, 2):
            model(torch.ones(3, 33)).square().sum().backward()
            optimizer.step()
            ckpt.save(step).result()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    # The ranks share the items of the list, so they are not in its order in .metadata.
    extra = {"list": [torch.arange(3.0), {"x": torch.arange(5)}, torch.arange(1000)], "pair": (1, 2), "none": None}
    dcp.save({**state, **extra, "opaque": Fraction(1, 2)}, checkpoint_id=folder / "rows")
    everything = whole(state)
    columns = {
        name: distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1)]) for name, tensor in everything["model"].items()
    }
    dcp.save({"model": columns, "optimizer": flat}, checkpoint_id=folder / "columns")
    numbered = {"model": everything["model"], "optimizer": whole(optimizer.state_dict())}
    if dist.get_rank() == 0:
        torch.save(numbered, folder / "whole.pt")


@pytest.fixture(scope="module")
def made(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    ranks.run(2, save_all, str(folder))
    return folder


@pytest.fixture
def copies(made: Path, tmp_path: Path) -> Path:
    """Those that a test may change."""
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def expected(made: Path) -> Any:
    return torch.load(made / "whole.pt")


# load


@pytest.mark.parametrize("folder", ["run/step-00000002", "rows", "columns"])
def test_load_takes_a_part_under_other_names_and_dtypes(made: Path, folder: str) -> None:
    model = expected(made)["model"]
    assert equal(lazyckpt.load(made / folder, key="model"), model)
    assert equal(lazyckpt.load(made / folder, key="model.0.weight"), model["0.weight"])
    found = lazyckpt.load(made / folder, key="model", rename={"0.": "in.", "1.": None}, dtype=torch.bfloat16)
    assert equal(dict(found), {"in.weight": model["0.weight"].bfloat16(), "in.bias": model["0.bias"].bfloat16()})
    assert lazyckpt.load(made / folder, "meta", key="model")["0.weight"].is_meta
    with pytest.raises(LoadError, match="there is no 'nothing'; there is: model, optimizer"):
        lazyckpt.load(made / folder, key="nothing")
    with pytest.raises(ConfigError, match="takes a device"):
        lazyckpt.load(made / folder, {"cpu": "cpu"}, key="model")


def test_load_takes_all_of_a_plain_folder(made: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match=r"opaque: .*Fraction"):
        lazyckpt.load(made / "rows")
    found = lazyckpt.load(made / "rows", weights_only=False)
    assert found.pop("opaque") == Fraction(1, 2)
    assert equal(found["list"], [torch.arange(3.0), {"x": torch.arange(5)}, torch.arange(1000)])
    assert found["pair"] == (1, 2) and found["none"] is None
    assert found["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight"]
    moments = expected(made)["optimizer"]["state"]
    names = found["optimizer"]["param_groups"][0]["params"]
    assert equal([found["optimizer"]["state"][name] for name in names], [moments[n] for n in range(3)])


def test_a_part_is_loaded_without_the_bytes_of_others(copies: Path) -> None:
    for name, (file, place) in items(copies / "rows"):
        if not name.startswith("model."):
            overwrite(copies / "rows" / file, place.offset, b"x" * place.nbytes)
    assert equal(lazyckpt.load(copies / "rows", key="model"), expected(copies)["model"])
    with pytest.raises(CorruptFileError, match="pair: "):
        lazyckpt.load(copies / "rows", key="pair")


def test_tied_tensors_stay_one(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    torch.save({"a": weight, "b": weight, "c": weight[1:]}, tmp_path / "x.pt")
    lazyckpt.convert(tmp_path / "x.pt", tmp_path / "folder")
    found = lazyckpt.load(tmp_path / "folder")
    assert found["a"] is found["b"] and equal(found, {"a": weight, "b": weight, "c": weight[1:]})
    assert lazyckpt.inspect(tmp_path / "folder").tensors["b"].tied_to == "a"


# verify


def items(folder: Path) -> list[tuple[str, Any]]:
    """Name, and file and place, of each item."""
    return [(name, where) for name, entry in open_folder(folder).entries.items() for where in entry.items.values()]


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with open(file, "r+b") as handle:
        handle.seek(offset)
        handle.write(data)


def flip(file: Path, offset: int) -> None:
    overwrite(file, offset, bytes([file.read_bytes()[offset] ^ 4]))


def test_whole_folders_are_whole(made: Path) -> None:
    found = {str(finding.path.relative_to(made)): finding for finding in lazyckpt.verify(made / "run").findings}
    assert found.keys() == {"run/step-00000001", "run/step-00000002"}
    for folder in ("rows", "columns"):
        (finding,) = lazyckpt.verify(made / folder).findings
        assert finding.path == made / folder / ".metadata"
        found[folder] = finding
    for name, finding in found.items():
        files = [file for file in (made / name).iterdir() if file.name not in ("manifest.json", ".lazyckpt-lock")]
        assert finding.state == "ok" and finding.without_checksum == 0, finding
        assert finding.bytes == sum(file.stat().st_size for file in files)
        assert finding.records > 20 and finding.whole_file_checked == name.startswith("run")
    assert lazyckpt.verify(made).ok and len(lazyckpt.verify(made).findings) == 5
    assert "5 ok, 0 damaged, 0 unreadable" in run("verify", made).stdout


@pytest.mark.long(first=1)
@pytest.mark.parametrize("folder", ["run/step-00000002", "rows"])
def test_verify_names_the_file_and_the_item_of_every_flipped_bit(copies: Path, folder: str) -> None:
    for name, (file, place) in items(copies / folder):
        path = copies / folder / file
        with FileReader(path) as reader:
            for key, record in item_directory(reader, place).records.items():
                flip(path, record.offset + record.nbytes // 2)
                told = "\n".join(lazyckpt.verify(copies / folder).findings[0].damage)
                assert f"{file}: record {name}/{key}: checksum" in told
                flip(path, record.offset + record.nbytes // 2)
        if name.startswith("model"):
            flip(path, place.offset + 2)  # of the item's own structure
            assert f"{file}: {name}: item at offset {place.offset}: no archive" in run("verify", copies / folder).stdout
            flip(path, place.offset + 2)
    assert lazyckpt.verify(copies / folder).ok


def test_verify_compares_the_checksums_of_segments(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.randn(700_000)}}, tmp_path / "a.pt")
    lazyckpt.convert(tmp_path / "a.pt", tmp_path / "folder")
    file = tmp_path / "folder/__0_0.distcp"
    ((_, (_, place)),) = items(tmp_path / "folder")
    assert lazyckpt.verify(tmp_path / "folder").ok
    for at in range(16, 24 + 4 * 3):
        flip(file, place.offset + place.nbytes + at)
        (finding,) = lazyckpt.verify(tmp_path / "folder").findings
        assert finding.state == "damaged" and "model.weight" in finding.damage[0] and "segments" in finding.damage[0]
        flip(file, place.offset + place.nbytes + at)


def test_bytes_between_items_belong_to_nobody_but_the_manifest(copies: Path) -> None:
    for folder, state in (("rows", "ok"), ("run/step-00000001", "damaged")):
        path = copies / folder
        ends = sorted(place.offset + place.nbytes for _, (file, place) in items(path) if file == "__0_0.distcp")
        starts = {place.offset for _, (file, place) in items(path) if file == "__0_0.distcp"}
        gaps = [end for end in ends[:-1] if end not in starts]
        if gaps:
            flip(path / "__0_0.distcp", gaps[0])
        elif folder == "rows":
            with open(path / "__0_0.distcp", "ab") as file:
                file.write(b"behind the last item")
        (finding,) = lazyckpt.verify(path).findings
        assert finding.state == state, finding
    assert "the damage is outside the records" in finding.damage[0]


def test_what_is_missing_or_cut_short_is_damage(copies: Path) -> None:
    os.truncate(copies / "rows/__1_0.distcp", 100)
    (finding,) = lazyckpt.verify(copies / "rows").findings
    assert finding.state == "damaged" and any("__1_0.distcp: " in line for line in finding.damage)
    (copies / "rows/__1_0.distcp").unlink()
    assert "__1_0.distcp: cannot be opened" in fails(2, "inspect", copies / "rows")
    result = run("verify", copies)
    assert result.exit_code == 1 and "\n    __1_0.distcp: cannot be opened" in result.stdout
    flip(copies / "run/step-00000002/.metadata", 100)
    (finding,) = lazyckpt.verify(copies / "run/step-00000002").findings
    assert any(".metadata: the whole file: checksum" in line for line in finding.damage)
    (copies / "rows/.metadata").unlink()
    assert "their save did not end" in fails(2, "verify", copies / "rows")
    assert "their save did not end" in fails(2, "inspect", copies / "rows")


def test_an_index_leads_to_no_file_outside_of_its_folder(copies: Path) -> None:
    """Not even to one that is whole."""
    (copies / "rows/__1_0.distcp").rename(copies / "__1_0.distcp")
    index = copies / "rows/.metadata"
    metadata = pickle.loads(index.read_bytes())
    for name in ("../__1_0.distcp", str(copies / "__1_0.distcp"), "../rows/../__1_0.distcp"):
        for info in metadata.storage_data.values():
            if info.relative_path.endswith("__1_0.distcp"):
                info.relative_path = name
        index.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptFileError, match=r"bytes at offset .* of file"):
            lazyckpt.load(copies / "rows", key="model")
        for words in (["inspect"], ["convert", copies / "x.pt"], ["diff", copies / "whole.pt"]):
            assert "bytes at offset" in fails(2, words[0], copies / "rows", *words[1:])
        assert lazyckpt.verify(index).findings[0].state == "damaged"


# inspect


def test_inspect_shows_which_file_holds_which_part(made: Path) -> None:
    for folder in ("run", "rows", "columns"):
        found = lazyckpt.inspect(made / folder)
        model = {name: node for name, node in found.tensors.items() if name.startswith("model.")}
        for name, tensor in expected(made)["model"].items():
            node = model.pop(f"model.{name}")
            assert (node.shape, node.dtype, node.nbytes) == (tuple(tensor.shape), "float32", tensor.nbytes)
        assert not model and found.format == "torch.distributed.checkpoint in 2 files"
    notes = {folder: lazyckpt.inspect(made / folder).tensors["model.0.weight"].note for folder in ("rows", "columns")}
    assert notes["rows"] == "[0:39, 0:33] __0_0.distcp, [39:77, 0:33] __1_0.distcp"
    assert notes["columns"] == "[0:77, 0:17] __0_0.distcp, [0:77, 17:33] __1_0.distcp"


def test_inspect_as_json_and_with_statistics(made: Path) -> None:
    told = run_json("inspect", made / "run", "--stats", "--filter", "model.*")
    assert (told["step"], told["world_size"]) == (2, 2)
    (weight,) = [entry for entry in told["entries"] if entry["name"] == "model.0.weight"]
    assert [(part["file"], part["offsets"], part["shape"]) for part in weight["parts"]] == [
        ("__0_0.distcp", [0, 0], [39, 33]),
        ("__1_0.distcp", [39, 0], [38, 33]),
    ]
    tensor = expected(made)["model"]["0.weight"]
    assert weight["stats"]["max"] == tensor.max().item()
    assert weight["stats"]["mean"] == pytest.approx(tensor.double().mean().item())
    assert ", step 2, sequence 2, saved " in (shown := run("inspect", made / "run").stdout) and " by 2 ranks" in shown
    assert {entry["name"] for entry in told["entries"] if entry["kind"] == "tensor"} == {
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
    }
    assert "__1_0.distcp" in run("inspect", made / "rows/.metadata").stdout


# diff


def test_the_same_state_in_other_parts_is_the_same(made: Path) -> None:
    for a, b in (("run", "rows"), ("rows", "columns"), ("columns", "whole.pt")):
        found = lazyckpt.diff(made / a, made / b)
        wrong = [change.path for change in found.documents[0].changes if change.path.startswith("model")]
        assert not wrong and found.documents[0].equal >= 3
    assert not lazyckpt.diff(made / "run/step-00000001", made / "run/step-00000002").same


def test_a_name_of_one_optimizer_is_no_number_of_the_other(made: Path) -> None:
    """diff does not guess which parameter a number means."""
    (document,) = lazyckpt.diff(made / "run", made / "whole.pt").documents
    found = {change.path: change.change for change in document.changes}
    assert found["optimizer.state.0.weight"] == "only in A" and found["optimizer.state.0.exp_avg"] == "only in B"


def test_damage_ends_a_comparison_by_name(copies: Path) -> None:
    (file, place), *_ = (where for name, where in items(copies / "rows") if name == "model.1.weight")
    with FileReader(copies / "rows" / file) as reader:
        record = item_directory(reader, place).records["data/0"]
    flip(copies / "rows" / file, record.offset + 4)
    line = fails(2, "diff", copies / "rows", copies / "whole.pt")
    assert f"rows/{file}: model.1.weight: " in line and "checksum" in line
    assert "model.1.weight: " in fails(2, "convert", copies / "rows", copies / "x.pt", "--key", "model")
    assert not (copies / "x.pt").exists()


# convert


def test_a_folder_becomes_one_file(made: Path, tmp_path: Path) -> None:
    model = expected(made)["model"]
    for folder in ("run", "rows", "columns"):
        for name in (f"{folder}.pt", f"{folder}.safetensors"):
            told = lazyckpt.convert(made / folder, tmp_path / name, key="model")
            assert (told.records, told.without_checksum) == (3, 0)
            assert equal((torch.load if name.endswith(".pt") else load_file)(tmp_path / name), model)
    words = ["--key", "model", "--only", "0.*", "--strip-prefix", "0.", "--dtype", "float16"]
    assert run("convert", made / "columns", tmp_path / "x.safetensors", *words).exit_code == 0
    assert equal(
        load_file(tmp_path / "x.safetensors"), {"weight": model["0.weight"].half(), "bias": model["0.bias"].half()}
    )
    lazyckpt.convert(made / "run", tmp_path / "all.pt")
    assert lazyckpt.diff(made / "run", tmp_path / "all.pt").same
    assert "Fraction; only tensors and plain values" in fails(2, "convert", made / "rows", tmp_path / "y.pt")


LOAD_WITHOUT_US = """
import sys
sys.modules["lazyckpt"] = None  # as if it were not installed
import torch, torch.distributed.checkpoint as dcp
state = torch.load(sys.argv[2])
blank = lambda x: {k: blank(v) for k, v in x.items()} if isinstance(x, dict) else (
    torch.zeros_like(x) if isinstance(x, torch.Tensor) else x)
found = blank(state)
dcp.load(found, checkpoint_id=sys.argv[1])
torch.save(found, sys.argv[3])
"""


def test_a_file_becomes_a_folder_that_plain_dcp_loads(made: Path, tmp_path: Path) -> None:
    told = lazyckpt.convert(made / "whole.pt", tmp_path / "folder")
    assert told.files == (".metadata", "__0_0.distcp") and sorted(os.listdir(tmp_path)) == ["folder"]
    assert lazyckpt.verify(tmp_path / "folder").ok
    arguments = [tmp_path / "folder", made / "whole.pt", tmp_path / "back.pt"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOAD_WITHOUT_US, *arguments], check=True)
    assert equal(torch.load(tmp_path / "back.pt"), expected(made))
    assert lazyckpt.diff(tmp_path / "folder", made / "whole.pt").same


def test_all_kinds_of_tensors_become_items(tmp_path: Path) -> None:
    """Views, other strides, numbers, empty ones and dicts: whatever of its storage a tensor shows, an item holds."""
    base = torch.randn(40, 30)
    state = {
        "rows": base[3:7],
        "turned": base[:, 4:9].t(),
        "number": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "half": base.bfloat16(),
        "nothing": {},
        "list": [base[0], {"x": True}],
        "odd": torch.arange(3, dtype=torch.uint8),
    }
    torch.save(state, tmp_path / "x.pt")
    lazyckpt.convert(tmp_path / "x.pt", tmp_path / "folder")
    assert equal(lazyckpt.load(tmp_path / "folder"), state)
    lazyckpt.convert(tmp_path / "folder", tmp_path / "again", dtype=torch.float64, only=["half", "number"])
    assert equal(lazyckpt.load(tmp_path / "again"), {"number": torch.tensor(7), "half": base.bfloat16().double()})
    lazyckpt.convert(tmp_path / "x.pt", tmp_path / "x.safetensors", only=["half", "odd"])
    lazyckpt.convert(tmp_path / "x.safetensors", tmp_path / "third")
    assert equal(lazyckpt.load(tmp_path / "third"), {"half": base.bfloat16(), "odd": state["odd"]})


def test_what_a_folder_cannot_hold_is_refused_and_nothing_appears(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({"a": {"b": (torch.ones(2),)}}, tmp_path / "tuple.pt")
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.ones(3)}}, tmp_path / "twice.pt")
    assert "a folder holds a dict" in fails(2, "convert", tmp_path / "list.pt", tmp_path / "folder")
    assert "a.b: a tensor inside a tuple" in fails(2, "convert", tmp_path / "tuple.pt", tmp_path / "folder")
    assert "'a.b'" in fails(2, "convert", tmp_path / "twice.pt", tmp_path / "folder")
    (tmp_path / "there").mkdir()
    assert "exists already" in fails(2, "convert", tmp_path / "tuple.pt", tmp_path / "there")
    assert "one without a suffix for a folder" in fails(2, "convert", tmp_path / "tuple.pt", tmp_path / "x.doc")
    assert sorted(os.listdir(tmp_path)) == ["list.pt", "there", "tuple.pt", "twice.pt"]


# ls, prune, pin


def test_runs_of_many_ranks_are_listed_and_pruned(copies: Path) -> None:
    shown = run("ls", copies / "run").stdout.splitlines()
    assert shown[0].split() == ["STEP", "SEQUENCE", "PARENT", "AGE", "SIZE", "RANKS", "STATE"]
    told = run_json("ls", copies / "run")["checkpoints"]
    assert [(row["step"], row["world_size"]) for row in told] == [(2, 2), (1, 2)]
    assert run("pin", copies / "run", "1").exit_code == 0
    assert run_json("prune", copies / "run", "--keep-last", "1")["checkpoints"] == []
    assert run("unpin", copies / "run", "1").exit_code == 0
    assert run("prune", copies / "run", "--keep-last", "1", "--yes").exit_code == 0
    assert [name for name in os.listdir(copies / "run") if name.startswith(("step", ".t"))] == ["step-00000002"]
    assert lazyckpt.verify(copies / "run").ok


# trace


def test_each_rank_traces_into_a_file_of_its_own_and_trace_joins_them(made: Path) -> None:
    told = run_json("trace", made / "trace.json")
    assert (told["step"], [row["rank"] for row in told["ranks"]]) == (2, [0, 1])
    sizes = {file.name: file.stat().st_size for file in (made / "run/step-00000002").glob("*.distcp")}
    assert [row["metrics"]["bytes"] for row in told["ranks"]] == [sizes["__0_0.distcp"], sizes["__1_0.distcp"]]
    assert told["ranks"][0]["metrics"] == told["metrics"]
    lines = run("trace", made / "trace.json", "--step", "1").stdout.split("\n\n")[1].splitlines()
    assert lines[0].split() == ["RANK", "SIZE", "EAGER", "BLOCKED", "COPIED", "SYNCED", "DURABLE"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1"]
    assert [row["rank"] for row in run_json("trace", made / "trace.rank-1.json")["ranks"]] == [0]  # as any other trace


# trainers' folders


def test_folders_inside_of_a_trainers_folder_are_its_documents(copies: Path) -> None:
    """As accelerate and Lightning lay them out."""
    trainer = copies / "checkpoint_1"
    for name in ("a", "b"):
        shutil.copytree(copies / "rows", trainer / name)
    torch.save({"step": 3}, trainer / "state.bin")
    assert "give one of them: a/.metadata, b/.metadata, state.bin" in fails(2, "inspect", trainer)
    assert len(lazyckpt.verify(trainer).findings) == 3
    found = lazyckpt.diff(trainer, trainer)
    assert {document.name for document in found.documents} == {"a/.metadata", "b/.metadata", "state.bin"} and found.same
    torch.save({"epoch": 3}, copies / "rows/meta.pt")
    assert lazyckpt.inspect(copies / "rows").path == copies / "rows/.metadata"
    assert [finding.path.name for finding in lazyckpt.verify(copies / "rows").findings] == [".metadata", "meta.pt"]
