"""A run with mirrors: what goes there and when, what stays here meanwhile, and what a restore takes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from file_server import Files, InMemory
from object_store import S3, Asked, Fault

import lazyckpt
from endings import in_a_child
from lazyckpt import Checkpointer, ConfigError, CorruptFileError, Mirror, MirrorError, ReadError
from lazyckpt.tiers import uploads as uploads_module
from trials import Trials

Place: TypeAlias = S3 | Files | InMemory


def state(step: int) -> torch.Tensor:
    return torch.full((50_000,), float(step))


class Run:
    """Saves a tensor that says its step."""

    def __init__(self, folder: Path, mirrors: list[Any], **knobs: Any) -> None:
        self.weights = torch.zeros(50_000)
        self.ckpt = Checkpointer(folder, mirrors=mirrors, **knobs)
        self.ckpt.track(weights=self.weights)
        self.handles: dict[int, lazyckpt.SaveHandle] = {}

    def save(self, step: int) -> Future[Path]:
        self.weights.fill_(float(step))
        handle = self.handles[step] = self.ckpt.save(step)
        handle.result()
        return handle.mirrored()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()


def committed(s3: Place, key: str = "run") -> list[int]:
    return [int(name.split("/")[1][5:]) for name in s3.names() if name.startswith(f"{key}/step-") and "manif" in name]


def local(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/manifest.json"))


def uploads(asked: Asked) -> bool:
    return "state.pt" in asked.path and asked.method in ("PUT", "POST")


def loads(asked: Asked) -> bool:
    return "state.pt" in asked.path and asked.method == "GET"


@pytest.fixture
def held(s3: S3) -> Iterator[Fault]:
    """The server takes no state until the test calls ``s3.proxy.heal``."""
    yield s3.proxy.inject("stall", uploads, times=1000)
    s3.proxy.heal()


def test_every_place_gets_the_checkpoints_and_keeps_its_own_number(place: Place, tmp_path: Path) -> None:
    lustre = tmp_path / "lustre"
    places = [Mirror(place.url(), every=2, keep_last=2), Mirror(lustre, keep_last=3, keep_every=4)]
    with Run(tmp_path / "a", places, keep_last=1) as run:
        for step in range(1, 9):
            run.save(step).result(60)
        assert run.ckpt.mirror_lag_s == 0.0
    assert (local(tmp_path / "a"), committed(place), local(lustre)) == ([8], [6, 8], [4, 6, 7, 8])
    for where in (str(tmp_path / "a"), place.url(), str(lustre)):
        loaded = lazyckpt.load(f"{where}/step-00000008", key="weights")
        assert torch.equal(loaded, state(8))


def test_saves_do_not_wait_for_a_mirror_and_only_the_newest_waits(s3: S3, tmp_path: Path, held: Fault) -> None:
    with Run(tmp_path / "a", [s3.url()], keep_last=1) as run:
        first = run.save(1)
        assert held.seen.wait(60)
        others = [run.save(step) for step in (2, 3, 4)]
        assert not first.done() and run.ckpt.mirror_lag_s > 0.0
        for step, other in zip((2, 3), others, strict=False):
            with pytest.raises(MirrorError, match=rf"step {step}: step {step + 1}, which is newer, goes there instead"):
                other.result(60)
        wait_for(lambda: local(tmp_path / "a") == [1, 4])  # the upload reads step 1, the others go
        s3.proxy.heal()
        first.result(60), others[2].result(60)
        run.save(5).result(60)
        wait_for(lambda: local(tmp_path / "a") == [5])
        assert isinstance(run.handles[2].mirrored().exception(60), MirrorError)  # also if asked late
        assert run.handles[1].mirrored().result(60) == tmp_path / "a" / "step-00000001"
    assert committed(s3) == [1, 4, 5]


def test_a_mirror_that_fails_is_a_warning_and_gets_the_newest_later(s3: S3, tmp_path: Path) -> None:
    fault = s3.proxy.inject("status", times=10_000, status=403, code="ExpiredToken")
    with (
        pytest.warns(UserWarning, match=r"could not be uploaded: .*\(ExpiredToken\); it is tried again") as warned,
        Run(tmp_path / "a", [s3.url()], keep_last=1) as run,
    ):
        run.save(1)
        assert fault.seen.wait(60)
        last = run.save(2)
        wait_for(lambda: fault.times < 9_990)
        with pytest.warns(UserWarning, match="works again: step 2"):
            s3.proxy.heal()
            last.result(60)
    assert len([w for w in warned if "could not" in str(w.message)]) == 1
    assert committed(s3) == [2]


def test_the_end_does_not_wait_for_a_mirror_that_fails_and_the_next_run_uploads(s3: S3, tmp_path: Path) -> None:
    s3.proxy.inject("status", times=10_000, status=403, code="AccessDenied")
    with (
        pytest.warns(UserWarning, match="could not be uploaded"),
        pytest.warns(UserWarning, match="not all checkpoints"),
        Run(tmp_path / "a", [s3.url()]) as run,
    ):
        run.save(1), run.save(2)
    assert committed(s3) == []
    s3.proxy.heal()
    with Run(tmp_path / "a", [s3.url()]):
        pass
    assert committed(s3) == [2]


def test_a_new_machine_restores_from_the_mirror_and_goes_on_there(place: Place, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [place.url()]) as run:
        run.save(1).result(60), run.save(2).result(60)
    with Run(tmp_path / "b", [place.url()]) as run:
        restored = run.ckpt.restore()
        assert restored == 2 and str(restored.path) == f"{place.url()}/step-00000002"
        assert torch.equal(run.weights, state(2))
        run.save(3).result(60)
        with pytest.warns(UserWarning, match="step 3 was saved later"):
            assert run.ckpt.restore(step=1) == 1 and torch.equal(run.weights, state(1))
    newest = [json.loads(place.body(f"run/step-0000000{step}/manifest.json")) for step in (1, 2, 3)]
    assert [(told["sequence"], told["parent"]) for told in newest] == [(1, None), (2, 1), (3, 2)]
    with Checkpointer(tmp_path / "c", mirrors=[place.url()], read_only=True) as reader:
        weights = torch.zeros(50_000)
        reader.track(weights=weights)
        assert reader.restore() == 3 and torch.equal(weights, state(3))


def test_what_is_here_goes_before_what_is_there(s3: S3, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [s3.url()]) as run:
        run.save(1).result(60)
        s3.proxy.asked.clear()
        assert run.ckpt.restore() == 1 and not any(map(loads, s3.proxy.asked))


@pytest.mark.parametrize("there", ["missing", "flipped", "cut"])
def test_a_damaged_copy_falls_back_to_another_place_and_then_to_an_older_step(
    place: Place, tmp_path: Path, there: str
) -> None:
    lustre = tmp_path / "lustre"
    with Run(tmp_path / "a", [place.url(), lustre]) as run:
        run.save(1).result(60), run.save(2).result(60)
    shutil.rmtree(tmp_path / "a")
    damage(place, "run/step-00000002/state.pt", there)
    with Run(tmp_path / "b", [place.url(), lustre]) as run:
        with pytest.warns(UserWarning, match="passed over"):
            assert str(run.ckpt.restore().path) == str(lustre / "step-00000002")  # type: ignore[union-attr]
        assert torch.equal(run.weights, state(2))
    shutil.rmtree(lustre), shutil.rmtree(tmp_path / "b")
    with Run(tmp_path / "b", [place.url(), lustre]) as run, pytest.warns(UserWarning, match="passed over"):
        assert run.ckpt.restore() == 1 and torch.equal(run.weights, state(1))


def test_a_run_that_falls_back_is_numbered_after_what_it_passed_over(place: Place, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [place.url()]) as run:
        run.save(1).result(60), run.save(2).result(60)
    damage(place, "run/step-00000002/state.pt", "flipped")
    with Run(tmp_path / "b", [place.url()]) as run:
        with pytest.warns(UserWarning, match="passed over"):
            assert run.ckpt.restore() == 1
        run.save(3).result(60)
    assert json.loads(place.body("run/step-00000003/manifest.json"))["sequence"] == 3
    with Run(tmp_path / "c", [place.url()]) as run:
        assert run.ckpt.restore() == 3 and torch.equal(run.weights, state(3))


@pytest.mark.parametrize("how", ["removed", "saved again"])
def test_a_checkpoint_that_goes_away_is_no_failure_of_the_mirror(s3: S3, tmp_path: Path, held: Fault, how: str) -> None:
    with warnings.catch_warnings(), Run(tmp_path / "a", [s3.url()]) as run:
        warnings.simplefilter("error")
        run.save(1)
        assert held.seen.wait(60)
        second = run.save(2)
        if how == "removed":
            run.ckpt.delete(2)
            s3.proxy.heal()
            with pytest.raises(MirrorError, match="was removed before it was uploaded"):
                second.result(60)
        else:
            last = run.save(2)
            with pytest.raises(MirrorError, match="step 2, which is newer, goes there instead"):
                second.result(60)
            s3.proxy.heal()
            last.result(60)
    assert committed(s3) == ([1] if how == "removed" else [1, 2])


def test_a_forked_child_ends_without_the_uploads_of_its_parent(s3: S3, tmp_path: Path, held: Fault) -> None:
    with Run(tmp_path / "a", [s3.url()]) as run:
        first = run.save(1)
        assert held.seen.wait(60)
        child = multiprocessing.get_context("fork").Process(target=run.ckpt._mirrors.close)  # type: ignore[union-attr]
        child.start()
        child.join(60)
        assert child.exitcode == 0
        s3.proxy.heal()
        first.result(60)


def test_a_mirror_from_which_nothing_can_be_removed_is_told_once(s3: S3, tmp_path: Path) -> None:
    s3.proxy.inject("status", lambda asked: "delete" in asked.path, times=10_000, status=403, code="AccessDenied")
    with pytest.warns(UserWarning) as warned, Run(tmp_path / "a", [Mirror(s3.url(), keep_last=1)]) as run:
        for step in (1, 2, 3):
            run.save(step).result(60)
    (told,) = [str(w.message) for w in warned if "old checkpoints could not be removed" in str(w.message)]
    assert told.endswith("do not allow it (AccessDenied)")
    assert committed(s3) == [1, 2, 3]


def test_an_object_of_another_upload_is_damage(s3: S3, tmp_path: Path) -> None:
    """Two processes of a run may upload one step: the later bytes may lie below the earlier manifest."""
    with Run(tmp_path / "a", [s3.url()]) as run:
        run.save(1).result(60), run.save(2).result(60)
    with Run(tmp_path / "other", [s3.url("other")]) as other:
        other.weights.add_(7.0)
        other.ckpt.save(2).mirrored().result(60)
    source = {"Bucket": s3.bucket, "Key": "other/step-00000002/state.pt"}
    s3.client.copy_object(Bucket=s3.bucket, Key="run/step-00000002/state.pt", CopySource=source)
    with pytest.raises(CorruptFileError, match="not the file that the manifest means"):
        lazyckpt.load(f"{s3.url()}/step-00000002")
    with (
        Run(tmp_path / "b", [s3.url()]) as run,
        pytest.warns(UserWarning, match="not the file that the manifest means"),
    ):
        assert run.ckpt.restore() == 1


def test_the_same_step_saved_twice_has_two_answers(s3: S3, tmp_path: Path, held: Fault) -> None:
    with Run(tmp_path / "a", [s3.url()]) as run:
        first, second = run.ckpt.save(5), run.ckpt.save(5)
        first.result(60), second.result(60)
        there = [first.mirrored(), second.mirrored()]
        assert not any(each.done() for each in there[1:]) and committed(s3) == []
        s3.proxy.heal()
        there[1].result(60)
        assert committed(s3) == [5]


def test_what_another_process_has_uploaded_is_not_pruned(place: Place, tmp_path: Path) -> None:
    mirror = Mirror(place.url(), keep_last=2)
    with Run(tmp_path / "a", [mirror]) as run:
        run.save(1).result(60)
    shutil.copytree(tmp_path / "a", tmp_path / "stale")
    with Run(tmp_path / "a", [mirror]) as run:
        run.save(2).result(60), run.save(3).result(60), run.save(4).result(60)
    with Run(tmp_path / "stale", [mirror]) as run:
        with pytest.warns(UserWarning, match="holds step 4, which this run did not restore"):
            run.save(5).result(60)  # it is numbered as the second
            wait_for(lambda: run.ckpt._mirrors.highest == 4)  # type: ignore[union-attr]
        assert 5 in committed(place)
        run.save(6).result(60)
    with Run(tmp_path / "b", [mirror]) as run:
        assert run.ckpt.restore() == 6


def test_a_rollback_holds_against_what_is_in_a_mirror(place: Place, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [place.url()]) as run:
        for step in (1, 2, 3):
            run.save(step).result(60)
    for step in (3,):
        shutil.rmtree(tmp_path / "a" / f"step-0000000{step}")
    with Run(tmp_path / "a", [place.url()]) as run:
        assert run.ckpt.rollback(1) == 1
    with Run(tmp_path / "a", [place.url()]) as run:
        assert run.ckpt.restore() == 1
        run.save(4).result(60)
        assert run.ckpt.restore() == 4
    assert json.loads(place.body("run/step-00000004/manifest.json"))["sequence"] == 4


def test_a_rollback_is_refused_while_a_mirror_cannot_be_read(s3: S3, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [s3.url()]) as run:
        for step in (1, 2, 3):
            run.save(step).result(60)
    shutil.rmtree(tmp_path / "a" / "step-00000003")
    with Run(tmp_path / "a", [s3.url()]) as run:
        s3.proxy.inject("status", lambda asked: asked.method == "GET", times=1000, status=403, code="AccessDenied")
        with (
            pytest.warns(UserWarning, match="passed over"),
            pytest.raises(ReadError, match=r"AccessDenied.*it may hold checkpoints that rollback\(1\) gives up"),
        ):
            run.ckpt.rollback(1)
        s3.proxy.heal()
        assert not run.weights.any()  # untouched
        assert run.ckpt.restore() == 3 and run.ckpt.rollback(1) == 1 and run.ckpt.restore() == 1


def test_a_mirror_is_another_place_however_it_is_spelled(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for spelled in (f"{tmp_path}/x/../a", tmp_path / "link"):
        with pytest.raises(ConfigError, match="the folder of the run itself"):
            Checkpointer(tmp_path / "a", mirrors=[spelled])
    with pytest.raises(ConfigError, match="is there twice"):
        Checkpointer(tmp_path / "a", mirrors=[tmp_path / "m", f"{tmp_path}/x/../m"])


def test_after_the_end_nothing_waits_for_what_was_not_uploaded(s3: S3, tmp_path: Path) -> None:
    s3.proxy.inject("status", times=10_000, status=403, code="AccessDenied")
    with pytest.warns(UserWarning), Run(tmp_path / "a", [s3.url()]) as run:
        first = run.save(1)
    with pytest.raises(MirrorError, match="the Checkpointer was closed before it was uploaded"):
        first.result(60)
    assert run.ckpt._mirrors.close() == [s3.url()]  # type: ignore[union-attr]  # again
    s3.proxy.heal()


def test_an_upload_thread_that_fails_unexpectedly_reports_and_goes_on(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = uploads_module.parts_of, []

    def broken(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("a bug")
        return real(*arguments, **options)

    monkeypatch.setattr(uploads_module, "parts_of", broken)
    with pytest.warns(UserWarning, match="ZeroDivisionError: a bug"), Run(tmp_path / "a", [s3.url()]) as run:
        with pytest.raises(MirrorError, match="a bug"):
            run.save(1).result(60)
        run.save(2).result(60)
    assert committed(s3) == [2]


UNCLOSED = """
import sys, torch, lazyckpt
ckpt = lazyckpt.Checkpointer(sys.argv[1], mirrors=[lazyckpt.Mirror(sys.argv[2], keep_last=5)])
ckpt.track(weights=torch.ones(50_000))
for step in range(1, 4):
    ckpt.save(step)
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_upload_thread_survives_what_a_callback_raises(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "a", mirrors=[tmp_path / "m"]) as ckpt:
        ckpt.track(weights=state(1))
        called: list[Any] = []

        def leave(future: Any) -> None:
            called.append(future.result(0))
            raise SystemExit(1)

        for step in (1, 2):
            handle = ckpt.save(step)
            mirrored = handle.mirrored()
            mirrored.add_done_callback(leave)
            assert mirrored.result(60) == handle.path
        assert handle.mirrored().result(60) == handle.path
        with pytest.raises(SystemExit):
            handle.mirrored().add_done_callback(leave)  # on this thread, at once
        del called[-1]
    assert called == [tmp_path / "a" / f"step-0000000{step}" for step in (1, 2)]


def test_a_script_without_close_ends_with_its_checkpoints_uploaded(s3: S3, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path / "a"), s3.url()]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert committed(s3)[-1] == 3


def test_a_damaged_copy_is_read_once(s3: S3, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [s3.url()]) as run:
        run.save(1).result(60), run.save(2).result(60)
    damage(s3, "run/step-00000002/state.pt", "flipped")
    with Run(tmp_path / "b", [s3.url()]) as run, pytest.warns(UserWarning, match="passed over"):
        s3.proxy.asked.clear()
        assert run.ckpt.restore() == 1
    assert len([asked for asked in s3.proxy.asked if loads(asked) and "step-00000002" in asked.path]) <= 3


def test_a_copy_that_cannot_be_read_now_has_a_substitute(s3: S3, tmp_path: Path) -> None:
    lustre = tmp_path / "lustre"
    with Run(tmp_path / "a", [s3.url(), lustre]) as run:
        run.save(1).result(60)
    s3.proxy.inject("status", loads, times=10_000, status=403, code="AccessDenied")
    with Run(tmp_path / "b", [s3.url(), lustre]) as run, pytest.warns(UserWarning, match="trying its copy"):
        assert str(run.ckpt.restore().path).startswith(str(lustre))  # type: ignore[union-attr]
    s3.proxy.heal()


def test_a_forked_child_is_told_that_stores_do_not_work_there(s3: S3, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [s3.url()]) as run:
        run.save(1).result(60)

    def child() -> None:
        with pytest.raises(ConfigError, match="forked child"):
            lazyckpt.load(f"{s3.url()}/step-00000001")

    in_a_child(child)


def damage(s3: Place, key: str, how: str) -> None:
    body = bytearray(s3.body(key))
    if how == "missing":
        s3.delete(key)
    elif how == "cut":
        s3.put(key, bytes(body[:1000]))
    else:
        body[len(body) // 2] ^= 1
        s3.put(key, bytes(body))


def test_a_flipped_bit_in_a_bucket_is_noticed_by_load(s3: S3, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [s3.url()]) as run:
        run.save(1).result(60)
    damage(s3, "run/step-00000001/state.pt", "flipped")
    with pytest.raises(CorruptFileError, match=rf"{s3.url()}/step-00000001/state.pt: checksum does not match"):
        lazyckpt.load(f"{s3.url()}/step-00000001")


def test_a_file_that_has_rotted_here_does_not_go_there(s3: S3, tmp_path: Path, held: Fault) -> None:
    with (
        pytest.warns(UserWarning, match=r"step 2 could not be uploaded: .*state.pt: checksum does not match"),
        Run(tmp_path / "a", [s3.url()]) as run,
    ):
        run.save(1)
        assert held.seen.wait(60)
        second = run.save(2)
        file = tmp_path / "a" / "step-00000002" / "state.pt"
        body = bytearray(file.read_bytes())
        body[len(body) // 2] ^= 1
        file.write_bytes(body)
        s3.proxy.heal()
        with pytest.raises(MirrorError, match="checksum does not match"):
            second.result(60)
    assert committed(s3) == [1]


def test_an_unreachable_mirror_is_no_empty_one(s3: S3, tmp_path: Path) -> None:
    s3.proxy.inject("status", times=10_000, status=403, code="AccessDenied")
    with (
        Run(tmp_path / "a", [s3.url()]) as run,
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(ReadError, match="it may hold the newest checkpoint"),
    ):
        run.ckpt.restore()
    s3.proxy.heal()


def test_two_runs_do_not_mix_in_one_place(place: Place, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [place.url()]) as run:
        run.save(1).result(60)
    with Run(tmp_path / "b", [place.url()]) as other:
        with (
            pytest.warns(UserWarning, match="holds the checkpoints of another run"),
            pytest.raises(MirrorError, match="holds the checkpoints of another run"),
        ):
            other.save(7).result(60)
        with pytest.warns(UserWarning, match="another run"):
            assert other.ckpt.restore() == 7
    assert committed(place) == [1]


def test_of_two_processes_of_one_run_the_older_one_stops(place: Place, tmp_path: Path) -> None:
    with Run(tmp_path / "a", [place.url()]) as run:
        run.save(1).result(60)
        with Run(tmp_path / "b", [place.url()]) as other:
            assert other.ckpt.restore() == 1
            other.save(2).result(60)
            with (
                pytest.warns(UserWarning, match="uploads to it now"),
                pytest.raises(MirrorError, match=r"process \d+ on .* uploads to it now"),
            ):
                run.save(3).result(60)
    assert committed(place) == [1, 2]


def test_without_mirrors_nothing_of_them_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, torch, lazyckpt\n"
        "with lazyckpt.Checkpointer(sys.argv[1]) as ckpt:\n"
        "    ckpt.track(weights=torch.zeros(10)); ckpt.save(1).result(); ckpt.restore()\n"
        "print([name for name in sys.modules if name == 'obstore' or name.startswith('lazyckpt.tiers.')])"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_mirror_does_not_get_more_than_it_may(s3: S3, tmp_path: Path) -> None:
    """Two parts of 8 MiB: behind the first the upload waits for eight times its bytes' time."""
    weights = torch.zeros(4 << 20)
    with Checkpointer(tmp_path / "a", mirrors=[Mirror(s3.url(), max_bytes_per_s=32 << 20)]) as ckpt:
        ckpt.track(weights=weights)
        handle = ckpt.save(1)
        handle.mirrored().result(60)
    began, ended = times_of(s3, uploads)
    assert ended - began >= 0.2


PREEMPTED = """
import logging, signal, sys, torch, lazyckpt
logging.basicConfig()
lazyckpt.commit_on(signal.SIGTERM, mirror_timeout=float(sys.argv[3]))
ckpt = lazyckpt.Checkpointer(sys.argv[1], mirrors=[sys.argv[2]])
ckpt.track(weights=torch.ones(50_000))
ckpt.save(1)
print("saved", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.long
@pytest.mark.parametrize(("timeout_s", "there"), [("60", [1]), ("0.01", [])])
def test_a_signal_waits_for_uploads_as_long_as_it_is_told(
    s3: S3, tmp_path: Path, held: Fault, timeout_s: str, there: list[int]
) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", PREEMPTED, str(tmp_path / "a"), s3.url(), timeout_s],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None and job.stdout.readline() == "saved\n"
    assert held.seen.wait(60)  # the upload has begun
    job.terminate()
    if there:
        s3.proxy.heal()
    _, said = job.communicate(timeout=60)
    assert job.returncode == -signal.SIGTERM and committed(s3) == there
    assert (f"not uploaded within 0.01 s: {s3.url()}" in said) == (not there)


def times_of(s3: S3, matches: Any) -> tuple[float, float]:
    found = [asked.at for asked in s3.proxy.asked if matches(asked)]
    return found[0], found[-1]


def wait_for(condition: Any) -> None:
    looks = threading.Event()
    for _ in range(6000):
        if condition():
            return
        looks.wait(0.01)
    raise AssertionError("did not come true in a minute")


JOB = """
import os, sys, torch, lazyckpt
weights = torch.zeros(200_000)
with lazyckpt.Checkpointer(sys.argv[1], keep_last=2, mirrors=[lazyckpt.Mirror(sys.argv[2], keep_last=3)]) as ckpt:
    ckpt.track(weights=weights)
    step = int(ckpt.restore() or 0)
    assert step == 0 or bool((weights == step).all()), step
    print("begins", flush=True)
    while step < int(sys.argv[3]):
        step += 1
        weights.fill_(float(step))
        ckpt.save(step).result()
"""


@pytest.mark.long
@pytest.mark.timeout(3600)  # of all 500
def test_killed_during_uploads_no_half_checkpoint_is_seen_and_the_next_run_completes(
    s3: S3, tmp_path: Path, trials: Trials
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", JOB, str(tmp_path / "a"), s3.url()]
    for _ in range(trials.count(4, 500)):
        job = subprocess.Popen([*command, "100000"], env=environment, stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None and job.stdout.readline() == "begins\n"
        wanted = len(s3.proxy.asked) + trials.random.randrange(40)
        wait_for(lambda: len(s3.proxy.asked) >= wanted)  # noqa: B023
        job.kill()
        job.wait()
        for step in committed(s3):
            loaded = lazyckpt.load(f"{s3.url()}/step-{step:08}", key="weights")
            assert bool((loaded == step).all())
    newest = max(local(tmp_path / "a"))
    subprocess.run([*command, str(newest)], env=environment, check=True, capture_output=True)
    assert max(committed(s3)) == newest
