"""A Saver with mirrors: what trainers save goes there under its own name, and comes back from there."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mirrored_places
import pytest
import torch
from object_store import S3, Asked, Fault

import lazyckpt
from commands import fails, run, run_json
from lazyckpt import ConfigError, LoadError, Mirror, MirrorError, Saver
from lazyckpt.tools import remote

place, names_in = mirrored_places.place, mirrored_places.names_in


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((20_000,), float(step))}


def save_file(saver: Saver, folder: Path, step: int) -> lazyckpt.SaveHandle:
    handle = saver.save(weights(step), folder / f"step={step}.ckpt", step=step)
    handle.result()
    return handle


def save_folder(saver: Saver, folder: Path, step: int) -> lazyckpt.SaveHandle:
    """As a trainer: large files through the engine, small ones by other code, some in subfolders."""
    with saver.stage(folder / f"checkpoint-{step}", step=step) as staged:
        (staged.path / "config.json").write_text(json.dumps({"step": step}))
        (staged.path / "random" / "states").mkdir(parents=True)
        (staged.path / "random" / "states" / "0.txt").write_text(f"random {step}")
        staged.add("model.safetensors", weights(step))
        staged.add("optimizer/state.pt", {"step": step})
        handle = staged.save()
    handle.result()
    return handle


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def held(s3: S3) -> Iterator[Fault]:
    """The server takes no weights until the test calls ``s3.proxy.heal``."""
    yield s3.proxy.inject("stall", sends, times=1000)
    s3.proxy.heal()


def sends(asked: Asked) -> bool:
    return asked.method in ("PUT", "POST") and (".ckpt" in asked.path or ".safetensors" in asked.path)


def test_folders_and_files_go_there_and_come_back_as_they_are(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver:
        assert save_folder(saver, tmp_path / "a", 1).mirrored().result(60) == tmp_path / "a" / "checkpoint-1"
        save_file(saver, tmp_path / "a", 2).mirrored().result(60)
        assert saver.mirror_lag_s == 0.0
    assert lazyckpt.pull(place, tmp_path / "b") == tmp_path / "b" / "step=2.ckpt"  # the one saved last
    assert lazyckpt.pull(place, tmp_path / "b", step=1) == tmp_path / "b" / "checkpoint-1"
    assert lazyckpt.pull(f"{place}/checkpoint-1", tmp_path / "c") == tmp_path / "c" / "checkpoint-1"
    assert files(tmp_path / "b" / "checkpoint-1") == files(tmp_path / "a" / "checkpoint-1")
    assert files(tmp_path / "c" / "checkpoint-1") == files(tmp_path / "a" / "checkpoint-1")
    assert torch.equal(torch.load(tmp_path / "b" / "step=2.ckpt")["weight"], weights(2)["weight"])
    assert sorted(os.listdir(tmp_path / "b")) == [".lazyckpt-run", "checkpoint-1", "step=2.ckpt"]


def test_each_place_keeps_its_own_number_and_takes_its_own_steps(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[Mirror(place, every=2, keep_last=2, keep_every=4)]) as saver:
        for step in range(1, 11):
            handle = (save_file if step % 4 else save_folder)(saver, tmp_path / "a", step)
            handle.mirrored().result(60)
            saver.remove(handle.path)
    assert not any(name.startswith(("step", "checkpoint")) for name in os.listdir(tmp_path / "a"))
    assert names_in(place) == ["checkpoint-4", "checkpoint-8", "step=10.ckpt"]


def test_what_is_being_uploaded_stays_here_and_what_waits_behind_a_newer_one_goes(
    s3: S3, tmp_path: Path, held: Fault
) -> None:
    with Saver(mirrors=[s3.url()]) as saver:
        first = save_file(saver, tmp_path / "a", 1)
        assert held.seen.wait(60)
        second, kept, last = (save_file(saver, tmp_path / "a", step) for step in (2, 3, 4))
        for handle in (first, second):
            saver.remove(handle.path)
        saver.wait()
        assert isinstance(second.mirrored().exception(60), MirrorError)
        assert sorted(os.listdir(tmp_path / "a"))[1:] == ["step=1.ckpt", "step=3.ckpt", "step=4.ckpt"]
        s3.proxy.heal()
        for handle in (first, kept, last):
            handle.mirrored().result(60)
    assert sorted(os.listdir(tmp_path / "a"))[1:] == ["step=3.ckpt", "step=4.ckpt"]
    assert names_in(s3.url()) == ["step=1.ckpt", "step=3.ckpt", "step=4.ckpt"]


def test_a_file_that_is_saved_again_replaces_its_copy(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver:
        for step in (1, 2):
            saver.save(weights(step), tmp_path / "a" / "last.ckpt", step=step).mirrored().result(60)
        save_folder(saver, tmp_path / "a", 3).mirrored().result(60)
        shutil.rmtree(tmp_path / "a" / "checkpoint-3" / "random")
        with saver.stage(tmp_path / "a" / "checkpoint-3", step=3, keep_others=False) as staged:
            staged.add("model.safetensors", weights(4))
            staged.save().mirrored().result(60)
    copy = lazyckpt.pull(f"{place}/last.ckpt", tmp_path / "b")
    assert torch.equal(torch.load(copy)["weight"], weights(2)["weight"])
    assert list(files(lazyckpt.pull(place, tmp_path / "b"))) == ["model.safetensors"]


def test_files_of_other_code_are_read_as_they_are_when_they_go(s3: S3, tmp_path: Path, held: Fault) -> None:
    """A callback may rewrite what the engine wrote, and add files, until the upload begins."""
    with Saver(mirrors=[s3.url()]) as saver:
        save_file(saver, tmp_path / "a", 1)
        assert held.seen.wait(60)
        folder = save_folder(saver, tmp_path / "a", 2)
        (folder.path / "model.safetensors").write_bytes(b"merged")
        (folder.path / "README.md").write_text("added")
        (folder.path / "broken").symlink_to("nowhere")
        s3.proxy.heal()
        folder.mirrored().result(60)
    copy = lazyckpt.pull(s3.url(), tmp_path / "b")
    assert (copy / "model.safetensors").read_bytes() == b"merged" and (copy / "README.md").read_text() == "added"
    assert not os.path.lexists(copy / "broken")


def test_a_run_that_resumes_uploads_what_a_killed_one_did_not(s3: S3, tmp_path: Path, held: Fault) -> None:
    """The folder is half there. What lies there already is not sent again."""
    saver = Saver(mirrors=[s3.url()])
    path = save_folder(saver, tmp_path / "a", 1).path
    assert held.seen.wait(60)
    assert "run/checkpoint-1/config.json" in s3.names() and "run/checkpoint-1/manifest.json" not in s3.names()
    assert names_in(s3.url()) == []
    s3.proxy.inject("status", times=10_000, status=403, code="ExpiredToken")
    held.over.set()
    with pytest.warns(UserWarning, match="a run that resumes from the newest checkpoint here uploads it"):
        saver.close()
    s3.proxy.heal()
    before = len(s3.proxy.asked)
    with Saver(mirrors=[s3.url()]) as saver:
        saver.resumed(path, 1)
    assert names_in(s3.url()) == ["checkpoint-1"]
    sent = [asked.path.split("?")[0] for asked in s3.proxy.asked[before:] if asked.method == "PUT"]
    assert not any(name.endswith("config.json") for name in sent)
    assert any(name.endswith("model.safetensors") for name in sent)
    before = len(s3.proxy.asked)
    with Saver(mirrors=[s3.url()]) as saver:
        saver.resumed(path, 1)  # all of it is there
    assert not any("checkpoint-1" in asked.path for asked in s3.proxy.asked[before:] if asked.method == "PUT")


def test_a_place_belongs_to_one_run_and_the_run_goes_on_from_a_copy(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver:
        save_folder(saver, tmp_path / "a", 1).mirrored().result(60)
    with (
        pytest.warns(UserWarning, match="holds the checkpoints of another run; .* resume from a checkpoint there"),
        Saver(mirrors=[place]) as saver,
        pytest.raises(MirrorError, match="another run"),
    ):
        save_folder(saver, tmp_path / "other", 1).mirrored().result(60)
    copy = lazyckpt.pull(place, tmp_path / "b")
    with Saver(mirrors=[place]) as saver:  # as Lightning, which saves into a new folder
        saver.resumed(copy, 1)
        save_folder(saver, tmp_path / "version_1", 2).mirrored().result(60)
    with pytest.raises(LoadError, match="holds the checkpoints of another run"):
        lazyckpt.pull(place, tmp_path / "other")


def test_two_folders_cannot_have_one_name_there(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver:
        save_file(saver, tmp_path / "a", 1).mirrored().result(60)
        with pytest.warns(UserWarning, match=r"b/step=1.ckpt is not uploaded: it has the name of .*a/step=1.ckpt"):
            other = save_file(saver, tmp_path / "b", 1)
        with pytest.raises(MirrorError, match="has the name of"):
            other.mirrored().result(60)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["x.manifest.json", "x.pin", "x.begun"])
def test_names_that_a_mirror_uses_itself_are_refused(name: str, place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver:
        with pytest.raises(MirrorError, match="which uses such names itself"):
            saver.save(weights(1), tmp_path / "a" / name, step=1).mirrored().result(60)
        with saver.stage(tmp_path / "a" / "checkpoint-1") as staged:
            (staged.path / "manifest.json").write_text("of another program")
            handle = staged.save()
        with pytest.raises(MirrorError, match="which uses such names itself"):
            handle.mirrored().result(60)
    assert (tmp_path / "a" / "checkpoint-1" / "manifest.json").exists()  # it is durable here


def test_a_folder_held_back_goes_when_it_is_told(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver:
        with saver.stage(tmp_path / "a" / "checkpoint-1", step=1) as staged:
            staged.add("model.safetensors", weights(1))
            handle = staged.save(hold_back=True)
        handle.result()
        mirrored = handle.mirrored()
        (handle.path / "added.txt").write_text("by a callback")
        assert not mirrored.done()
        saver.mirror(handle)
        mirrored.result(60)
    assert set(files(lazyckpt.pull(place, tmp_path / "b"))) == {"model.safetensors", "added.txt"}


def test_a_save_that_fails_or_is_gone_does_not_go(place: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with Saver(mirrors=[place], on_error="warn") as saver:
        with saver.stage(tmp_path / "a" / "checkpoint-1", step=1) as staged:
            staged.add("model.safetensors", weights(1))
            shutil.rmtree(staged.path)
            with pytest.warns(UserWarning, match="not saved"):
                handle = staged.save()
                handle.exception(60)
        assert isinstance(handle.mirrored().exception(60), lazyckpt.SaveError)


def test_abandoned_halves_go_and_nothing_else(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("run/checkpoint-7.begun", b"")
    s3.put("run/checkpoint-7/model.safetensors", b"half")
    s3.put("run/notes/of/a/user.txt", b"stays")
    s3.put("run/figures/loss.png", b"stays")
    s3.put("run/other-run/step-00000001/state.pt", b"stays")
    with Saver(mirrors=[s3.url()]) as saver:
        save_folder(saver, tmp_path / "a", 1).mirrored().result(60)
    assert "run/checkpoint-7/model.safetensors" in s3.names()  # it may be under way
    leftovers = run_json("ls", s3.url())["leftovers"]
    assert [(leftover["name"], leftover["state"]) for leftover in leftovers] == [("checkpoint-7", "uploading")]
    monkeypatch.setattr("lazyckpt.tiers.bucket._ABANDONED_S", -60.0)
    with Saver(mirrors=[s3.url()]) as saver:
        save_folder(saver, tmp_path / "a", 2).mirrored().result(60)
    assert not any("checkpoint-7" in name or "begun" in name for name in s3.names())
    assert {"run/notes/of/a/user.txt", "run/figures/loss.png", "run/other-run/step-00000001/state.pt"} <= set(
        s3.names()
    )


def test_a_damaged_copy_is_not_pulled(s3: S3, tmp_path: Path) -> None:
    with Saver(mirrors=[s3.url()]) as saver:
        save_folder(saver, tmp_path / "a", 1).mirrored().result(60)
        save_file(saver, tmp_path / "a", 2).mirrored().result(60)
    for key in ("run/checkpoint-1/random/states/0.txt", "run/step=2.ckpt"):
        body = s3.body(key)
        s3.put(key, bytes([body[0] ^ 1]) + body[1:])
    for step, name in ((1, "checkpoint-1"), (2, "step=2.ckpt")):
        with pytest.raises(lazyckpt.CorruptFileError, match="checksum does not match"):
            lazyckpt.pull(s3.url(), tmp_path / "b", step=step)
        assert not os.path.lexists(tmp_path / "b" / name)
    found = {Path(row["path"]).name: row["state"] for row in run_json("verify", s3.url(), code=1)["targets"]}
    assert found == {"checkpoint-1": "damaged", "step=2.ckpt": "damaged"}


def test_the_commands_know_what_trainers_have_saved(s3: S3, tmp_path: Path) -> None:
    with Saver(mirrors=[s3.url()]) as saver:
        for step in (1, 2, 3):
            save_folder(saver, tmp_path / "a", step).mirrored().result(60)
        saver.save(weights(4), tmp_path / "a" / "model.pt").mirrored().result(60)  # without a step
    rows = run_json("ls", s3.url())["checkpoints"]
    assert [(row["name"], row["step"]) for row in rows] == [
        ("model.pt", None),
        ("checkpoint-3", 3),
        ("checkpoint-2", 2),
        ("checkpoint-1", 1),
    ]
    assert "checkpoint-3" in run("ls", s3.url()).output
    assert "ok" in run("verify", s3.url()).output and "ok" in run("verify", f"{s3.url()}/model.pt").output
    assert "weight" in run("inspect", f"{s3.url()}/checkpoint-3/model.safetensors").output
    assert "weight" in run("inspect", f"{s3.url()}/model.pt").output
    assert "give one of them: model.safetensors, optimizer/state.pt" in fails(2, "inspect", f"{s3.url()}/checkpoint-3")
    assert run("diff", f"{s3.url()}/model.pt", tmp_path / "a" / "model.pt").exit_code == 0
    assert run("diff", f"{s3.url()}/model.pt", f"{s3.url()}/checkpoint-3/model.safetensors").exit_code == 1
    assert run_json("pin", s3.url(), "1")["path"] == f"{s3.url()}/checkpoint-1"
    run("prune", s3.url(), "--keep-last", "2", "--yes")
    assert names_in(s3.url()) == ["checkpoint-1", "checkpoint-3", "model.pt"]
    with lazyckpt.Checkpointer(tmp_path / "c") as ckpt:
        ckpt.track(weights=torch.zeros(3))
        with pytest.raises(LoadError, match="was saved by a trainer"):
            ckpt.restore(path=f"{s3.url()}/checkpoint-3")


def test_the_commands_know_what_trainers_have_saved_in_a_mounted_folder(tmp_path: Path) -> None:
    there = tmp_path / "lustre"
    with Saver(mirrors=[there]) as saver:
        for step in (1, 2, 3):
            save_folder(saver, tmp_path / "a", step).mirrored().result(60)
        saver.save(weights(4), tmp_path / "a" / "model.pt").mirrored().result(60)
    for copy in (there, there / "checkpoint-3", there / "model.pt"):
        assert "ok" in run("verify", copy).output
    told = run("inspect", there).output
    assert "model.pt" in told and "step" not in told
    assert "weight" in run("inspect", there / "checkpoint-3").output
    assert run("diff", there / "checkpoint-3", tmp_path / "a" / "checkpoint-3").exit_code == 0
    assert run("diff", there / "checkpoint-3", there / "checkpoint-2").exit_code == 1
    assert run_json("pin", there, "1")["path"] == f"{there}/checkpoint-1"
    assert run_json("prune", there, "--keep-last", "2")["bytes"] > 0 and len(names_in(str(there))) == 4
    run("prune", there, "--keep-last", "2", "--yes")
    assert names_in(str(there)) == ["checkpoint-1", "checkpoint-3", "model.pt"]
    assert run_json("unpin", there, "1")["path"] == f"{there}/checkpoint-1"
    for name in ("checkpoint-3/config.json", "model.pt"):  # the one has no checksum of its own
        data = bytearray((there / name).read_bytes())
        data[-9] ^= 1
        (there / name).write_bytes(data)
    result = run("verify", there)
    assert result.exit_code == 1 and "2 damaged" in result.output
    assert "no such checkpoint" in fails(2, "pin", there, "7")


def test_a_trainers_folder_is_pushed(s3: S3, tmp_path: Path) -> None:
    with Saver() as saver:
        for step in (1, 2):
            save_folder(saver, tmp_path / "a", step)
    assert run_json("push", tmp_path / "a", s3.url()) == {"path": f"{s3.url()}/checkpoint-2"}
    assert run_json("push", tmp_path / "a", s3.url(), "--step", "1") == {"path": f"{s3.url()}/checkpoint-1"}
    assert run_json("push", tmp_path / "a" / "checkpoint-2", s3.url("one")) == {"path": f"{s3.url('one')}/checkpoint-2"}
    assert "no checkpoint of step 7" in fails(2, "push", tmp_path / "a", s3.url(), "--step", "7")
    assert "no checkpoint" in fails(2, "push", tmp_path / "nothing", s3.url())
    assert files(lazyckpt.pull(s3.url(), tmp_path / "b", step=2)) == files(tmp_path / "a" / "checkpoint-2")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["s3://key:secret@bucket/a"], "credentials"),
        (["ftp-of-old://a"], "expected one of"),
        ([{"every": 3}], "without a url"),
        ([{"url": "/a", "evry": 3}], "did you mean 'every'"),
        ([{"url": "/a", "every": 0}], "at least 1"),
        ("/a", "expected a list"),
        ({"url": "/a"}, "expected a list"),
        (["/a", "/a"], "twice"),
        ([3], "neither a URL nor a path"),
    ],
)
def test_a_wrong_mirror_is_told_at_once(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Saver(mirrors=given)


def test_a_mirror_in_the_folder_itself_is_told(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="the folder of the run itself"),
        Saver(mirrors=[tmp_path / "a"]) as saver,
        pytest.raises(MirrorError, match="the folder of the run itself"),
    ):
        save_file(saver, tmp_path / "a", 1).mirrored().result(60)


def test_uploads_cost_no_thread_before_the_first_save(s3: S3) -> None:
    def uploading() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "lazyckpt-mirror" in thread.name]

    saver = Saver(mirrors=[s3.url()])
    assert not uploading()
    saver.close()


def test_a_saver_that_is_forgotten_uploads_all_the_same(place: str, tmp_path: Path) -> None:
    save_folder(Saver(mirrors=[place]), tmp_path / "a", 1)
    assert lazyckpt.pull(place, tmp_path / "b") == tmp_path / "b" / "checkpoint-1"


def test_what_keeps_a_file_from_mirrors_does_not_fail_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith("second"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    places = [str(tmp_path / "first"), str(tmp_path / "second")]
    with Saver(mirrors=places) as saver:
        with pytest.warns(UserWarning, match="is not uploaded: RuntimeError: can't start new thread"):
            refused = save_file(saver, tmp_path / "a", 1)
            assert isinstance(refused.mirrored().exception(), MirrorError)
        monkeypatch.undo()
        save_file(saver, tmp_path / "a", 2).mirrored().result()
    assert [names_in(place) for place in places] == [["step=2.ckpt"]] * 2


def damage(place: str, name: str, s3: S3 | None) -> None:
    """Shortens a file by a byte in a folder, and changes one in a bucket."""
    if s3 is not None:
        s3.put(f"run/{name}", s3.body(f"run/{name}")[:-1] + b"?")
    else:
        os.truncate(Path(place, name), Path(place, name).stat().st_size - 1)


def test_mirrors_with_damaged_copies_alone_are_not_empty(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with Saver(mirrors=[place]) as saver:
        save_file(saver, tmp_path / "a", 1)
    damage(place, "step=1.ckpt", request.getfixturevalue("s3") if "://" in place else None)
    with pytest.warns(UserWarning, match="passed over: "), pytest.raises(LoadError, match=r"step=1\.ckpt"):
        lazyckpt.pull([place], tmp_path / "b")
    assert files(tmp_path / "b") == {} if (tmp_path / "b").exists() else True  # no run, either


def test_a_copy_that_loses_a_file_gives_way_to_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "lustre"
    with Saver(mirrors=[place]) as saver:
        save_file(saver, tmp_path / "a", 1)
        save_file(saver, tmp_path / "a", 2)
    read = remote.parts_of

    def refuse(path: Path, file: Any, *, reuse: bool) -> Any:
        if path == place / "step=2.ckpt":
            path.unlink()
        yield from read(path, file, reuse=reuse)

    monkeypatch.setattr(remote, "parts_of", refuse)
    with pytest.warns(UserWarning, match=r"passed over: .*step=2\.ckpt: is missing"):
        assert lazyckpt.pull([place], tmp_path / "b").name == "step=1.ckpt"


def test_what_was_saved_without_a_step_comes_back_from_the_newest_of_all(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver:
        saver.save(weights(1), tmp_path / "a" / "best.pt").result()
    assert lazyckpt.pull([place], tmp_path / "b") == tmp_path / "b" / "best.pt"


@pytest.mark.parametrize("kind", ["Saver", "Checkpointer"])
def test_what_is_forgotten_while_a_save_is_in_flight_uploads_it(kind: str, tmp_path: Path) -> None:
    """As at the end of a function that neither closes it nor uses ``with``."""
    durable: list[Any] = []

    def note(metrics: Any, error: Any) -> None:
        durable.append(error)

    def train() -> None:
        if kind == "Saver":
            saver = Saver(mirrors=[tmp_path / "lustre"], on_done=note)
            saver.save({"weight": torch.ones(3_000_000)}, tmp_path / "a" / "step=1.ckpt", step=1)
        else:
            ckpt = lazyckpt.Checkpointer(tmp_path / "a", mirrors=[tmp_path / "lustre"], on_done=note)
            ckpt.track(state={"weight": torch.ones(3_000_000)})
            ckpt.save(step=1)

    train()
    assert durable == [None]
    assert lazyckpt.pull(tmp_path / "lustre", tmp_path / "b").exists()


def test_what_a_trainer_removes_goes_while_a_mirror_is_down(s3: S3, tmp_path: Path) -> None:
    """Also if it was being uploaded: a long outage must not fill the disk."""
    fault = s3.proxy.inject("status", sends, times=10_000, status=403, code="ExpiredToken")
    with pytest.warns(UserWarning, match="ExpiredToken"), Saver(mirrors=[s3.url()]) as saver:
        first = save_file(saver, tmp_path / "a", 1)
        assert fault.seen.wait(30)
        second = save_file(saver, tmp_path / "a", 2)
        saver.remove(first.path)
        assert "step 2, which is newer" in str(first.mirrored().exception(30))
        end = time.monotonic() + 30
        while first.path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert not first.path.exists() and second.path.exists()
        s3.proxy.heal()
        second.mirrored().result(30)
    assert names_in(s3.url()) == ["step=2.ckpt"]


def test_folders_with_names_as_of_a_checkpointer(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[Mirror(place, keep_last=2)]) as saver:
        for step in (1, 2, 3):
            with saver.stage(tmp_path / "a" / f"step-{step:08}", step=step) as staged:
                staged.add("model.safetensors", weights(step))
                staged.save().mirrored().result(30)
    copy = lazyckpt.pull(place, tmp_path / "b", step=2)
    assert files(copy) == files(tmp_path / "a" / "step-00000002")
    with pytest.raises(LoadError, match="no checkpoint of step 1; there is: 2, 3"):
        lazyckpt.pull(place, tmp_path / "b", step=1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [b"a\nb.txt", b"\xff.txt"])
def test_a_name_for_no_object_is_told_once(name: bytes, place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver:
        with saver.stage(tmp_path / "a" / "checkpoint-1", step=1) as staged:
            Path(os.fsdecode(os.path.join(os.fsencode(staged.path), name))).write_text("odd")
            handle = staged.save()
        with pytest.raises(MirrorError, match="is no name for an object; rename it"):
            handle.mirrored().result(60)
        save_folder(saver, tmp_path / "a", 2).mirrored().result(60)


def test_a_checkpointer_takes_nothing_of_a_trainer(place: str, tmp_path: Path) -> None:
    with Saver(mirrors=[place]) as saver, saver.stage(tmp_path / "a" / "step-00000500", step=500) as staged:
        staged.add("model.safetensors", weights(500))
        staged.save()
    with lazyckpt.Checkpointer(tmp_path / "b", mirrors=[place]) as ckpt:
        ckpt.track(weights=torch.zeros(3))
        assert ckpt.restore() is None and ckpt.latest_step() is None
