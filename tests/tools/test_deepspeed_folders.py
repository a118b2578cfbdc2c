"""The folders of plain DeepSpeed in every tool: ls, inspect, verify, diff and prune."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from commands import fails, run, run_json
from lazyckpt.errors import CorruptFileError, LoadError, ReadError, UnsupportedFormatError
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.tools import deepspeed, prune, verify_deepspeed
from lazyckpt.tools.verify_deepspeed import whole

ROOT = Path(sys.prefix) / "deepspeed"  # not on the usual path: importing it takes seconds
SAVES = Path(__file__).parent.parent / "deepspeed_saves.py"
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks save with DeepSpeed's own engine."""
    if not (ROOT / "deepspeed").is_dir():
        pytest.skip(f"no DeepSpeed in {ROOT}")
    folder = tmp_path_factory.mktemp("deepspeed")
    about = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # DeepSpeed wants them; the ranks meet in a file
    ranks = []
    for rank in ("0", "1"):
        environment = {**os.environ, **about, "RANK": rank, "LOCAL_RANK": rank}
        with open(folder / f"rank-{rank}.log", "wb") as log:
            command = [sys.executable, str(SAVES), str(folder)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(280) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join((folder / f"rank-{rank}.log").read_text()[-3000:] for rank in (0, 1))
    return folder


@pytest.fixture
def copies(made: Path, tmp_path: Path) -> Path:
    """Those that a test may change."""
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture
def save_dir(made: Path, tmp_path: Path) -> Path:
    """Three tags of ZeRO 2, which a test may change."""
    shutil.copytree(made / "bf16-2", tmp_path / "run")
    return tmp_path / "run"


def tags_of(folder: Path) -> list[Path]:
    return [
        tag.path for name in sorted(os.listdir(folder)) if (folder / name).is_dir() for tag in tags_in(folder / name)
    ]


def tags_in(save_dir: Path) -> list[deepspeed.Tag]:
    return deepspeed.tags(save_dir)


def flip(file: Path, offset: int) -> None:
    with open(file, "r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)[0]
        handle.seek(offset)
        handle.write(bytes([byte ^ 4]))


def state_of(path: Path) -> tuple[str, str]:
    """The state of a tag, and all that is told of it."""
    (finding,) = [finding for finding in lazyckpt.verify(path).findings if finding.path == path]
    return finding.state, "\n".join(finding.damage)


# whole ones


def test_whole_tags_are_whole(made: Path) -> None:
    found = {finding.path: finding for finding in lazyckpt.verify(made).findings}
    universal = made / "fp32-3/global_step2_universal"
    assert found.keys() == {*tags_of(made), universal} and len(found) == 14
    for path, finding in found.items():
        if path.parent.name == "legacy":
            continue
        assert (finding.state, finding.without_checksum) == ("ok", 0), finding
        files = [file for file in path.rglob("*") if file.is_file()]
        assert finding.bytes == sum(file.stat().st_size for file in files)
        assert finding.records == sum(len(read_directory(file).records) for file in files)
        tag = whole(path)
        assert (tag.world_size, tag.faults, len(tag.files)) == (2, (), len(files))
    assert run("verify", made / "bf16-2").exit_code == 0


def test_tags_are_ordered_by_their_step_and_only_then_by_time(save_dir: Path) -> None:
    for step in (1, 2, 3):
        (save_dir / f"global_step{step}").rename(save_dir / f"tag{'cab'[step - 1]}")
    os.utime(save_dir / "tagc" / MODEL, (time.time() + 60,) * 2)
    assert [(tag.path.name, tag.step) for tag in tags_in(save_dir)] == [("tagb", 3), ("taga", 2), ("tagc", 1)]
    shutil.copytree(save_dir / "taga", save_dir / "tagd")
    for file in (save_dir / "tagd").iterdir():
        os.utime(file, (time.time() + 30,) * 2)
    assert [tag.path.name for tag in tags_in(save_dir)] == ["tagb", "tagd", "taga", "tagc"]


def test_ls(save_dir: Path) -> None:
    shown = run("ls", save_dir).stdout.splitlines()
    assert shown[0].split() == ["NAME", "STEP", "AGE", "SIZE", "FILES", "RANKS"]
    assert [line.split()[0] for line in shown[1:]] == ["global_step3", "global_step2", "global_step1"]
    assert shown[1].split()[-4:] == ["3", "2", "newest,", "latest"]
    (save_dir / "global_step3" / OPTIMIZER).unlink()
    os.truncate(save_dir / "global_step2" / MODEL, 500)
    told = run_json("ls", save_dir)
    assert told["latest_fault"] is None
    rows = {row["name"]: row for row in told["checkpoints"]}
    assert [(rows[f"global_step{n}"]["newest"], rows[f"global_step{n}"]["latest"]) for n in (1, 2, 3)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert rows["global_step3"]["faults"] == [f"{OPTIMIZER} is missing"] and rows["global_step3"]["files"] == 2
    assert rows["global_step2"]["faults"][0].startswith(f"{MODEL}: truncated")
    assert f"latest, incomplete: {OPTIMIZER} is missing" in run("ls", save_dir).stdout
    shutil.rmtree(save_dir / "global_step3")
    assert "latest names 'global_step3', which is missing" in run("ls", save_dir).stdout
    assert "latest names 'global_step3'" in run_json("ls", save_dir)["latest_fault"]
    assert "a checkpoint itself" in fails(2, "ls", save_dir / "global_step1")


def test_inspect(made: Path) -> None:
    found = lazyckpt.inspect(made / "bf16-2")
    assert found.tag is not None and (found.path, found.tag.step) == (made / "bf16-2/global_step3", 3)
    weight = found.tensors["mp_rank_00_model_states.module.0.weight"]
    assert (weight.dtype, weight.shape) == ("bfloat16", (32, 16))
    assert {name.partition(".")[0] for name in found.tensors} == {file.removesuffix(".pt") for file in found.tag.files}
    told = run_json("inspect", made / "fp32-3/global_step1", "--depth", "1")
    assert (told["format"], told["step"], told["world_size"]) == ("DeepSpeed checkpoint in 4 files", 1, 2)
    assert [entry["tensors"] for entry in told["entries"]] == [4, 4, 4, 4]
    assert "step 3, by 2 ranks" in run("inspect", made / "bf16-2").stdout
    universal = lazyckpt.inspect(made / "fp32-3/global_step2_universal").tensors
    assert universal["zero.0.weight.fp32"].dtype == "float32"


def test_inspect_names_missing_files(save_dir: Path) -> None:
    (save_dir / "global_step1" / OPTIMIZER).unlink()
    assert f"incomplete: {OPTIMIZER} is missing" in run("inspect", save_dir / "global_step1").stdout
    assert run_json("inspect", save_dir / "global_step1")["missing"] == [OPTIMIZER]


def test_diff_compares_the_files_of_two_tags(made: Path, save_dir: Path) -> None:
    found = lazyckpt.diff(made / "bf16-2/global_step1", made / "bf16-2")
    assert not (found.only_in_a or found.only_in_b) and len(found.documents) == 3
    (model,) = [document for document in found.documents if document.name == MODEL]
    assert {"module.0.weight", "global_steps"} < {change.path for change in model.changes}
    assert lazyckpt.diff(made / "bf16-2", save_dir / "global_step3").same
    (save_dir / "global_step3" / OPTIMIZER).unlink()
    assert lazyckpt.diff(made / "bf16-2", save_dir).only_in_a == (OPTIMIZER,)


# missing, stale and foreign files

# DeepSpeed does not record which layers a pipeline in bfloat16 without ZeRO has.
UNKNOWN = {("pipeline-0", "layer_00-model_states.pt"), ("pipeline-0", "layer_02-model_states.pt")}


def test_every_missing_file_is_named(copies: Path) -> None:
    unnoticed = set()
    for folder in tags_of(copies):
        kind, files = folder.parent.name, sorted(os.listdir(folder))
        for name in files if kind != "legacy" and len(files) > 1 else ():
            (folder / name).rename(copies / "away")
            state, told = state_of(folder)
            if state == "ok":
                unnoticed.add((kind, name))
            else:
                assert state == "damaged" and told == f"{name}: missing", (folder, name)
                assert tuple(deepspeed.open_tag(folder).missing) == (name,)
                with pytest.raises(CorruptFileError, match=f"{name}: missing"):
                    whole(folder)
            (copies / "away").rename(folder / name)
    assert unnoticed == UNKNOWN
    for name in ("layer_00-model_states.pt", "layer_02-model_states.pt"):
        (copies / "pipeline-0/global_step1" / name).unlink()
    assert "layer_00-model_states.pt: missing" in state_of(copies / "pipeline-0/global_step1")[1]


@pytest.mark.parametrize("kind", ["fp32-1", "bf16-2", "bf16-3", "pipeline-0", "experts-0"])
def test_files_of_the_optimizer_are_named_even_if_all_are_missing(copies: Path, kind: str) -> None:
    folder = tags_in(copies / kind)[0].path
    names = sorted(file.name for file in folder.glob("*optim_states.pt"))
    for name in names:
        (folder / name).unlink()
    assert len(names) == 2 and sorted(deepspeed.open_tag(folder).missing) == names


def test_a_folder_in_the_place_of_a_file_is_no_file(save_dir: Path) -> None:
    (save_dir / "global_step3" / OPTIMIZER).unlink()
    (save_dir / "global_step3" / OPTIMIZER).mkdir()
    assert state_of(save_dir / "global_step3") == ("damaged", f"{OPTIMIZER}: missing")
    (save_dir / "global_step3" / OPTIMIZER).rmdir()
    for nowhere in ("nowhere", OPTIMIZER):
        (save_dir / "global_step3" / OPTIMIZER).symlink_to(nowhere)
        assert state_of(save_dir / "global_step3") == ("damaged", f"{OPTIMIZER}: missing")
        (save_dir / "global_step3" / OPTIMIZER).unlink()


def test_missing_files_of_a_universal_checkpoint(copies: Path) -> None:
    folder = copies / "fp32-3/global_step2_universal"
    for name in ("zero/0.weight/fp32.pt", "zero/optimizer_state.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"):
        (folder / name).rename(copies / "away")
        assert state_of(folder) == ("damaged", f"{name}: missing")
        (copies / "away").rename(folder / name)
    flip(
        folder / "zero/0.weight/exp_avg.pt",
        read_directory(folder / "zero/0.weight/exp_avg.pt").records["data/0"].offset,
    )
    assert "zero/0.weight/exp_avg.pt: record data/0" in state_of(folder)[1]


def test_tensor_parallel_layers_are_demanded_of_every_rank(copies: Path) -> None:
    """Names as a pipeline with tensor parallelism gives them."""
    folder = copies / "pipeline-1/global_step1"
    for file in folder.glob("layer_*"):
        shutil.copy(file, folder / file.name.replace("-model_states", "-model_00-model_states"))
        file.rename(folder / file.name.replace("-model_states", "-model_01-model_states"))
    state = torch.load(folder / MODEL, weights_only=False)
    state["checkpoint_parallel_dimensions"]["tp_degree"] = 2
    torch.save(state, folder / MODEL)
    assert state_of(folder)[0] == "ok"
    (folder / "layer_02-model_00-model_states.pt").unlink()
    assert state_of(folder) == ("damaged", "layer_02-model_00-model_states.pt: missing")


def test_files_of_other_ranks_are_no_part_of_the_save(save_dir: Path) -> None:
    """DeepSpeed merges model files that it finds, and zero_to_fp32 refuses surplus ones of the optimizer."""
    folder = save_dir / "global_step3"
    for stale in ("mp_rank_01_model_states.pt", OPTIMIZER.replace("rank_1", "rank_2"), OPTIMIZER.removeprefix("bf16_")):
        shutil.copy(folder / MODEL, folder / stale)
        assert state_of(folder) == ("damaged", f"{stale}: of an earlier save by other ranks")
        assert deepspeed.open_tag(folder).faults == (f"{stale} is of an earlier save by other ranks",)
        (folder / stale).unlink()


def test_foreign_files_are_verified_for_themselves(save_dir: Path) -> None:
    folder = save_dir / "global_step3"
    (folder / "notes.txt").write_text("mine")
    torch.save({"mine": torch.ones(3)}, folder / "mine.pt")
    flip(folder / "mine.pt", read_directory(folder / "mine.pt").records["data/0"].offset)
    found = {finding.path.name: finding.state for finding in lazyckpt.verify(folder).findings}
    assert found == {"global_step3": "ok", "mine.pt": "damaged"}
    assert whole(folder).files == tuple(sorted({*os.listdir(folder)} - {"notes.txt", "mine.pt"}))


def test_huge_numbers_in_names_and_files_cost_nothing(save_dir: Path) -> None:
    folder = save_dir / "global_step3"
    huge = f"zero_pp_rank_{'9' * 200}_mp_rank_00_optim_states.pt"
    shutil.copy(folder / OPTIMIZER, folder / huge)
    begin = time.process_time()
    assert huge in state_of(folder)[1]
    (folder / MODEL).write_bytes(b"PK\3\4")  # now the names alone tell the ranks
    assert deepspeed.open_tag(folder).missing == ()  # a file of the optimizer says how many ranks share it
    for file in folder.glob("*optim*"):
        file.write_bytes(b"PK\3\4")
    assert len(deepspeed.open_tag(folder).missing) == 11 and deepspeed.open_tag(folder).missing[-1] == "…"
    for world in (2**62, 10**30, -1, True, "2", None):
        state = torch.load(save_dir / "global_step2" / MODEL, weights_only=False)
        state |= {"dp_world_size": world, "mp_world_size": world, "global_steps": world, "num_experts": [world] * 3}
        torch.save(state, save_dir / "global_step2" / MODEL)
        tag = deepspeed.open_tag(save_dir / "global_step2")
        assert run("ls", save_dir).exit_code == 0
        assert len(tag.missing) == (11 if world == 2**62 else 0) and not tag.stale
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("shapes", [7, [7], [None], ["x", {1: 2}], [{"../../x": 1}], torch.ones(2)])
def test_contents_that_deepspeed_does_not_write_are_no_crash(save_dir: Path, shapes: Any) -> None:
    state = torch.load(save_dir / "global_step2" / MODEL, weights_only=False)
    odd = {"param_shapes": shapes, "buffer_names": shapes, "module": None, "optimizer": shapes, "num_experts": shapes}
    torch.save({**state, **odd, "ds_config": shapes, "checkpoint_parallel_dimensions": shapes}, save_dir / "x.pt")
    (save_dir / "x.pt").rename(save_dir / "global_step2" / MODEL)
    torch.save({"optimizer_state_dict": {"partition_count": shapes}}, save_dir / "global_step2" / OPTIMIZER)
    (save_dir / "global_step2" / OPTIMIZER.replace("rank_1", "rank_0")).unlink()
    for command in ("ls", "inspect", "verify", "prune"):
        assert run(command, save_dir).exit_code in (0, 1)


# damage


@pytest.mark.parametrize("kind", ["fp32-0", "bf16-2", "bf16-3", "experts-0", "pipeline-1"])
def test_every_flipped_byte_is_found_and_its_file_named(copies: Path, kind: str) -> None:
    folder = tags_in(copies / kind)[0].path
    for name in deepspeed.open_tag(folder).files:
        records = [record for record in read_directory(folder / name).records.values() if record.nbytes]
        for record in records if kind == "bf16-2" else (records[0], records[-4]):
            flip(folder / name, record.offset + record.nbytes // 2)
            state, told = state_of(folder)
            assert state == "damaged" and f"{name}: record {record.name}" in told
            with pytest.raises(CorruptFileError, match=name):
                whole(folder)
            flip(folder / name, record.offset + record.nbytes // 2)
    assert state_of(folder)[0] == "ok"


def test_every_truncated_file_is_incomplete(copies: Path) -> None:
    for kind in ("bf16-2", "bf16-3"):
        folder = tags_in(copies / kind)[0].path
        for name in deepspeed.open_tag(folder).files:
            data = (folder / name).read_bytes()
            for end in (len(data) - 1, len(data) // 2, 40, 0):
                os.truncate(folder / name, end)
                assert any(name in fault for fault in deepspeed.open_tag(folder).faults), (name, end)
                assert state_of(folder)[0] == "damaged" and name in state_of(folder)[1]
                assert name in run("ls", folder.parent).stdout
            (folder / name).write_bytes(bytes(len(data)))  # as a power cut may leave it
            assert any(name in fault for fault in deepspeed.open_tag(folder).faults)
            assert name in state_of(folder)[1]
            (folder / name).write_bytes(data)


def test_a_file_of_another_kind_is_damage(save_dir: Path) -> None:
    torch.save([1, 2], save_dir / "global_step3" / MODEL)
    assert "holds no dict" in state_of(save_dir / "global_step3")[1]
    with pytest.raises(CorruptFileError, match="holds no dict"):
        whole(save_dir / "global_step3")


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.marker), 0o777, True)


def test_no_command_runs_code_from_a_file(save_dir: Path, tmp_path: Path) -> None:
    keys = (
        "module",
        "param_shapes",
        "global_steps",
        "dp_world_size",
        "ds_config",
        "num_experts",
        "optimizer_state_dict",
    )
    for name in (MODEL, OPTIMIZER):
        torch.save({key: _Evil(tmp_path / "ran") for key in keys}, save_dir / "global_step3" / name)
    for words in (["ls"], ["inspect"], ["verify"], ["diff", save_dir / "global_step2"], ["prune", "--keep-last", "1"]):
        run(words[0], save_dir, *words[1:])
    deepspeed.tags(save_dir)
    whole(save_dir / "global_step3")
    assert not (tmp_path / "ran").exists()
    torch.load(save_dir / "global_step3" / MODEL, weights_only=False)
    assert (tmp_path / "ran").exists()  # so torch would have run it


def test_torchs_old_format_has_no_checksums(copies: Path) -> None:
    folder = copies / "legacy/global_step1"
    state, told = state_of(folder)
    assert state == "unreadable" and "has no checksums, so damage cannot be found" in told
    assert "has no checksums" in fails(2, "verify", copies / "legacy")
    with pytest.raises(UnsupportedFormatError, match="checkpoint_serialization: false"):
        whole(folder)
    (row,) = run_json("ls", copies / "legacy")["checkpoints"]
    assert (row["step"], row["ranks"], row["faults"]) == (1, None, [])
    (folder / MODEL).unlink()
    assert state_of(folder)[0] == "damaged" and f"{MODEL}: missing" in state_of(folder)[1]


# latest


def test_latest_that_names_a_missing_or_damaged_tag(save_dir: Path) -> None:
    (save_dir / "global_step3" / OPTIMIZER).unlink()
    found = {finding.path.name: finding for finding in lazyckpt.verify(save_dir).findings}
    assert [*found] == ["global_step3", "global_step2", "global_step1", "latest"]
    assert found["latest"].damage == ("names global_step3, which is damaged; the newest whole tag is global_step2",)
    assert run("verify", save_dir).exit_code == 1
    shutil.rmtree(save_dir / "global_step3")
    told = run("verify", save_dir).stdout
    assert "names 'global_step3', which is missing; the newest whole tag is global_step2" in told
    for command in ("inspect", "diff"):
        more = [save_dir / "global_step1"] if command == "diff" else []
        assert "names 'global_step3', which is missing" in fails(2, command, save_dir, *more)
    (save_dir / "latest").unlink()
    assert lazyckpt.verify(save_dir).ok
    assert lazyckpt.inspect(save_dir).path == save_dir / "global_step2"
    for step in (1, 2):
        shutil.rmtree(save_dir / f"global_step{step}")
    (save_dir / "latest").write_text("global_step2")
    assert "latest names 'global_step2', which is missing" in run("ls", save_dir).stdout
    assert "names 'global_step2', which is missing" in run("verify", save_dir).stdout


OUTSIDE = [
    "/etc",
    "..",
    "../run/global_step3",
    "a/../global_step3",
    ".",
    "",
    "\n",
    "global_step3/..",
    "x\0",
    "x" * 5000,
    f"global_step3{' ' * 5000}x",
]


@pytest.mark.parametrize("text", [*OUTSIDE, "\x1b[31mred", "x" * 300, "global_step33", "ÿ"])
def test_latest_leads_nowhere_else(save_dir: Path, text: str) -> None:
    (save_dir / "latest").write_text(text, encoding="latin-1")
    findings = {finding.path.name: finding.state for finding in lazyckpt.verify(save_dir).findings}
    assert findings == {"latest": "damaged"} | {f"global_step{n}": "ok" for n in (1, 2, 3)}
    for command in ("verify", "ls", "inspect", "prune"):
        shown = run(command, save_dir)
        assert "\x1b" not in shown.output and "latest" in shown.output
    with pytest.raises(LoadError):
        deepspeed.named(save_dir)
    assert "latest" in fails(2, "prune", save_dir, "--keep-last", "1", "--yes") and len(tags_in(save_dir)) == 3


def test_latest_is_read_as_deepspeed_reads_it(save_dir: Path) -> None:
    (save_dir / "latest").write_text(" global_step2\n")
    assert deepspeed.named(save_dir) == save_dir / "global_step2" and lazyckpt.verify(save_dir).ok
    (save_dir / "nested").mkdir()
    (save_dir / "global_step2").rename(save_dir / "nested/global_step2")
    (save_dir / "latest").write_text("nested/global_step2")
    assert lazyckpt.verify(save_dir).ok and len(lazyckpt.verify(save_dir).findings) == 3
    (save_dir / "nested/global_step2" / MODEL).unlink()
    assert "names nested/global_step2, which is damaged" in run("verify", save_dir).stdout


def test_links(save_dir: Path, made: Path) -> None:
    """One to another tag is that tag; one that leads out is a checkpoint of its own."""
    (save_dir / "best").symlink_to("global_step1")
    (save_dir / "elsewhere").symlink_to(made / "fp32-1/global_step1")
    (save_dir / "loop").symlink_to("loop")
    names = [finding.path.name for finding in lazyckpt.verify(save_dir).findings]
    assert names[:2] == ["global_step3", "global_step2"] and {*names[2:]} == {"global_step1", "elsewhere"}
    assert "link to global_step1" in run("ls", save_dir).stdout
    (save_dir / "latest").write_text("best")
    told = run_json("prune", save_dir, "--keep-last", "1", "--yes")
    assert [row["name"] for row in told["checkpoints"]] == ["global_step2"]
    assert {row["name"]: row["why"] for row in told["kept"]}["global_step1"] == "latest names it"
    flip(save_dir / "global_step1" / MODEL, 3000)
    assert "names best, which is damaged" in run("verify", save_dir).stdout


# prune


def names_left(save_dir: Path) -> list[str]:
    return sorted(name for name in os.listdir(save_dir) if (save_dir / name).is_dir())


def test_prune_keeps_the_newest_and_the_one_that_latest_names(save_dir: Path) -> None:
    assert "--keep-last N keeps only N" in run("prune", save_dir).stdout
    (save_dir / "latest").write_text("global_step1")
    told = run_json("prune", save_dir, "--keep-last", "1")
    assert [(row["name"], row["step"], row["why"]) for row in told["checkpoints"]] == [
        ("global_step2", 2, "beyond keep_last=1")
    ]
    assert [(row["name"], row["why"]) for row in told["kept"]] == [
        ("global_step3", "within keep_last=1"),
        ("global_step1", "latest names it"),
    ]
    assert len(names_left(save_dir)) == 3  # nothing without --yes
    assert run("prune", save_dir, "--keep-last", "1", "--keep-every", "2", "--yes").exit_code == 0
    assert len(names_left(save_dir)) == 3
    assert "removed 1 checkpoint and 0 leftovers" in run("prune", save_dir, "--keep-last", "1", "--yes").stdout
    assert names_left(save_dir) == ["global_step1", "global_step3"] and lazyckpt.verify(save_dir).ok
    words = ["--keep-last", "1", "--keep-best", "1", "--best", "loss"]
    assert "DeepSpeed saves no metrics" in fails(2, "prune", save_dir, *words)


def test_incomplete_tags_stay_and_do_not_count(save_dir: Path) -> None:
    os.truncate(save_dir / "global_step3" / MODEL, 700)
    told = run_json("prune", save_dir, "--keep-last", "1", "--yes")
    assert [row["name"] for row in told["checkpoints"]] == ["global_step1"]
    why = {row["name"]: row["why"] for row in told["kept"]}
    assert why["global_step2"] == "within keep_last=1" and f"being written: {MODEL}" in why["global_step3"]
    (save_dir / "global_step2" / OPTIMIZER).unlink()
    assert run_json("prune", save_dir, "--keep-last", "1", "--yes")["checkpoints"] == []
    assert names_left(save_dir) == ["global_step2", "global_step3"]


def test_prune_leaves_universal_checkpoints(copies: Path) -> None:
    assert run("prune", copies / "fp32-3", "--keep-last", "1", "--yes").exit_code == 0
    assert names_left(copies / "fp32-3") == ["global_step2", "global_step2_universal"]


@pytest.mark.parametrize("change", ["latest names it", "saved again"])
def test_a_tag_that_a_job_needs_meanwhile_stays(save_dir: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = prune.removal.remove

    def after_the_job(path: Path, may_go: Any) -> bool:
        if change == "latest names it":
            (save_dir / "latest").write_text(path.name)
        else:
            os.utime(path / MODEL, (time.time() + 60,) * 2)
        return remove(path, may_go)

    monkeypatch.setattr(prune.removal, "remove", after_the_job)
    found = prune.prune(save_dir, keep_last=2, remove=True)
    assert not found.doomed and names_left(save_dir) == ["global_step1", "global_step2", "global_step3"]


def test_verify_minds_no_tag_that_a_job_removes(save_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_file = verify_deepspeed.verify_file

    def and_remove(file: Path, *rest: Any) -> Any:
        found = verify_file(file, *rest)
        if file.parent.name == "global_step1" and file.exists():
            shutil.rmtree(file.parent)
        return found

    monkeypatch.setattr(verify_deepspeed, "verify_file", and_remove)
    found = {finding.path.name: finding.state for finding in lazyckpt.verify(save_dir).findings}
    assert found == {"global_step3": "ok", "global_step2": "ok", "global_step1": "gone"}
    shutil.rmtree(save_dir / "global_step2")
    with pytest.raises(LoadError, match="cannot be read"):
        whole(save_dir / "global_step2")


# in the folders of trainers


def test_a_checkpoint_of_the_trainer_with_a_tag_in_it(save_dir: Path, tmp_path: Path) -> None:
    """As the Hugging Face Trainer lays it out."""
    output = tmp_path / "output"
    for step in (2, 3):
        checkpoint = output / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (save_dir / f"global_step{step}").rename(checkpoint / f"global_step{step}")
        (checkpoint / "latest").write_text(f"global_step{step}")
        torch.save({"lr": 1}, checkpoint / "scheduler.pt")
        (checkpoint / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": None}))
    found = [str(finding.path.relative_to(output)) for finding in lazyckpt.verify(output).findings]
    assert found == [f"checkpoint-{n}/{name}" for n in (2, 3) for name in (f"global_step{n}", "scheduler.pt")]
    assert lazyckpt.verify(output).ok
    (document,) = [
        d for d in lazyckpt.diff(output / "checkpoint-2", output / "checkpoint-3").documents if d.name == MODEL
    ]
    assert document.changes
    assert f"global_step3/{MODEL}" in fails(2, "inspect", output / "checkpoint-3")
    (output / "checkpoint-3/global_step3" / OPTIMIZER).unlink()
    told = run("verify", output).stdout
    assert f"{OPTIMIZER}: missing" in told and "names global_step3, which is damaged" in told
    assert f"incomplete: global_step3: {OPTIMIZER} is missing" in run("ls", output).stdout.splitlines()[1]
    assert [row["newest"] for row in run_json("ls", output)["checkpoints"]] == [False, True]


def test_other_folders_are_no_tags(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "x/model.pt")
    (tmp_path / "latest").write_text("x")
    assert not deepspeed.is_save_dir(tmp_path) and deepspeed.tags(tmp_path) == []
    assert lazyckpt.verify(tmp_path).ok
    with pytest.raises(LoadError, match="no checkpoint of DeepSpeed"):
        whole(tmp_path / "x")
    with pytest.raises(LoadError, match="cannot be read"):
        deepspeed.tags(tmp_path / "missing")


def test_a_file_that_cannot_be_read_is_not_damaged(save_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.pread

    def fails_to_read(fd: int, nbytes: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"global_step3/{OPTIMIZER}"):
            raise OSError(5, "Input/output error")
        return read(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", fails_to_read)
    assert state_of(save_dir / "global_step3")[0] == "unreadable"
    with pytest.raises(ReadError):
        whole(save_dir / "global_step3")
