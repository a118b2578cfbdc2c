"""Looking back: which checkpoints there are, which is the best, which one to continue from."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import ConfigError, LazyCkptError, LoadError, RestoreError
from lazyckpt.storage.manifest import checksum
from lazyckpt.storage.rollback import NOTE

LOSSES = {10: 3.0, 20: 1.0, 30: math.nan, 40: 2.0}


class Run:
    """A value that tells which checkpoint was restored."""

    def __init__(self, folder: Path, **knobs: Any) -> None:
        self.ckpt = lazyckpt.Checkpointer(folder, **knobs)
        self.state = {"step": 0}
        self.ckpt.track(state=self.state)

    def save(self, step: int, **knobs: Any) -> None:
        self.state["step"] = step
        self.ckpt.save(step, **knobs).result()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path, best="loss") as run:
        for step, loss in LOSSES.items():
            run.save(step, metrics={"loss": loss, "accuracy": torch.tensor(0.5)})
        yield run


def test_what_there_is(run: Run, tmp_path: Path) -> None:
    ckpt = run.ckpt
    assert ckpt.steps() == [10, 20, 30, 40] and ckpt.latest_step() == 40
    assert [info.step for info in ckpt.checkpoints()] == [40, 30, 20, 10]
    info = ckpt.checkpoint(20)
    assert info.path == tmp_path / "step-00000020" and info.is_whole and not info.pinned
    assert info.metrics == {"loss": 1.0, "accuracy": 0.5} and math.isnan(ckpt.checkpoint(30).metrics["loss"])
    assert info.nbytes == (info.path / "state.pt").stat().st_size
    assert info.age is not None and timedelta() <= info.age < timedelta(minutes=5)


def test_an_empty_run_has_nothing(tmp_path: Path) -> None:
    with Run(tmp_path, best="loss") as run:
        assert run.ckpt.steps() == [] == run.ckpt.checkpoints()
        assert run.ckpt.latest_step() is None and run.ckpt.best_step() is None
        with pytest.raises(LoadError, match="no checkpoint of step 3; there is: none"):
            run.ckpt.checkpoint(3)


@pytest.mark.parametrize("call", ["restore", "checkpoint", "delete", "pin", "unpin", "rollback"])
def test_a_step_that_is_not_there_lists_those_that_are(run: Run, call: str) -> None:
    with pytest.raises(LoadError, match="no checkpoint of step 85; there is: 10, 20, 30, 40"):
        run.ckpt.restore(step=85) if call == "restore" else getattr(run.ckpt, call)(85)


def test_a_checkpoint_that_is_not_whole_says_why(run: Run, tmp_path: Path) -> None:
    os.truncate(tmp_path / "step-00000040" / "state.pt", 100)
    info = run.ckpt.checkpoint(40)
    assert not info.is_whole and "has 100 bytes" in info.problem and info.created is info.age is None
    assert run.ckpt.steps() == [10, 20, 30]
    assert [(i.step, i.is_whole) for i in run.ckpt.checkpoints()] == [(30, True), (20, True), (10, True), (40, False)]


def test_delete_and_pin(run: Run, tmp_path: Path) -> None:
    run.ckpt.pin(10)
    assert run.ckpt.checkpoint(10).pinned
    run.ckpt.unpin(10)
    assert not run.ckpt.checkpoint(10).pinned
    run.ckpt.pin(20)
    run.ckpt.delete(20)
    assert run.ckpt.steps() == [10, 30, 40] and not list(tmp_path.glob("*20*"))
    run.save(50)
    assert run.ckpt.restore() == 50


def test_what_cannot_be_removed_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(LazyCkptError, match=r"^delete\(\): .*step-00000020: Permission denied \(13\)"):
        run.ckpt.delete(20)
    assert run.ckpt.checkpoint(20).is_whole


# the best


@pytest.mark.parametrize("mode, best", [("min", 20), ("max", 10)])
def test_the_best_is_restored(run: Run, tmp_path: Path, mode: str, best: int) -> None:
    run.ckpt.close()
    with Run(tmp_path, best="loss", mode=mode) as other:
        assert other.ckpt.best_step() == best
        with pytest.warns(UserWarning, match=f"restored step {best}, but step 40 was saved later"):
            assert other.ckpt.restore(best=True) == best == other.state["step"]


def test_keep_best_keeps_the_best_beside_the_last(tmp_path: Path) -> None:
    with Run(tmp_path, keep_last=1, keep_best=2, best="loss") as run:
        for step, loss in {**LOSSES, 50: 2.5, 60: 7.0}.items():
            run.save(step, metrics={"loss": loss})
        run.ckpt._saver.wait()
        assert run.ckpt.steps() == [20, 40, 60]


def test_of_equals_the_last_is_the_best(tmp_path: Path) -> None:
    with Run(tmp_path, best="loss") as run:
        for step in (1, 2, 3):
            run.save(step, metrics={"loss": 1.0})
        assert run.ckpt.best_step() == 3


def test_a_damaged_best_gives_way_to_the_next(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "step-00000020" / "state.pt"
    data = bytearray(file.read_bytes())
    data[-200] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="passed over"):
        assert run.ckpt.restore(best=True) == 40


def test_without_the_metric_there_is_no_best(tmp_path: Path) -> None:
    with Run(tmp_path, best="acc") as run:
        with pytest.raises(RestoreError, match="has the metric 'acc': give save\\(\\) metrics"):
            run.save(0)
            run.ckpt.restore(best=True)
        with pytest.warns(UserWarning, match="metrics has loss, but not best='acc'"):
            run.save(1, metrics={"loss": 1.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            run.save(2, metrics={"loss": 1.0})
        assert run.ckpt.best_step() is None
        with pytest.raises(RestoreError, match=r"no checkpoint in .* has the metric 'acc': there is: loss"):
            run.ckpt.restore(best=True)
    with Run(tmp_path) as run, pytest.raises(ConfigError, match="give the Checkpointer best"):
        run.ckpt.restore(best=True)


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"keep_best": 1, "best": "loss"}, "give keep_last"),
        ({"keep_best": 1, "keep_last": 1}, "give best"),
        ({"keep_best": 0, "keep_last": 1, "best": "loss"}, "at least 1"),
        ({"best": 3}, "name of a metric"),
        ({"best": "loss", "mode": "most"}, "expected one of 'min', 'max'"),
    ],
)
def test_knobs_that_make_no_sense(tmp_path: Path, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lazyckpt.Checkpointer(tmp_path, **knobs)


@pytest.mark.parametrize("metrics", [3, {"a": "x"}, {1: 2.0}, {"a": [1]}, {"a": 10**400}])
def test_metrics_that_are_no_numbers(tmp_path: Path, metrics: Any) -> None:
    with Run(tmp_path) as run:
        with pytest.raises(ConfigError, match="metrics"):
            run.ckpt.save(1, metrics=metrics)
        run.save(1)


def test_a_metric_beyond_a_float_is_damage(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "step-00000040" / "manifest.json"
    told = {**json.loads(file.read_text()), "metrics": {"loss": 10**400}}
    file.write_text(json.dumps({**told, "crc32": checksum(told)}))
    with pytest.warns(UserWarning, match="passed over"):
        assert run.ckpt.restore() == 30


def test_a_manifest_is_json_whatever_the_metrics(run: Run, tmp_path: Path) -> None:
    text = (tmp_path / "step-00000030" / "manifest.json").read_text()
    manifest = json.loads(text, parse_constant=pytest.fail)
    assert manifest["metrics"] == {"loss": None, "accuracy": 0.5}


# rollback


def test_a_rollback_outlives_a_crash_before_the_next_save(run: Run, tmp_path: Path) -> None:
    code = f"""
import lazyckpt, os
ckpt = lazyckpt.Checkpointer({str(tmp_path)!r}); state = {{"step": 0}}; ckpt.track(state=state)
assert ckpt.rollback(20) == 20 == state["step"]
os._exit(1)
"""
    run.ckpt.close()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
    with warnings.catch_warnings(), Run(tmp_path) as other:
        warnings.simplefilter("error")
        assert other.ckpt.latest_step() == 20 and other.ckpt.restore() == 20 == other.state["step"]
        assert other.ckpt.steps() == [10, 20, 30, 40]
        other.save(25)
        assert other.ckpt.latest_step() == 25 and not (tmp_path / NOTE).exists()
    with Run(tmp_path) as other:
        assert other.ckpt.restore() == 25


def test_after_a_rollback_what_is_damaged_gives_way_to_what_was_before_it(run: Run, tmp_path: Path) -> None:
    run.ckpt.rollback(20)
    (tmp_path / "step-00000020" / "manifest.json").unlink()
    with pytest.warns(UserWarning):
        assert run.ckpt.restore() == 10


def test_a_rollback_waits_for_the_save_that_it_goes_back_to(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        for step in (1, 2, 3):
            run.state["step"] = step
            run.ckpt.save(step)
        assert run.ckpt.rollback(3) == 3 == run.ckpt.latest_step()
        run.ckpt.save(4)
        with pytest.warns(UserWarning, match="step 5 was saved later"):
            run.ckpt.save(5)
            assert run.ckpt.restore(step=4) == 4


def test_a_rollback_takes_the_arguments_of_restore(run: Run) -> None:
    run.ckpt.track(more={"x": 1})
    with pytest.raises(RestoreError, match="more: not in the checkpoint"):
        run.ckpt.rollback(20)
    assert run.ckpt.latest_step() == 40, "nothing is noted"
    restored = run.ckpt.rollback(20, strict=False)
    assert isinstance(restored, lazyckpt.Restored) and restored.missing == ("more",)
    assert run.ckpt.latest_step() == 20 == run.ckpt.rollback(20, only=["state"])


def test_retention_after_a_rollback_counts_along_the_new_line(run: Run, tmp_path: Path) -> None:
    run.ckpt.close()
    with Run(tmp_path, keep_last=2) as other:
        other.ckpt.rollback(20)
        other.save(25)
        other.ckpt._saver.wait()
        assert other.ckpt.steps() == [20, 25]


def test_restoring_an_older_step_tells_of_the_newer_once(run: Run) -> None:
    with pytest.warns(UserWarning, match=r"restored step 20, but step 40 was saved later.*rollback\(20\)") as caught:
        run.ckpt.restore(step=20)
        run.ckpt.restore(step=10)
    assert len(caught) == 1
    assert run.ckpt.restore() == 40


def test_restoring_what_a_rollback_gave_up_says_so(run: Run) -> None:
    run.ckpt.rollback(20)
    with pytest.warns(UserWarning, match=r"restored step 40, but step 20 was chosen by rollback\(\)"):
        run.ckpt.restore(step=40)


def test_a_renamed_checkpoint_of_a_run_without_others_is_restored(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1)
        os.rename(tmp_path / "step-00000001", tmp_path / "kept")
        assert run.ckpt.restore(path=tmp_path / "kept") == 1


@pytest.mark.parametrize("damage", [b"", b"{}", b"x", b'{"format": 1, "sequence": 1, "newest": 99, "crc32": "0"}'])
def test_a_damaged_note_is_told_and_the_last_one_is_restored(run: Run, tmp_path: Path, damage: bytes) -> None:
    run.ckpt.rollback(20)
    (tmp_path / NOTE).write_bytes(damage)
    with pytest.warns(UserWarning, match=NOTE):
        assert run.ckpt.restore() == 40


def test_the_note_of_a_checkpoint_that_is_gone(run: Run, tmp_path: Path) -> None:
    run.ckpt.rollback(20)
    shutil.rmtree(tmp_path / "step-00000020")
    assert run.ckpt.restore() == 10


def test_after_a_power_cut_the_note_hides_nothing_that_was_saved_since(run: Run, tmp_path: Path) -> None:
    run.ckpt.rollback(20)
    for step in (30, 40):
        run.ckpt.delete(step)
    run.ckpt.close()
    note = (tmp_path / NOTE).read_bytes()
    with Run(tmp_path) as other:
        other.save(21)
    (tmp_path / NOTE).write_bytes(note)  # its removal is not synced
    with Run(tmp_path) as other:
        assert other.ckpt.restore() == 21


def test_a_note_that_is_no_file_is_told(run: Run, tmp_path: Path) -> None:
    for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")):
        make(tmp_path / NOTE)
        with pytest.warns(UserWarning, match=NOTE):
            assert run.ckpt.restore() == 40
        os.rename(tmp_path / NOTE, tmp_path / f"was-{len(list(tmp_path.iterdir()))}")


@pytest.mark.parametrize("number", [math.inf, math.nan, "x", None])
def test_a_note_with_numbers_that_are_none(run: Run, tmp_path: Path, number: Any) -> None:
    told = {"format": 1, "step": 20, "sequence": number, "newest": 4}
    (tmp_path / NOTE).write_text(json.dumps({**told, "crc32": checksum(told)}))
    with pytest.warns(UserWarning, match=NOTE):
        assert run.ckpt.restore() == 40


def test_a_link_is_no_checkpoint_to_go_back_to(run: Run, tmp_path: Path) -> None:
    os.rename(tmp_path / "step-00000020", tmp_path / "elsewhere")
    (tmp_path / "step-00000020").symlink_to("elsewhere")
    with pytest.raises(LoadError, match="a symbolic link"):
        run.ckpt.rollback(20)
    assert run.state["step"] == 40 and not (tmp_path / NOTE).exists()


# beside a running job


def test_a_reader_writes_nothing(run: Run, tmp_path: Path) -> None:
    staged = tmp_path / (".tmp-step-00000050-" + "0" * 32)
    staged.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with Run(tmp_path, read_only=True) as reader:
        assert reader.ckpt.restore(step=10) == 10 and reader.ckpt.restore() == 40
        for call in (lambda: reader.ckpt.save(1), lambda: reader.ckpt.delete(10), lambda: reader.ckpt.rollback(10)):
            with pytest.raises(ConfigError, match="read_only"):
                call()
        assert sorted(tmp_path.rglob("*")) == before
        run.save(60)
        assert reader.ckpt.restore() == 60


def test_a_reader_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="No such file"):
        lazyckpt.Checkpointer(tmp_path / "missing", read_only=True)
    assert not (tmp_path / "missing").exists()


def test_two_that_save_into_one_folder_are_told(tmp_path: Path) -> None:
    with Run(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(tmp_path, read_only=True).ckpt.close()
        Run(tmp_path / "other").ckpt.close()
        with pytest.raises(UserWarning, match="another Checkpointer of this process"):
            Run(tmp_path / ".." / tmp_path.name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(tmp_path).ckpt.close()
