"""What restore() makes of mirrors that are silent, slow, or of other runs."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from object_store import S3

from lazyckpt import Checkpointer, ConfigError, LoadError, Mirror, ReadError, waits
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.tiers.listings import listings
from lazyckpt.tiers.tier import Tier


def saved(folder: Path, mirrors: list[Any], *steps: int) -> None:
    weights = torch.zeros(1000)
    with Checkpointer(folder, mirrors=mirrors, best="loss") as ckpt:
        ckpt.track(weights=weights)
        for step in steps:
            weights.fill_(float(step))
            ckpt.save(step, metrics={"loss": 1.0 / step}).mirrored().result(60)


def reader(folder: Path, *mirrors: Any) -> Checkpointer:
    ckpt = Checkpointer(folder, mirrors=mirrors, read_only=True, best="loss")
    ckpt.track(weights=torch.zeros(1000))
    return ckpt


@pytest.mark.parametrize("where", ["in the folder", "in a mirror"])
def test_a_silent_mirror_is_passed_over_if_another_place_has_a_checkpoint(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    saved(tmp_path / "a", [s3.url(), tmp_path / "lustre"], 1)
    if where == "in a mirror":
        shutil.rmtree(tmp_path / "a")
    monkeypatch.setattr(waits, "MIRROR_SILENCE_S", 0.2)
    silent = s3.proxy.inject("stall", times=10_000)
    with reader(tmp_path / "a", s3.url(), tmp_path / "lustre") as ckpt:
        with pytest.warns(UserWarning, match=r"s3://.* is passed over: it did not answer within 0\.2 s"):
            assert ckpt.restore() == 1
        assert ckpt.restore(step=1) == 1
        assert silent.seen.is_set()
        s3.proxy.heal()
        assert ckpt.restore() == 1


def test_a_step_that_a_silent_mirror_may_have_is_no_missing_one(s3: S3, tmp_path: Path) -> None:
    saved(tmp_path / "a", [s3.url(), Mirror(tmp_path / "lustre", every=2)], 1, 2)
    with reader(tmp_path / "b", s3.url(), tmp_path / "lustre") as ckpt:
        s3.proxy.inject("status", times=10_000, status=403, code="AccessDenied")
        with pytest.raises(ReadError, match=r"AccessDenied.*it may hold step 1"):
            ckpt.restore(step=1)
        assert ckpt.restore(step=2) == 2
        s3.proxy.heal()
        with pytest.raises(LoadError, match="no checkpoint of step 3; there is: 1, 2"):
            ckpt.restore(step=3)


class Place(Tier):
    """A place with one checkpoint, or none, which tells when the test lets it."""

    def __init__(self, step: int | None, tells: threading.Event | None = None) -> None:
        self.broken = []
        self._step, self._tells, self.told = step, tells, threading.Event()

    def checkpoints(self) -> list[Checkpoint]:
        assert self._tells is None or self._tells.wait(60)
        self.told.set()
        if self._step is None:
            return []
        now = datetime.now(timezone.utc)
        return [Checkpoint(Path(f"/there/step-{self._step:08}"), self._step, self._step, None, now, ())]

    def run(self) -> str | None:
        return "run"

    belong = claim = release = upload = remove = tidy = None  # type: ignore[assignment]


Place.__abstractmethods__ = frozenset()


def test_a_mirror_that_goes_on_answering_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of ten thousand checkpoints takes longer than a silence may."""
    monkeypatch.setattr(waits, "MIRROR_SILENCE_S", 0.05)
    tells, looks = threading.Event(), []

    class Slow(Place):
        @property
        def heard(self) -> float:
            looks.append(1)
            if len(looks) == 5:
                tells.set()
            return time.monotonic()

    places: dict[Mirror, Tier] = {Mirror("/a"): Place(1), Mirror("/b"): Slow(2, tells)}
    found = listings(places, tmp_path, [], any)
    assert [[c.step for c in listing.found] for listing in found] == [[1], [2]]


def test_an_empty_place_does_not_stand_for_a_silent_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MIRROR_SILENCE_S", 0.0)
    empty, tells = Place(None), threading.Event()
    threading.Thread(target=lambda: (empty.told.wait(60), time.sleep(0.2), tells.set())).start()
    found = listings({Mirror("/a"): empty, Mirror("/b"): Place(2, tells)}, tmp_path, [], any)
    assert [[c.step for c in listing.found] for listing in found] == [[], [2]]


def test_the_log_tells_from_where_a_step_was_restored(s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lustre = tmp_path / "lustre"
    saved(tmp_path / "a", [s3.url(), lustre], 1)
    caplog.set_level(logging.INFO, "lazyckpt")
    with reader(tmp_path / "b", s3.url(), lustre) as ckpt:
        s3.proxy.inject("status", lambda asked: "state.pt" in asked.path, times=10_000, status=403)
        with pytest.warns(UserWarning, match="trying its copy"):
            ckpt.restore()
        s3.proxy.heal()
        ckpt.restore()
    with reader(tmp_path / "a", s3.url(), lustre) as ckpt:
        ckpt.restore()
    told = [record.getMessage() for record in caplog.records if "restored" in record.getMessage()]
    assert told == [f"restored step 1 from {lustre}", f"restored step 1 from {s3.url()}"]


def test_the_newest_step_is_told_from_all_places(s3: S3, tmp_path: Path) -> None:
    saved(tmp_path / "a", [s3.url()], 1, 2)
    with reader(tmp_path / "b", s3.url()) as ckpt:
        assert (ckpt.steps(), ckpt.latest_step(), ckpt.best_step()) == ([1, 2], 2, 2)
        s3.proxy.asked.clear()
        assert (ckpt.steps(local=True), ckpt.latest_step(local=True), ckpt.best_step(local=True)) == ([], None, None)
        assert s3.proxy.asked == []
        s3.proxy.inject("status", times=10_000, status=403, code="AccessDenied")
        with pytest.warns(UserWarning, match="passed over"), pytest.raises(ReadError, match="may hold the newest"):
            ckpt.latest_step()
        s3.proxy.heal()


def test_a_folder_without_an_id_takes_no_mirror_of_another_run(s3: S3, tmp_path: Path) -> None:
    saved(tmp_path / "a", [s3.url()], 7)
    saved(tmp_path / "b", [], 1)
    with (
        reader(tmp_path / "b", s3.url()) as ckpt,
        pytest.warns(UserWarning, match=r"passed over: s3://.*another run .*none of those in .* was ever uploaded"),
    ):
        assert ckpt.restore() == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_an_empty_folder_takes_the_mirrors_of_one_run(s3: S3, tmp_path: Path, read_only: bool) -> None:
    saved(tmp_path / "a", [s3.url()], 7)
    saved(tmp_path / "b", [tmp_path / "lustre"], 1)
    with Checkpointer(tmp_path / "c", mirrors=[s3.url(), tmp_path / "lustre"], read_only=read_only) as ckpt:
        ckpt.track(weights=torch.zeros(1000))
        with pytest.raises(ConfigError, match=r"s3://.* holds run .*lustre holds run .*give those of one run"):
            ckpt.restore()
