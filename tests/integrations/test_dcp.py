"""Checkpoints of torch.distributed.checkpoint: lazy, whole or not there, and plain DCP's own when they are read."""

from __future__ import annotations

import copy
import io
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from processes import Ranks  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import WriteItem  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

import lazyckpt  # noqa: E402
from dcp_training import Training, blank, content, leaves, load, names, save, save_async, why  # noqa: E402
from lazyckpt.capture import laziness  # noqa: E402
from lazyckpt.capture.decision import Decision, Decisions  # noqa: E402
from lazyckpt.integrations import dcp_staging  # noqa: E402
from lazyckpt.integrations.dcp import LazyStorageReader, LazyStorageWriter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def saves_as_plain_dcp(kind: str, folder: str) -> None:
    training = Training(kind)
    for number in range(3):  # unknown to the first save, with a share known to the later ones
        training.step()
        state, expected = training.state(), content(training.state())
        for engine in ("plain", "sync", "async"):
            path = f"{folder}/{engine}-{number}"
            save(engine, state, path)
            for reader in (dcp.FileSystemReader, LazyStorageReader):
                assert load(path, state, reader) == expected, (path, reader)


KINDS = [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("tp", 2), ("2d", 4), ("hsdp", 4), ("replicated", 2)]


@pytest.mark.long(first=2)
@pytest.mark.parametrize(("kind", "world"), KINDS)
def test_every_engine_reads_and_writes_what_plain_dcp_does(kind: str, world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(world, saves_as_plain_dcp, kind, str(tmp_path))
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {f"{engine}-{n}" for engine in ("plain", "sync", "async") for n in range(3)}


def saves_what_a_saver_plans_anew(kind: str, folder: str) -> None:
    training = Training(kind)
    anew, kept = lazyckpt.Saver(), lazyckpt.Saver()
    decided: list[bool] = []
    decide = Decisions._decide

    def noted(self: Decisions, *facts: Any) -> Decision:
        decided.append(self is kept.launcher.decisions)
        return decide(self, *facts)

    saves = 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laziness, "WATCHED_MIN_BYTES", 0)
        patch.setattr(Decisions, "_decide", noted)
        for number in range(saves):
            training.step()
            if number == 4:
                training.net.norm.weight.data = training.net.norm.weight.data.clone()
            files = []
            for name, saver in (("anew", anew), ("kept", kept)):
                if saver is anew and number > 0:
                    dcp_staging._shared_by(anew).saver._caches.clear()
                    anew.launcher.decisions._kept.clear()
                path = Path(folder, f"{name}-{number}")
                save_async(training.state(), LazyStorageWriter(path, saver=saver)).result()
                dist.barrier()
                files.append({file.name: file.read_bytes() for file in path.glob("*.distcp")})
            assert files[0] == files[1], number
    # Made anew: the first that captures something; the second, if an optimizer of an earlier case still lives; later,
    # for other memory and for its new evidence.
    assert decided.count(True) <= 4 < saves - 1 <= decided.count(False), decided
    for saver in (anew, kept):
        saver.close()


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 1), ("fsdp", 2), ("replicated", 2)])
def test_what_is_kept_between_saves_changes_no_byte(kind: str, world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(world, saves_what_a_saver_plans_anew, kind, str(tmp_path))


@pytest.mark.long
def test_torchs_tools_convert_a_checkpoint_with_lazyckpt_uninstalled(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, saves_as_plain_dcp, "fsdp", str(tmp_path))
    converted = without_lazyckpt(
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
        "import torch\n"
        f"for engine in ('plain', 'sync', 'async'): dcp_to_torch_save(r'{tmp_path}/' + engine + '-2', engine)\n"
        "plain, *ours = (torch.load(e, weights_only=False) for e in ('plain', 'sync', 'async'))\n"
        "from torch.utils._pytree import tree_flatten\n"
        "for state in ours:\n"
        "    for a, b in zip(tree_flatten(plain)[0], tree_flatten(state)[0], strict=True):\n"
        "        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (a, b)\n"
        "print('the same', len(tree_flatten(plain)[0]))",
        tmp_path,
    )
    assert converted.startswith("the same")


def without_lazyckpt(program: str, folder: Path) -> str:
    """Runs a program in a process that cannot import lazyckpt."""
    program = f"import sys; sys.modules['lazyckpt'] = None\n{program}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trains_and_saves(kind: str, path: str) -> None:
    training = Training(kind)
    training.step()
    dcp.async_save(training.state(), storage_writer=LazyStorageWriter(path)).result()


def loads_and_gathers(kind: str, path: str) -> dict[str, Any]:
    training = Training(kind)
    training.step()
    gathered = []
    for reader in (dcp.FileSystemReader, LazyStorageReader):
        state = blank(training.state())
        dcp.load(state, storage_reader=reader(path))
        whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in leaves(state)}
        gathered.append(content(whole))
    assert gathered[0] == gathered[1]
    return gathered[0]


def test_a_checkpoint_of_two_ranks_loads_on_any_number(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "two")
    ranks.run(2, trains_and_saves, "fsdp", path)
    wholes = [
        ranks.run(world, loads_and_gathers, kind, path)
        for world, kind in [(1, "fsdp"), (3, "fsdp"), (4, "fsdp"), (2, "tp")]
    ]
    assert all(whole == wholes[0][0] for of_world in wholes for whole in of_world)


def resumes(folder: str) -> None:
    straight = Training("fsdp")
    for _ in range(6):
        straight.step()
    first = Training("fsdp")
    for _ in range(3):
        first.step()
    future = save_async(first.state(), f"{folder}/3")
    first.step()  # goes on, as a run that dies later does
    future.result()
    second = Training("fsdp")
    state = second.state()
    dcp.load(state, storage_reader=LazyStorageReader(f"{folder}/3"))
    second.load(state)
    assert second.steps == 3
    for _ in range(3):
        second.step()
    assert content(second.state()) == content(straight.state())


def test_a_resumed_run_equals_the_uninterrupted_one(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, resumes, str(tmp_path))


# The snapshot


def steps_right_after(folder: str, fused: bool) -> list[float]:
    training = Training("fsdp", 30_001, torch.nn.LayerNorm)  # no buffers
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=0.01, fused=fused)
    shares = []
    for number in range(4):
        training.step()
        state, expected = training.state(), content(training.state())
        writer = LazyStorageWriter(f"{folder}/{number}")
        future = save_async(state, writer)
        staged = writer._staged
        training.step()
        state["progress"]["note"] = "changed"
        future.result()
        assert load(f"{folder}/{number}", state, LazyStorageReader) == expected
        if staged is not None:  # torch's thread may have taken it already
            shares.append(staged.capture.metrics.eager_bytes / staged.capture.metrics.bytes)
    return shares


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_right_after_async_save_tears_nothing_and_waits_for_little(
    fused: bool, ranks: Ranks, tmp_path: Path
) -> None:
    for shares in ranks.run(3, steps_right_after, str(tmp_path), fused):
        assert all(share < 0.03 for share in shares), shares


def changes_everything(folder: str) -> None:
    weight = torch.nn.Parameter(torch.full((5000,), 1.0 + dist.get_rank()))
    average = torch.full((5000,), 10.0 + dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = DTensor.from_local(torch.full((5000,), 20.0 + dist.get_rank()), mesh, [Shard(0)])
    notes = {"list": [1, {"deep": "a"}], "array": [torch.tensor([1.0])]}
    state = {"w": weight, "average": average, "shard": shard, "notes": notes}
    for number in range(2):
        expected = content(copy.deepcopy({"w": weight, "average": average, "notes": notes, "shard": shard}))
        future = save_async(state, f"{folder}/{number}")
        notes["list"][1]["deep"] = "changed"
        notes["list"].append(5)
        weight.data, average.data = average.data, weight.data  # as a swap of averaged weights does
        shard._local_tensor = torch.zeros(5000)
        state.clear()
        future.result()
        like = {
            "w": weight,
            "average": average,
            "shard": shard,
            "notes": {"list": [0, {"deep": ""}], "array": [torch.ones(1)]},
        }
        found = load(f"{folder}/{number}", like)
        # Of tensors that every rank holds, any rank's may be saved.
        for name in (".w", ".average"):
            first = [None] * dist.get_world_size()
            dist.all_gather_object(first, expected[name])
            assert found.pop(name) in first
            expected.pop(name)
        assert found == expected
        weight.data, average.data = average.data, weight.data
        shard._local_tensor = torch.full((5000,), 20.0 + dist.get_rank())
        notes["list"] = [1, {"deep": "a"}]
        state.update(w=weight, average=average, shard=shard, notes=notes)


def test_a_snapshot_is_of_its_moment_whatever_becomes_of_the_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, changes_everything, str(tmp_path))


@pytest.mark.parametrize("written", [False, True])
def test_without_a_page_witness_the_wait_for_the_future_gives_the_verdict(written: bool, tmp_path: Path) -> None:
    """The main thread owes the verdict, and ``result()`` of torch's future is no call of ours."""
    weight = torch.nn.Parameter(torch.randn(500, 500))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = weight.detach().clone()
    with lazyckpt.Saver(witness="versions") as saver, torch.no_grad():
        writer = LazyStorageWriter(tmp_path / "step", saver=saver)
        future = dcp.async_save({"the weight": weight}, storage_writer=writer)
        if written:
            weight.add_(1)
        failed = why(lambda: future.result(timeout=60))
    if failed:
        assert written and "the weight was written to" in failed
        assert not (tmp_path / "step").exists()
    else:  # perhaps it was copied before the write
        found = {"the weight": torch.zeros(500, 500)}
        dcp.load(found, checkpoint_id=tmp_path / "step")
        assert torch.equal(found["the weight"], before)


class Halving(DefaultSavePlanner):
    """Writes tensors in another dtype: new tensors, made long after ``async_save``."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.half() if isinstance(found, torch.Tensor) and found.dim() else found


def transforms(folder: str) -> tuple[str, list[str]]:
    training = Training("fsdp")
    training.step()
    failed = why(lambda: save("async", training.state(), f"{folder}/async", planner=Halving()))
    training.step()  # nothing waits for what was given up
    save("sync", training.state(), f"{folder}/sync", planner=Halving())
    return failed, names(folder)


def test_a_tensor_that_is_not_in_the_snapshot_fails_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for failed, found in ranks.run(2, transforms, str(tmp_path)):
        assert "model.up.weight" in failed and "not in the snapshot" in failed
        assert found == ["sync"]


def shares_the_work(folder: str) -> tuple[list[int], list[int]]:
    torch.manual_seed(0)
    state: dict[str, Any] = {f"w{n}": torch.full((1000 * (1 + n % 5),), float(n)) for n in range(40)}
    state["big"] = torch.ones(30_000)
    for engine in ("sync", "async"):
        for number in range(3):
            save(engine, state, f"{folder}/{engine}-{number}")
            assert load(f"{folder}/{engine}-{number}", state) == content(state)
    sizes = [os.path.getsize(f"{folder}/{name}/__{dist.get_rank()}_0.distcp") for name in ("sync-2", "async-2")]
    return sizes, [len(os.listdir(f"{folder}/async-{number}")) for number in range(3)]


def test_what_all_ranks_hold_is_written_once_and_by_all_alike(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, shares_the_work, str(tmp_path))
    nbytes = 4 * (1000 * 8 * (1 + 2 + 3 + 4 + 5) + 30_000)
    for engine in (0, 1):
        sizes = [of_rank[0][engine] for of_rank in found]
        assert nbytes < sum(sizes) < 1.4 * nbytes  # items begin on pages
        assert max(sizes) - min(sizes) < 30_000
    # The first save copies all and writes a share; later ones capture their share, and there is nothing else.
    assert found[0][1] == [4, 4, 4]


def loses_a_key(folder: str) -> tuple[str, str]:
    state = {f"w{n}": torch.full((100,), float(n)) for n in range(4)}
    for number in range(2):
        save("async", state, f"{folder}/{number}")
    if dist.get_rank() == 0:
        del state["w0"], state["w1"]
    first = why(lambda: save("async", state, f"{folder}/lost"))
    second = why(lambda: save("async", state, f"{folder}/again"))
    return first, second


def test_a_state_that_changes_on_one_rank_is_saved_sooner_or_later(ranks: Ranks, tmp_path: Path) -> None:
    for first, second in ranks.run(2, loses_a_key, str(tmp_path)):
        assert not first or "not in the snapshot" in first
        assert not second
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# Reading, in one process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"w": torch.arange(60_000.0).reshape(300, 200), "b": torch.ones(3), "n": {"x": 1}}
    dcp.save(state, storage_writer=LazyStorageWriter(tmp_path / "step"))
    return tmp_path / "step"


def state_like() -> dict[str, Any]:
    return {"w": torch.zeros(300, 200), "b": torch.zeros(3), "n": {"x": 0}}


def test_nothing_of_ours_stands_in_the_metadata(folder: Path) -> None:
    ops = pickletools.genops((folder / ".metadata").read_bytes())
    texts = {arg for _, arg, _ in ops if isinstance(arg, str)}
    assert not [text for text in texts if "lazyckpt" in text and text != str(folder)]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert metadata.storage_meta.checkpoint_id == str(folder)


def test_a_checkpoint_of_an_old_torch_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones describe tensors by a class of ShardedTensor's. Regression: it was not to be unpickled."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.metadata.TensorProperties", TensorProperties)
        patch.setattr("torch.distributed.checkpoint.planner_helpers.TensorProperties", TensorProperties)
        dcp.save({"w": torch.arange(7.0)}, checkpoint_id=tmp_path / "old")
    assert b"torch.distributed._shard" in (tmp_path / "old" / ".metadata").read_bytes()
    state = {"w": torch.zeros(7)}
    dcp.load(state, storage_reader=LazyStorageReader(tmp_path / "old"))
    assert torch.equal(state["w"], torch.arange(7.0))


class Noting(DefaultSavePlanner):
    """Keeps what DCP tells a planner about the storage."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.told = storage_meta
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_the_planner_the_writer_and_the_metadata_know_a_save_and_a_load_by_the_same_id(tmp_path: Path) -> None:
    """Regression: the planner heard of no id at the first save, and of the last save's at the next one."""
    writer, planner, seen = LazyStorageWriter(tmp_path / "0"), Noting(), set()
    for name in ("0", "1"):
        if name != "0":
            writer.reset(tmp_path / name)
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner)
        reader = LazyStorageReader(tmp_path / name)
        found = reader.read_metadata().storage_meta
        assert found is not None and found.load_id == reader.load_id
        assert planner.told.save_id == found.save_id == writer.save_id
        seen.add(found.save_id)
    assert len(seen) == 2 and "" not in seen


def test_a_damaged_file_is_named_with_its_tensor(folder: Path) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    at = data.index(torch.tensor(1234.0).numpy().tobytes())
    data[at] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    assert (failed := why(lambda: dcp.load(state_like(), storage_reader=LazyStorageReader(folder))))
    assert "CorruptFileError" in failed and "__0_0.distcp" in failed and ": w" in failed


@pytest.mark.parametrize("where", ["metadata", "item"])
def test_a_hostile_pickle_runs_nothing(where: str, folder: Path, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was here"),)

    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    else:
        out = io.BytesIO()
        torch.save(Hostile(), out)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        info = metadata.storage_data[MetadataIndex("n.x")]
        info.offset, info.length = (folder / info.relative_path).stat().st_size, len(out.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with open(folder / info.relative_path, "ab") as file:
            file.write(out.getvalue())
    failed = why(lambda: dcp.load(state_like(), storage_reader=LazyStorageReader(folder)))
    assert "not to be unpickled" in failed
    assert not (tmp_path / "was here").exists()
    if where == "item":
        why(lambda: dcp.load(state_like(), storage_reader=LazyStorageReader(folder, weights_only=False)))
        assert (tmp_path / "was here").exists(), "this test proves nothing"
