"""``lazyckpt prune``, ``pin`` and ``unpin``: remove only what retention lets go, and only with --yes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from commands import fails, run, run_json
from lazyckpt.storage import catalog, retention

HEX = f"{0:032x}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 10, 20, 30, 40, then a rollback to 20, and step 25: the newest."""
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(model=torch.nn.Linear(2, 2))
        for step in (10, 20, 30, 40):
            ckpt.save(step, blocking=True)
        ckpt.restore(step=20)
        ckpt.save(25, blocking=True)
    return tmp_path / "run"


def steps(folder: Path) -> list[int]:
    return sorted(checkpoint.step for checkpoint in catalog.Catalog(folder).scan())


def test_prune_shows_first_and_removes_when_told(folder: Path) -> None:
    leftover = folder / f".tmp-step-00000050-{HEX}"
    leftover.mkdir()
    (leftover / "state.pt").write_bytes(bytes(4096))
    shown = run("prune", folder, "--keep-last", "2").stdout
    assert "would remove 3 checkpoints and 1 leftover" in shown and "--yes does it" in shown
    assert steps(folder) == [10, 20, 25, 30, 40] and leftover.exists()
    told = run_json("prune", folder, "--keep-last", "2")
    assert [row["step"] for row in told["checkpoints"]] == [40, 30, 10] and not told["removed"]
    files = [folder / f"step-000000{step}" / "state.pt" for step in (10, 30, 40)]
    assert told["bytes"] == 4096 + sum(file.stat().st_size for file in files)
    shown = run("prune", folder, "--keep-last", "2", "--yes").stdout
    assert "removed 3 checkpoints and 1 leftover" in shown and "kept 2 checkpoints" in shown
    assert steps(folder) == [20, 25] and sorted(os.listdir(folder)) == ["step-00000020", "step-00000025"]


@pytest.mark.parametrize("rules", [{"keep_last": 1}, {"keep_last": 2}, {"keep_last": 1, "keep_every": 20}])
def test_prune_keeps_what_a_checkpointer_would(folder: Path, rules: dict[str, int]) -> None:
    told = run_json("prune", folder, *(f"--{name.replace('_', '-')}={n}" for name, n in rules.items()))
    with lazyckpt.Checkpointer(folder, **rules) as ckpt:
        ckpt._saver._background._remove_all(ckpt._lineage.superfluous)
    assert steps(folder) == sorted(row["step"] for row in told["kept"]) != [10, 20, 25, 30, 40]


def test_prune_keeps_the_best(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0), (5, 2.5)):
            ckpt.save(step, metrics={"loss": loss}, blocking=True)
    told = run_json("prune", tmp_path, "--keep-last=1", "--keep-best=1", "--best=loss", "--mode=max")
    assert sorted(row["step"] for row in told["kept"]) == [4, 5]
    assert "give best" in fails(2, "prune", tmp_path, "--keep-last=1", "--keep-best=1")
    assert "expected one of" in fails(2, "prune", tmp_path, "--keep-last=1", "--mode=most")
    run("prune", tmp_path, "--keep-last=1", "--keep-best=2", "--best=loss", "--yes")
    assert steps(tmp_path) == [2, 3, 5]


def test_prune_says_why_each_goes_or_stays(folder: Path) -> None:
    (folder / f".trash-step-00000050-{HEX}").mkdir()
    retention.pin(folder / "step-00000030")
    told = run_json("prune", folder, "--keep-last", "1", "--keep-every", "20")
    gone = {row["step"]: row["why"] for row in told["checkpoints"]}
    assert gone == {10: "beyond keep_last=1", 40: "off the line to step 25"}
    kept = {row["step"]: row["why"] for row in told["kept"]}
    assert kept == {25: "within keep_last=1", 20: "a multiple of keep_every=20", 30: "pinned"}
    lines = run("prune", folder, "--keep-last", "1", "--keep-every", "20").stdout.splitlines()
    assert lines[0].endswith("WHY")
    assert [line.split("00  ")[-1].split("  ")[-1].strip() for line in lines[1:4]] == [
        "off the line to step 25",
        "beyond keep_last=1",
        "left by a process that died",
    ]


def test_without_rules_only_leftovers_go(folder: Path) -> None:
    (folder / f".trash-step-00000050-{HEX}").mkdir()
    shown = run("prune", folder, "-y").stdout
    assert "removed 0 checkpoints and 1 leftover" in shown and steps(folder) == [10, 20, 25, 30, 40]
    assert run("prune", folder).stdout.startswith("nothing to remove; keep 5 checkpoints of ")
    assert "--keep-last" in run("prune", folder).stdout
    assert "--keep-last" not in run("prune", folder, "--keep-last", "9").stdout
    assert "give keep_last" in fails(2, "prune", folder, "--keep-every", "10")
    assert "at least 1" in fails(2, "prune", folder, "--keep-last", "0")
    assert "a checkpoint itself" in fails(2, "prune", folder / "step-00000010")


def test_what_is_pinned_stays_until_it_is_unpinned(folder: Path) -> None:
    assert "is pinned" in run("pin", folder, "10").stdout
    assert run_json("pin", folder, "30") == {"path": str(folder / "step-00000030"), "pinned": True}
    assert [row["step"] for row in run_json("ls", folder)["checkpoints"] if row["pinned"]] == [30, 10]
    assert "ok, pinned" in run("ls", folder).stdout
    run("prune", folder, "--keep-last", "1", "--yes")
    assert steps(folder) == [10, 25, 30]
    with lazyckpt.Checkpointer(folder, keep_last=1) as ckpt:
        ckpt.track(model=torch.nn.Linear(2, 2))
        ckpt.save(60, blocking=True)
        ckpt._saver.drain()
        assert steps(folder) == [10, 30, 60]
        ckpt.save(30, blocking=True)  # again: it stays pinned
        ckpt.save(61, blocking=True)
    assert steps(folder) == [10, 30, 61]
    run("unpin", folder, "10")
    run("unpin", folder, "30")
    run("prune", folder, "--keep-last", "1", "--yes")
    assert os.listdir(folder) == ["step-00000061"]
    for command in ("pin", "unpin"):
        assert "none: cannot be read: No such file or directory (2)" in fails(2, command, folder / "none", "10")
        assert fails(2, command, folder, "10") == f"error: {folder / 'step-00000010'}: no such checkpoint"


def test_a_broken_checkpoint_and_one_being_written_stay(folder: Path) -> None:
    os.truncate(folder / "step-00000025/state.pt", 10)
    os.truncate(folder / "step-00000010/state.pt", 10)
    (folder / f".tmp-step-00000050-{HEX}").mkdir()
    lock = os.open(folder / f".tmp-step-00000050-{HEX}", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        run("prune", folder, "--keep-last", "1", "--yes")
    finally:
        os.close(lock)
    left = {f".tmp-step-00000050-{HEX}", "step-00000010", "step-00000025", "step-00000040"}
    assert set(os.listdir(folder)) == left  # 40: the newest that is not broken


def test_a_step_that_is_saved_again_or_pinned_meanwhile_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job may replace a checkpoint between the look of prune and the removal."""
    decide = retention.retention

    def decide_and_be_overtaken(*rules: Any, **more: Any) -> Any:
        doomed = decide(*rules, **more)
        with lazyckpt.Checkpointer(folder) as ckpt:
            ckpt.track(model=torch.nn.Linear(2, 2))
            ckpt.save(40, blocking=True)
        retention.pin(folder / "step-00000030")
        return doomed

    monkeypatch.setattr(retention, "retention", decide_and_be_overtaken)
    told = run_json("prune", folder, "--keep-last", "1", "--yes")
    assert [row["step"] for row in told["checkpoints"]] == [20, 10]
    kept = {row["step"]: row["why"] for row in told["kept"]}
    assert kept == {25: "within keep_last=1"} | dict.fromkeys((30, 40), "saved again, removed or pinned meanwhile")
    assert steps(folder) == [25, 30, 40] and catalog.Catalog(folder).scan()[0].step == 40
