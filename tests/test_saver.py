"""Objects saved lazily as files and as folders, under any name."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import lazyckpt
from endings import in_a_child
from lazyckpt import _engine
from lazyckpt.gate.gate import gate
from lazyckpt.pipeline import request
from lazyckpt.pipeline.staging_buffer import StagingBuffer
from lazyckpt.storage import commit, folders, removal

TINY = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 128 << 10}


class Training:
    """A model of 1.5 MiB and its optimizer, which has stepped once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "note": ["x", 1]}


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def saver() -> Iterator[lazyckpt.Saver]:
    with lazyckpt.Saver(**TINY) as saver:
        yield saver


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is published before the event is set."""
    event = threading.Event()
    describe = commit.Staging.describe
    describe_file = commit.FileStaging.describe

    def wait(inner: Any) -> Any:
        def waiting(*args: Any) -> None:
            event.wait(30)
            inner(*args)

        return waiting

    monkeypatch.setattr(commit.Staging, "describe", wait(describe))
    monkeypatch.setattr(commit.FileStaging, "describe", wait(describe_file))
    yield event
    event.set()


# one file


def test_a_file_holds_what_it_was_when_saved(
    saver: lazyckpt.Saver, training: Training, tmp_path: Path, graph: Any
) -> None:
    for number in range(3):
        expected = graph(torch.load(_reference(training.state(), tmp_path)))
        handle = saver.save(training.state(), tmp_path / "deep" / f"{number}.pt", step=number)
        training.step()
        path = handle.result(timeout=30)
        assert path == tmp_path / "deep" / f"{number}.pt"
        assert graph(torch.load(path)) == expected
        assert graph(lazyckpt.load(path)) == expected
    assert handle.metrics.eager_bytes < 8 * 1024  # biases, and Adam's steps
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["0.pt", "1.pt", "2.pt"]


def _reference(obj: Any, folder: Path) -> Path:
    torch.save(obj, folder / "reference.pt")
    return folder / "reference.pt"


def test_several_saves_of_one_step_are_lazy(saver: lazyckpt.Saver, training: Training, tmp_path: Path) -> None:
    """As of the best and of the last one. Without a step, or without its number, nothing says that hooks still fire."""
    lazy = [saver.save(training.state(), tmp_path / f"{n}.pt", step=3, blocking=True) for n in range(3)]
    assert all(handle.metrics.eager_bytes < 8 * 1024 for handle in lazy)
    for step in (None, 4):
        eager = saver.save(training.state(), tmp_path / "x.pt", step=step, blocking=True)
        assert eager.metrics.eager_bytes > 1 << 20


def test_a_safetensors_file(saver: lazyckpt.Saver, training: Training, tmp_path: Path) -> None:
    expected = {k: v.clone() for k, v in training.model.state_dict().items()}
    handle = saver.save(training.model.state_dict(), tmp_path / "model.safetensors")
    training.step()
    loaded = safetensors.torch.load_file(handle.result(timeout=30))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[k], expected[k]) for k in expected)
    assert handle.metrics.eager_bytes < 4096


def test_a_file_is_replaced_only_by_a_whole_one(
    saver: lazyckpt.Saver, training: Training, tmp_path: Path, held: threading.Event
) -> None:
    path = tmp_path / "a.pt"
    torch.save("old", path)
    handle = saver.save(training.state(), path)
    assert handle.wait_captured(10)
    time.sleep(0.05)
    assert torch.load(path) == "old" and saver.pending() == [handle]
    held.set()
    saver.wait(path)
    assert saver.pending() == [] and torch.load(path)["note"] == ["x", 1]


@pytest.mark.parametrize("way", ["link/a.pt", "link", "link/../link/a.pt"])
def test_a_path_is_waited_for_however_it_is_spelled(
    way: str, saver: lazyckpt.Saver, tmp_path: Path, held: threading.Event
) -> None:
    """Regression: by way of a link there was nothing to wait for."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    handle = saver.save(torch.zeros(9), tmp_path / "folder/a.pt")
    threading.Timer(0.2, held.set).start()
    saver.wait(tmp_path / way)
    assert handle.done()


def test_a_change_of_the_working_folder_moves_nothing(
    saver: lazyckpt.Saver, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a relative path was taken from wherever the process was when the background came to it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    handles = [saver.save(1, "a.pt")]
    with saver.stage("folder") as staged:
        staged.add("b.pt", 2)
        monkeypatch.chdir(tmp_path / "elsewhere")
        held.set()
        handles.append(staged.save())
    assert [handle.result() for handle in handles] == [tmp_path / "a.pt", tmp_path / "folder"]
    monkeypatch.chdir(tmp_path)
    saver.remove("a.pt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    saver.wait()
    assert list((tmp_path / "elsewhere").iterdir()) == [] and not (tmp_path / "a.pt").exists()


# a folder


def test_a_folder_appears_whole(
    saver: lazyckpt.Saver, training: Training, tmp_path: Path, held: threading.Event, graph: Any
) -> None:
    target = tmp_path / "checkpoint-1"
    expected = graph(torch.load(_reference(training.optimizer.state_dict(), tmp_path)))
    weights = {k: v.clone() for k, v in training.model.state_dict().items()}
    with saver.stage(target, step=1) as staged:
        assert staged.path.parent == tmp_path and staged.path.name.startswith(".tmp-")
        (staged.path / "trainer_state.json").write_text("{}")
        (staged.path / "sub").mkdir()
        (staged.path / "sub" / "notes.txt").write_text("notes")
        staged.add("model.safetensors", training.model.state_dict(), {"format": "pt"})
        staged.add("sub/optimizer.pt", training.optimizer.state_dict())
        handle = staged.save()
    training.step()
    assert handle.wait_captured(10) and not target.exists()
    held.set()
    assert handle.result(timeout=30) == target
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()) == [
        "model.safetensors",
        "sub/notes.txt",
        "sub/optimizer.pt",
        "trainer_state.json",
    ]
    assert graph(torch.load(target / "sub" / "optimizer.pt")) == expected
    with safetensors.safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert all(torch.equal(file.get_tensor(k), v) for k, v in weights.items())
    assert handle.metrics.eager_bytes < 8 * 1024
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_others_wrote_into_the_folder_is_synced_before_it_is_published(
    saver: lazyckpt.Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, rename = folders.sync_path, os.rename
    monkeypatch.setattr(folders, "sync_path", lambda p: (calls.append(Path(p).name), sync(p))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append("rename"), rename(a, b))[1])
    with saver.stage(tmp_path / "out" / "c", inside=tmp_path) as staged:
        assert staged.path.parent == tmp_path
        calls.clear()  # the new folder is synced into the one above
        (staged.path / "a").mkdir()
        (staged.path / "a" / "small.json").write_text("{}")
        staged.add("tensors.pt", torch.ones(3))
        staged.save(blocking=True)
    assert calls == ["small.json", "a", staged.path.name, "rename", "out", tmp_path.name]


def test_the_latest_is_named_before_the_handle_is_done(
    saver: lazyckpt.Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = tmp_path / "latest"
    publish = request.publish_pointer

    def late(file: Path, target: Path) -> None:
        time.sleep(0.05)  # so that a handle that is done too early is seen
        publish(file, target)

    monkeypatch.setattr(request, "publish_pointer", late)
    for step in (1, 2):
        with saver.stage(tmp_path / f"step{step}", latest=latest) as staged:
            staged.add("a.pt", {})
            handle = staged.save()
        handle.result()
        assert latest.read_text() == f"step{step}"


def test_a_latest_that_cannot_be_replaced_fails_the_save_by_name_and_stays(
    saver: lazyckpt.Saver, tmp_path: Path
) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "theirs").touch()
    with saver.stage(tmp_path / "step1", latest=tmp_path / "latest") as staged:
        staged.add("a.pt", {"a": torch.arange(3)})
        handle = staged.save()
    with pytest.raises(lazyckpt.SaveError, match=r"latest.*step1 is durable") as caught:
        handle.result()
    assert os.strerror(errno.EISDIR) in str(caught.value)
    assert torch.load(tmp_path / "step1" / "a.pt")["a"].tolist() == [0, 1, 2]
    assert os.listdir(tmp_path / "latest") == ["theirs"] and len(os.listdir(tmp_path)) == 2


def test_a_folder_that_is_not_saved_is_gone(saver: lazyckpt.Saver, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), saver.stage(tmp_path / "c") as staged:
        (staged.path / "x").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "../a.pt", "/a.pt", "a/../../b.pt", "twice.pt"])
def test_names_outside_the_folder_are_refused(saver: lazyckpt.Saver, tmp_path: Path, name: str) -> None:
    with saver.stage(tmp_path / "c") as staged:
        staged.add("twice.pt", 1)
        with pytest.raises(lazyckpt.ConfigError, match="name"):
            staged.add(name, 2)


def test_a_folder_is_saved_once(saver: lazyckpt.Saver, tmp_path: Path) -> None:
    with saver.stage(tmp_path / "c") as staged:
        staged.add("a.pt", 1)
        staged.save(blocking=True)
        with pytest.raises(lazyckpt.ConfigError, match="once"):
            staged.save()
        with pytest.raises(lazyckpt.ConfigError, match="too late"):
            staged.add("b.pt", 2)
    assert torch.load(tmp_path / "c" / "a.pt") == 1


def test_a_folder_whose_save_is_interrupted_is_gone(
    saver: lazyckpt.Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it stayed, and its lock with it, until the process ended."""

    def interrupt(pending: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "add", interrupt)
    with pytest.raises(KeyboardInterrupt), saver.stage(tmp_path / "c") as staged:
        staged.add("a.pt", 1)
        staged.save()
    assert list(tmp_path.iterdir()) == [] and staged._request is None


# what goes wrong


def test_what_cannot_be_pickled(saver: lazyckpt.Saver, tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.SerializationError, match=r"step 7.*a\.pt.*lambda"):
        saver.save(lambda: 0, tmp_path / "a.pt", step=7)
    with pytest.raises(lazyckpt.SerializationError, match="share memory"):
        t = torch.ones(9)
        saver.save({"a": t, "b": t[1:]}, tmp_path / "a.safetensors")
    with pytest.raises(lazyckpt.SerializationError, match="lambda"), saver.stage(tmp_path / "c") as staged:
        staged.add("a.pt", torch.ones(3))
        staged.add("b.pt", lambda: 0)
        staged.save()
    assert list(tmp_path.iterdir()) == []
    saver.save(1, tmp_path / "a.pt", blocking=True)


def test_a_failure_in_the_background_is_raised_by_the_next_call(training: Training, tmp_path: Path) -> None:
    """A save that raises it has saved all the same. Regression: it saved nothing."""
    saver = lazyckpt.Saver(**TINY)
    (tmp_path / "a.pt").mkdir()
    (tmp_path / "a.pt" / "x").write_text("a folder cannot be replaced by a file")
    calls = {
        r"a\.pt\).*; the call that raises this saves .*/b\.pt all the same$": lambda: saver.save(1, tmp_path / "b.pt"),
        r"a\.pt\).*; the call that raises this saves step 7 all": lambda: saver.save(
            1, tmp_path / "c.pt", step=7, blocking=True
        ),
        r"a\.pt\).*; the call that raises this could not save step 8 either": lambda: saver.save(
            lambda: 0, tmp_path / "d.pt", step=8
        ),
        r"step 8.*lambda": saver.wait,
        r"a\.pt\): Is a directory \(\S+\)$": saver.check,
        r"a\.pt\): Is a directory \(\S+a\.pt\)$": saver.close,
    }
    for told, call in calls.items():
        if "step 8.*" not in told:
            saver.save(1, tmp_path / "a.pt")
            saver.drain()
        with pytest.raises(lazyckpt.SaveError, match=told):
            call()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.pt", "c.pt"]


def test_after_close(tmp_path: Path) -> None:
    saver = lazyckpt.Saver(**TINY)
    saver.close()
    saver.close()
    for call in (
        lambda: saver.save(1, tmp_path / "a.pt"),
        lambda: saver.stage(tmp_path / "c"),
        lambda: saver.remove("x"),
    ):
        with pytest.raises(lazyckpt.ClosedError):
            call()


def test_knobs(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.ConfigError, match=r"Saver.*nonsense"):
        lazyckpt.Saver(nonsense=1)
    with lazyckpt.Saver(**TINY) as saver, pytest.raises(lazyckpt.ConfigError, match="name of a file"):
        saver.save(1, "")


# removal


def test_removed_only_when_what_came_after_is_durable(
    saver: lazyckpt.Saver, training: Training, tmp_path: Path, held: threading.Event
) -> None:
    old = tmp_path / "old.pt"
    torch.save(1, old)
    handle = saver.save(training.state(), tmp_path / "new.pt")
    saver.remove(old)
    time.sleep(0.05)
    assert old.exists() and not handle.done()
    held.set()
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.pt"]


@pytest.mark.parametrize("fails", ["in the background", "before the next call", "at once"])
def test_kept_when_what_came_after_failed(fails: str, tmp_path: Path) -> None:
    """Regression: only saves that were launched counted."""
    torch.save(1, tmp_path / "old.pt")
    (tmp_path / "new.pt").mkdir()
    (tmp_path / "new.pt" / "x").touch()
    with pytest.warns(UserWarning, match=r"old\.pt is kept"), lazyckpt.Saver(on_error="warn", **TINY) as saver:
        saver.save(threading.Lock() if fails == "at once" else 2, tmp_path / "new.pt")
        if fails == "before the next call":
            saver.drain()
        saver.remove(tmp_path / "old.pt")
    assert torch.load(tmp_path / "old.pt") == 1


def test_removed_only_behind_the_done_callbacks(saver: lazyckpt.Saver, tmp_path: Path, held: threading.Event) -> None:
    """One of them may still need the file, or move a link away from it."""
    found: list[bool] = []
    torch.save(1, tmp_path / "old.pt")
    handle = saver.save(2, tmp_path / "new.pt")
    handle.add_done_callback(lambda _: (time.sleep(0.1), found.append((tmp_path / "old.pt").exists())))
    saver.remove(tmp_path / "old.pt")
    held.set()
    saver.wait()
    assert found == [True] and not (tmp_path / "old.pt").exists()


def test_a_pending_file_is_removed_after_it_was_written(
    saver: lazyckpt.Saver, training: Training, tmp_path: Path, held: threading.Event
) -> None:
    saver.save(training.state(), tmp_path / "a.pt")
    saver.remove(tmp_path / "a.pt")
    held.set()
    saver.wait()
    assert list(tmp_path.iterdir()) == []
    saver.remove(tmp_path / "never-existed")
    saver.wait()


def test_what_is_saved_again_is_not_removed(
    saver: lazyckpt.Saver, training: Training, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a removal that waited for an earlier save deleted what was saved under that name since."""
    hide = removal.hide

    def late(doomed: Path, **where: Any) -> Path | None:
        time.sleep(0.2)  # it is there by then
        return hide(doomed, **where)

    monkeypatch.setattr(removal, "hide", late)
    torch.save("old", tmp_path / "a.pt")
    saver.save(training.state(), tmp_path / "b.pt")
    saver.remove(tmp_path / "a.pt")
    saver.save("new", tmp_path / "a.pt")
    held.set()
    saver.wait()
    assert torch.load(tmp_path / "a.pt") == "new"


def test_nothing_is_saved_between_the_question_and_the_removal(
    saver: lazyckpt.Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal asks whether the name still has the old file. A save under the name waits for it, and stays."""
    path = tmp_path / "a.pt"
    saving: list[threading.Thread] = []
    hide, removes = removal.hide, threading.Event()

    def overtaken(doomed: Path, **where: Any) -> Path | None:
        assert removes.wait(30)  # calls on two threads at once are refused
        saving.append(threading.Thread(target=lambda: saver.save("new", doomed).result(30)))
        saving[0].start()
        saving[0].join(0.5)
        return hide(doomed, **where)

    torch.save("old", path)
    monkeypatch.setattr(removal, "hide", overtaken)
    saver.remove(path)
    removes.set()
    saver.drain()
    saving[0].join(30)
    assert torch.load(path) == "new"


# leftovers


@pytest.mark.parametrize("kind", ["file", "folder", "folder staged elsewhere"])
def test_what_a_killed_process_left_is_swept_by_the_next(kind: str, tmp_path: Path) -> None:
    """After a kill of a Saver, of Accelerate and of the Hugging Face Trainer, which stage through one."""

    def save(saver: lazyckpt.Saver, name: str) -> None:
        if kind == "file":
            saver.save(torch.ones(100_000), tmp_path / name, blocking=True)
            return
        beside = kind == "folder"
        with saver.stage(tmp_path / name, inside=None if beside else tmp_path / "elsewhere") as staged:
            staged.add("state.pt", torch.ones(100_000))
            staged.save(blocking=True)

    def body() -> None:
        commit.Staging.publish = commit.FileStaging.publish = die  # type: ignore[method-assign,assignment]
        save(lazyckpt.Saver(**TINY), "a")

    in_a_child(body, code=-signal.SIGKILL)
    (left,) = tmp_path.rglob(".tmp-*")
    assert left.is_dir() and sum(file.stat().st_size for file in left.iterdir()) > 400_000
    with lazyckpt.Saver(**TINY) as saver:
        save(saver, "b")
    assert not list(tmp_path.rglob(".tmp-*")) and (tmp_path / "b").exists() and not (tmp_path / "a").exists()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_modules_that_are_watched_wait_before_they_load(training: Training, tmp_path: Path, disk: Any) -> None:
    with lazyckpt.Saver(**TINY) as saver:
        training.step()
        saver.watch(training.model)
        saver.watch(training.model)
        zeros = {k: torch.zeros_like(v) for k, v in training.model.state_dict().items()}
        expected = training.model[0].weight.detach().clone()
        disk.hold()
        handle = saver.save(training.model.state_dict(), tmp_path / "a.pt")
        disk.release(after_s=0.1)
        training.model.load_state_dict(zeros)
        assert torch.equal(torch.load(handle.result(timeout=30))["0.weight"], expected)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_build_without_io_uring_says_once_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**knobs: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(fallback="built without liburing: Function not implemented")

    monkeypatch.setattr(_engine, "Engine", build)
    with pytest.warns(UserWarning, match="a thread pool writes instead; to have it, install liburing-dev") as warned:
        StagingBuffer(lazyckpt.Config())
        StagingBuffer(lazyckpt.Config())
    assert len(warned) == 1
