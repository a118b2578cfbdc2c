"""Many ranks and their mirrors: each uploads what it wrote, rank 0 commits, and all of them restore from there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_server import Files, FTPServer
from object_store import CREDENTIALS, S3, Asked
from processes import Died, Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lazyckpt
from lazyckpt import Checkpointer, Mirror, waits
from lazyckpt.stores.watched import Watched
from lazyckpt.tiers import helper, uploads
from trials import Trials


def net(sharded: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(600, 701), torch.nn.Linear(701, 300))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def begin(folder: Path, environment: dict[str, str]) -> str:
    """Gives this rank an access key of its own, and leaves its process id."""
    os.environ.update(environment)
    rank = dist.get_rank()
    os.environ["AWS_ACCESS_KEY_ID"] = f"rank-{rank}"
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    return f"rank-{rank}"


def case(folder: Path, url: str, environment: dict[str, str], sharded: bool, options: Any = None) -> Any:
    begin(folder, environment)
    writers = None if sharded else "all"
    mirrors = [Mirror(url, options=options or {})]
    with lazyckpt.Checkpointer(folder / "a", mirrors=mirrors, writers=writers) as ckpt:
        model = net(sharded)
        ckpt.track(model=model)
        handle = ckpt.save(1)
        handle.result(60)
        path = handle.mirrored().result(60)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "a")
    dist.barrier()
    with lazyckpt.Checkpointer(folder / "b", mirrors=mirrors, writers=writers) as ckpt:
        again = net(sharded)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        ckpt.track(model=again)
        restored = ckpt.restore()
    same = all(torch.equal(a, b) for a, b in zip(values(again), values(model), strict=True))
    return str(restored.path) if restored is not None else None, same, path


def environment_of(s3: S3) -> dict[str, str]:
    return {**CREDENTIALS, "AWS_ENDPOINT_URL": s3.proxy.endpoint}


def senders(s3: S3) -> dict[str, set[str]]:
    """The access keys that have sent each object of a checkpoint, by name."""
    found: dict[str, set[str]] = {}
    for asked in s3.proxy.asked:
        path = asked.path.partition("?")[0]
        if asked.method == "PUT" and "/step-" in path:
            found.setdefault(path.rpartition("/")[2], set()).add(asked.by)
    return found


@pytest.mark.parametrize("sharded", [True, False])
def test_each_rank_uploads_what_it_wrote_and_all_restore(ranks: Ranks, s3: S3, tmp_path: Path, sharded: bool) -> None:
    found = ranks.run(2, case, tmp_path, s3.url(), environment_of(s3), sharded)
    where, here = f"{s3.url()}/step-00000001", tmp_path / "a" / "step-00000001"
    assert found == [(where, True, here), (where, True, here)]
    assert lazyckpt.verify(s3.url()).ok
    told = json.loads(s3.body("run/step-00000001/manifest.json"))
    first = {file["name"]: {f"rank-{file['writers'][0]}"} for file in told["files"]}
    assert senders(s3) == {**first, "manifest.json": {"rank-0"}}
    assert set(first) == ({".metadata", "__0_0.distcp", "__1_0.distcp"} if sharded else {"state.pt", "rank-1.pt"})
    last = [asked for asked in s3.proxy.asked if asked.method == "PUT" and "/step-" in asked.path][-1]
    assert "manifest.json" in last.path


def interrupted(folder: Path, url: str, environment: dict[str, str], at: str) -> Any:
    """Ctrl-C on rank 1, which reads the file ``at``, while the store says nothing more."""
    begin(folder, environment)
    weights = torch.arange(10 << 20, dtype=torch.float32)
    goes_on, send, signals = threading.Event(), Watched.stream, iter([signal.SIGINT])

    def stalled(self: Watched, name: str, begin: int, end: int) -> Iterator[Any]:
        if not name.endswith(at):
            return send(self, name, begin, end)
        for number in signals:
            os.kill(os.getpid(), number)
        assert goes_on.wait(120)
        return send(self, name, begin, end)

    with lazyckpt.Checkpointer(folder / "a", mirrors=[url], writers="all") as ckpt:
        ckpt.track(weights=weights)
        ckpt.save(1).mirrored().result(60)
    live = torch.zeros_like(weights)
    with (
        lazyckpt.Checkpointer(folder / "b", mirrors=[url], writers="all") as ckpt,
        pytest.MonkeyPatch.context() as patch,
    ):
        ckpt.track(weights=live)
        if dist.get_rank() == 0:
            with pytest.raises(lazyckpt.RankError, match="rank 1 failed: KeyboardInterrupt"):
                ckpt.restore()
            (folder / "told").touch()
            return None
        patch.setattr(Watched, "stream", stalled)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        began = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                ckpt.restore()
        finally:
            signal.signal(signal.SIGINT, before)
        took_s = time.monotonic() - began
        mine = live[5 << 20 :].clone()
        goes_on.set()
        while not (folder / "told").exists():  # close() would tell rank 0, too
            time.sleep(0.01)
    return took_s, bool(mine.any())


@pytest.mark.parametrize("at", ["rank-1.pt", "state.pt"])
def test_ctrl_c_ends_a_restore_of_ranks_while_a_store_stalls(ranks: Ranks, s3: S3, tmp_path: Path, at: str) -> None:
    """In what this rank reads for itself, and in its share of what all read together."""
    _, (took_s, landed) = ranks.run(2, interrupted, tmp_path, s3.url(), environment_of(s3), at)
    assert took_s < 60 and not landed


def test_ranks_upload_to_a_server_without_labels(
    ranks: Ranks, ftp: FTPServer, ftp_place: Files, tmp_path: Path
) -> None:
    """Rank 0 does not wait in vain for the checksums of what the other has sent."""
    found = ranks.run(2, case, tmp_path, ftp_place.url(), {}, True, ftp.login)
    where, here = f"{ftp_place.url()}/step-00000001", tmp_path / "a" / "step-00000001"
    assert found == [(where, True, here), (where, True, here)] and lazyckpt.verify(ftp_place.url()).ok


def mounted(folder: Path) -> Any:
    begin(folder, {})
    with lazyckpt.Checkpointer(folder / "a", mirrors=[folder / "lustre"], keep_last=1) as ckpt:
        model = net(True)
        ckpt.track(model=model)
        for step in (1, 2):
            ckpt.save(step).mirrored().result(60)
        lag_s = ckpt.mirror_lag_s
    return lag_s


def test_ranks_fill_one_folder_of_a_mounted_mirror(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, mounted, tmp_path) == [0.0, 0.0]
    assert lazyckpt.verify(tmp_path / "lustre").ok
    (of_rank_1,) = (tmp_path / "lustre" / "step-00000002").glob("__1_0.distcp")
    assert of_rank_1.read_bytes() == (tmp_path / "a" / "step-00000002" / "__1_0.distcp").read_bytes()
    left = [path.name for path in (tmp_path / "lustre").rglob("*") if "tmp-" in path.name or "unfin" in path.name]
    assert left == []


def dying(folder: Path, victim: int) -> Any:
    """A rank dies when it has read a file for a mounted mirror, and has not written it yet."""
    begin(folder, {})
    rank = dist.get_rank()
    if rank == victim:
        module = uploads if rank == 0 else helper
        module.parts_of = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with Checkpointer(folder / "a", mirrors=[folder / "lustre"], rank_timeout_s=2.0) as ckpt:
        ckpt.track(model=net(True))
        handle = ckpt.save(1)
        handle.result(60)
        return handle.mirrored().exception(60) is None


@pytest.mark.long(first=1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_leaves_nothing_in_a_mounted_folder(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    died = Died(-signal.SIGKILL)
    assert ranks.run(2, dying, tmp_path, victim) == ([died, False] if victim == 0 else [True, died])
    there = tmp_path / "lustre"
    assert (there / "step-00000001").exists() == (victim == 1)
    with Checkpointer(tmp_path / "a", mirrors=[there]):
        pass
    assert lazyckpt.verify(there).ok
    names = {path.name for path in there.rglob("*") if path.parent == there or path.is_dir()}
    assert names == {"step-00000001", ".lazyckpt-run"}


def saving(folder: Path, url: str, environment: dict[str, str], timeout_s: float, patience_s: float) -> Any:
    """Saves steps 1 and 2, and returns what ``mirrored`` says."""
    begin(folder, environment)
    waits.MIRROR_PATIENCE_S, waits.MIRROR_FIRST_PAUSE_S = patience_s, 0.05
    with Checkpointer(folder / "a", mirrors=[url], rank_timeout_s=timeout_s) as ckpt:
        ckpt.track(model=net(True))
        handle = ckpt.save(1)
        handle.result(60)
        try:
            handle.mirrored().result(60)
        except lazyckpt.MirrorError as error:
            return error.what
    return ""


def closing(folder: Path, url: str, environment: dict[str, str]) -> Any:
    """Closes while the first upload is under way. Returns the steps that are there, and the warnings."""
    begin(folder, environment)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Checkpointer(folder / "a", mirrors=[lazyckpt.Mirror(url, max_bytes_per_s=1e6)]) as ckpt:
            ckpt.track(model=net(True))
            handles = [ckpt.save(step) for step in (1, 2, 3)]
    there = [handle.step for handle in handles if handle.mirrored().exception(1) is None]
    return there, [str(warning.message) for warning in told if "checkpoint" in str(warning.message)]


def test_the_end_waits_for_uploads_on_every_rank(ranks: Ranks, s3: S3, tmp_path: Path) -> None:
    found = ranks.run(2, closing, tmp_path, s3.url(), environment_of(s3))
    assert found[0] == found[1] and found[0][1] == [] and found[0][0][-1] == 3
    assert lazyckpt.verify(s3.url()).ok


def sends(rank: int) -> Callable[[Asked], bool]:
    """Whether a rank sends a file of a checkpoint."""
    return lambda asked: asked.method == "PUT" and "/step-" in asked.path and asked.by == f"rank-{rank}"


def killed_at(folder: Path, matches: Callable[[Asked], bool], killed: list[int]) -> Callable[[Asked], bool]:
    """Kills these ranks when such a request comes. It is answered as if nothing had happened."""

    def kill(asked: Asked) -> bool:
        if matches(asked):
            for rank in killed:
                pid = folder / f"pid-{rank}"
                if pid.exists():
                    os.kill(int(pid.read_text()), signal.SIGKILL)
                    pid.unlink()
        return False

    return kill


@pytest.mark.long
def test_a_rank_that_dies_during_its_upload_is_replaced_by_rank_0(ranks: Ranks, s3: S3, tmp_path: Path) -> None:
    s3.proxy.inject("reset", killed_at(tmp_path, sends(1), [1]))
    s3.proxy.inject("reset", sends(1), times=1000)
    found = ranks.run(2, saving, tmp_path, s3.url(), environment_of(s3), 4.0, 600.0)
    assert found == ["", Died(-signal.SIGKILL)]
    assert lazyckpt.verify(s3.url()).ok
    assert senders(s3)["__1_0.distcp"] == {"rank-0", "rank-1"}


def test_a_rank_that_hangs_is_replaced_by_rank_0(ranks: Ranks, s3: S3, tmp_path: Path) -> None:
    held = s3.proxy.inject("stall", sends(1), times=1000)
    s3.proxy.inject("status", lambda asked: "manifest.json" in asked.path and heals(s3, asked))
    found = ranks.run(2, saving, tmp_path, s3.url(), environment_of(s3), 120.0, 0.3)
    assert found == ["", ""] and held.seen.is_set()
    assert lazyckpt.verify(s3.url()).ok
    assert senders(s3)["__1_0.distcp"] == {"rank-0", "rank-1"}


def heals(s3: S3, asked: Asked) -> bool:
    """Lets the rank go on that hangs, once rank 0 commits."""
    if asked.method == "PUT":
        for fault in s3.proxy.faults:
            fault.times = 0
            fault.over.set()
    return False


@pytest.mark.long
def test_without_rank_0_nothing_is_committed_and_the_next_run_uploads(ranks: Ranks, s3: S3, tmp_path: Path) -> None:
    s3.proxy.inject("reset", killed_at(tmp_path, lambda asked: "/manifest.json" in asked.path, [0]))
    s3.proxy.inject("reset", lambda asked: "/manifest.json" in asked.path and asked.method == "PUT", times=1000)
    found = ranks.run(2, saving, tmp_path, s3.url(), environment_of(s3), 4.0, 600.0)
    assert found[0] == Died(-signal.SIGKILL) and "and had not uploaded it" in found[1]
    the_next_run_completes(s3, tmp_path)


@pytest.mark.long(first=1)
@pytest.mark.parametrize("which", ["__0_0.distcp", "__1_0.distcp", "manifest.json", "upload of rank 1 ended"])
def test_killed_together_no_half_checkpoint_is_seen(ranks: Ranks, s3: S3, tmp_path: Path, which: str) -> None:
    def comes(asked: Asked) -> bool:
        if which == "upload of rank 1 ended":
            return asked.by == "rank-0" and "__1_0.distcp" in asked.path  # rank 0 has found it, and asks for its label
        return asked.method == "PUT" and which in asked.path

    s3.proxy.inject("reset", killed_at(tmp_path, comes, [0, 1]))
    s3.proxy.inject("reset", comes, times=1000)
    found = ranks.run(2, saving, tmp_path, s3.url(), environment_of(s3), 4.0, 600.0)
    assert found == [Died(-signal.SIGKILL)] * 2
    assert "run/step-00000001/manifest.json" not in s3.names()
    the_next_run_completes(s3, tmp_path)


def the_next_run_completes(s3: S3, folder: Path, key: str = "run") -> None:
    """With one rank: any number does."""
    s3.proxy.heal()
    with Checkpointer(folder / "a", mirrors=[s3.url(key)]):
        pass
    assert lazyckpt.verify(s3.url(key)).ok and f"{key}/step-00000001/manifest.json" in s3.names()


@pytest.mark.long
@pytest.mark.timeout(3600)  # of all of them
def test_killed_anywhere_no_half_checkpoint_is_seen(ranks: Ranks, s3: S3, tmp_path: Path, trials: Trials) -> None:
    """One rank, or both, at any request. A committed checkpoint is whole, and the next run uploads the others."""
    committed = 0
    count = trials.count(3, 200)
    for number in range(count):
        folder, key = tmp_path / str(number), f"run-{number}"
        folder.mkdir()
        left = trials.random.randrange(25)
        killed = trials.random.choice([[0], [1], [0, 1]])

        def comes(asked: Asked, key: str = key) -> bool:
            nonlocal left
            left -= f"/{key}" in asked.path or key in asked.path
            return left < 0

        s3.proxy.inject("reset", killed_at(folder, comes, killed))
        ranks.run(2, saving, folder, s3.url(key), environment_of(s3), 2.0, 600.0)
        s3.proxy.heal()
        if f"{key}/step-00000001/manifest.json" in s3.names():
            committed += 1
            assert lazyckpt.verify(s3.url(key)).ok
        the_next_run_completes(s3, folder, key)
    trials.report("kills of ranks that upload together", count, tmp_path, committed=committed)


def alone(folder: Path, url: str, environment: dict[str, str]) -> Any:
    """Every rank has a run of its own."""
    mine = begin(folder, environment)
    with Checkpointer(folder / mine, mirrors=[f"{url}/{mine}"]) as ckpt:
        ckpt.track(weights=torch.full((1000,), float(dist.get_rank())))
        ckpt.save(1).mirrored().result(60)
    return lazyckpt.load(f"{url}/{mine}/step-00000001", key="weights")[0].item()


def test_ranks_that_save_alone_upload_alone(ranks: Ranks, s3: S3, tmp_path: Path) -> None:
    assert ranks.run(2, alone, tmp_path, s3.url(), environment_of(s3)) == [0.0, 1.0]


def folder_case(folder: Path, url: str, environment: dict[str, str], slow: bool) -> Any:
    """A folder that the ranks stage together, as the trainers do; a lone file, which rank 0 saves."""
    begin(folder, environment)
    rank = dist.get_rank()
    with lazyckpt.Saver(mirrors=[url]) as saver:
        model = net(True)
        with saver.stage(folder / "a" / "checkpoint-1", step=1, all_ranks=True) as staged:
            (staged.path / f"random_{rank}.txt").write_text(f"of rank {rank}")
            staged.add(f"optimizer/rank-{rank}.pt", {"rank": torch.full((1000,), float(rank))})
            staged.add_shards("model", model.state_dict())
            handle = staged.save(hold_back=slow)
        handle.result(60)
        dist.barrier()
        if slow and rank == 0:
            (handle.path / "note.txt").write_text("by a callback")
            saver.mirror(handle)
        where = str(handle.mirrored().result(60))
    return where


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "held back"])
@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_each_rank_uploads_its_part_of_a_trainers_folder(
    ranks: Ranks, s3: S3, tmp_path: Path, kind: str, slow: bool
) -> None:
    place = s3.url() if kind == "bucket" else str(tmp_path / "lustre")
    found = ranks.run(2, folder_case, tmp_path, place, environment_of(s3), slow)
    here = tmp_path / "a" / "checkpoint-1"
    assert found == [str(here)] * 2
    copy = lazyckpt.pull(place, tmp_path / "b")
    names = {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()} - {".lazyckpt-lock"}
    assert {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()} == names
    assert all((copy / name).read_bytes() == (here / name).read_bytes() for name in names)
    if kind == "bucket":
        sent = [asked for asked in s3.proxy.asked if asked.method == "PUT" and "/checkpoint-1/" in asked.path]
        by = {asked.path.partition("?")[0].split("/checkpoint-1/")[1]: asked.by for asked in sent}
        assert {name: by[name] for name in ("optimizer/rank-1.pt", "model/__1_0.distcp")} == {
            "optimizer/rank-1.pt": "rank-1",
            "model/__1_0.distcp": "rank-1",
        }
        assert {by[name] for name in ("optimizer/rank-0.pt", "random_1.txt", "manifest.json")} == {"rank-0"}
        assert "manifest.json" in sent[-1].path
