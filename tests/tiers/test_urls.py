"""The commands on URLs: what a folder shows, its copy behind a URL shows, too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from file_server import Files, InMemory
from object_store import S3

import lazyckpt
from commands import fails, run, run_json
from lazyckpt.stores.store import opened_stores
from lazyckpt.stores.urls import located

Place: TypeAlias = S3 | Files | InMemory


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    with lazyckpt.Checkpointer(folder) as ckpt:
        weights = torch.zeros(1000)
        ckpt.track(weights=weights)
        for step in (1, 2, 3):
            weights.fill_(float(step))
            ckpt.save(step, metrics={"loss": 1.0 / step}).result()
    return folder


def without(rows: list[dict[str, object]], *names: str) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if key not in names} for row in rows]


def pushed(job: Path, s3: Place) -> str:
    for step in (1, 2, 3):
        told = run_json("push", job, s3.url(), "--step", str(step))
        assert told == {"path": f"{s3.url()}/step-0000000{step}"}
    return s3.url()


def test_a_run_is_pushed_listed_and_pulled(job: Path, place: Place, tmp_path: Path) -> None:
    url = pushed(job, place)
    here, there = (run_json("ls", place)["checkpoints"] for place in (job, url))
    assert here == there and [row["step"] for row in there] == [3, 2, 1]
    assert "loss 0.3333" in run("ls", url).output
    assert run_json("pull", url, tmp_path / "b") == {"path": str(tmp_path / "b" / "step-00000003")}
    run_json("pull", url, tmp_path / "b", "--step", "1")
    for step in (1, 3):
        name = f"step-0000000{step}"
        for file in ("state.pt", "manifest.json"):
            assert (tmp_path / "b" / name / file).read_bytes().strip() == (job / name / file).read_bytes().strip()
    with lazyckpt.Checkpointer(tmp_path / "b", mirrors=[url]) as ckpt:  # it continues the run
        weights = torch.zeros(1000)
        ckpt.track(weights=weights)
        assert ckpt.restore() == 3
        ckpt.save(4).mirrored().result(60)
    assert [row["step"] for row in run_json("ls", url)["checkpoints"]] == [4, 3, 2, 1]


def test_a_push_does_not_stop_a_run_that_uploads_there(job: Path, s3: S3) -> None:
    with lazyckpt.Checkpointer(job, mirrors=[s3.url()]) as ckpt:
        ckpt.track(weights=torch.zeros(1000))
        ckpt.save(4).mirrored().result(60)
        run_json("push", job, s3.url(), "--step", "1")
        ckpt.save(5).mirrored().result(60)


def test_what_cannot_be_pushed_or_pulled_is_told(job: Path, s3: S3, tmp_path: Path) -> None:
    assert "no checkpoint of step 7; there is: 1, 2, 3" in fails(2, "push", job, s3.url(), "--step", "7")
    assert "no checkpoint; there is: none" in fails(2, "pull", s3.url("nothing"), tmp_path / "b")
    url = pushed(job, s3)
    with lazyckpt.Checkpointer(tmp_path / "other") as ckpt:
        ckpt.track(weights=torch.ones(10))
        ckpt.save(1).result(), ckpt.save(3).result()
    assert "holds the checkpoints of another run" in fails(2, "push", tmp_path / "other", url)
    assert "another checkpoint of this name" in fails(2, "pull", url, tmp_path / "other")
    assert "holds the checkpoints of another run" in fails(2, "pull", url, tmp_path / "other", "--step", "2")
    body = bytearray(s3.body("run/step-00000002/state.pt"))
    body[len(body) // 2] ^= 1
    s3.put("run/step-00000002/state.pt", bytes(body))
    assert "checksum does not match" in fails(2, "pull", url, tmp_path / "b", "--step", "2")
    assert not list((tmp_path / "b").glob("step-*")) and not list((tmp_path / "b").glob(".tmp-*"))
    assert "push copies from a folder" in fails(2, "push", url, tmp_path / "b")
    assert "pull copies into a folder" in fails(2, "pull", job, url)


def test_verify_reads_all_behind_a_url(job: Path, s3: S3) -> None:
    url = pushed(job, s3)
    assert [found["state"] for found in run_json("verify", url)["targets"]] == ["ok"] * 3
    assert run_json("verify", f"{url}/step-00000002")["targets"][0]["path"] == f"{url}/step-00000002"
    assert run_json("verify", f"{url}/step-00000002/state.pt")["targets"][0]["records"] > 0
    body = bytearray(s3.body("run/step-00000002/state.pt"))
    at = body.index(torch.full((100,), 2.0).numpy().tobytes())
    body[at] ^= 1
    s3.put("run/step-00000002/state.pt", bytes(body))
    damaged = run_json("verify", url, code=1)["targets"][1]
    assert damaged["state"] == "damaged" and "(weights)" in damaged["damage"][0]
    s3.client.delete_object(Bucket=s3.bucket, Key="run/step-00000003/state.pt")
    assert "state.pt is missing" in run_json("verify", url, code=1)["targets"][0]["damage"][0]
    assert run_json("verify", s3.url("nothing"), code=2)["targets"][0]["state"] == "unreadable"
    assert not lazyckpt.verify(url).ok


def test_inspect_and_diff_read_behind_a_url(job: Path, place: Place) -> None:
    url = pushed(job, place)
    here, there = (run_json("inspect", place, "--stats") for place in (job, url))
    assert here | {"path": ""} == there | {"path": ""} and there["step"] == 3
    assert lazyckpt.inspect(f"{url}/step-00000001").tensors["weights"].shape == (1000,)
    assert run_json("diff", job, url)["same"]
    differing = run_json("diff", f"{url}/step-00000001", job / "step-00000003", code=1)
    assert not differing["same"]


def test_retention_behind_a_url(job: Path, place: Place) -> None:
    url = pushed(job, place)
    place.put("run/step-00000009/state.pt", b"on its way")
    assert run_json("pin", url, "1") == {"path": f"{url}/step-00000001", "pinned": True}
    assert [c["step"] for c in run_json("prune", url, "--keep-last", "1")["checkpoints"]] == [2]
    assert [row["step"] for row in run_json("ls", url)["checkpoints"]] == [3, 2, 1]
    run_json("prune", url, "--keep-last", "1", "--yes")
    assert [row["step"] for row in run_json("ls", url)["checkpoints"]] == [3, 1]
    assert "uploaded now, or left by an upload that was cut off" in run("ls", url).output
    run_json("unpin", url, "1")
    run_json("prune", url, "--keep-last", "1", "--yes")
    assert [row["step"] for row in run_json("ls", url)["checkpoints"]] == [3]
    assert "run/step-00000009/state.pt" in place.names()


def test_doctor_says_what_a_mirror_lacks(s3: S3) -> None:
    trials = run_json("doctor", s3.url())["trials"]
    assert [trial["fault"] for trial in trials] == [""] * 5 and "MB/s" in trials[1]["note"]
    assert s3.names() == []
    s3.proxy.inject("status", lambda asked: asked.method == "DELETE" or "delete" in asked.path, times=100, status=403)
    told = run("doctor", s3.url())
    assert told.exit_code == 1 and "delete" in told.output and "no: the credentials" in told.output


@pytest.mark.long
def test_doctor_says_where_it_has_to_look_first(s3: S3, ftp_place: Files) -> None:
    def note(url: str) -> str:
        return next(str(trial["note"]) for trial in run_json("doctor", url)["trials"] if "only" in trial["what"])

    told = "by looking first: two processes that commit one step in the same moment are not noticed"
    assert note(s3.url()) == "" and note(ftp_place.url()) == told
    opened_stores.clear()
    s3.proxy.inject("status", lambda asked: asked.conditional, times=100, status=501, code="NotImplemented")
    assert note(s3.url()) == told


def test_urls_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for command in (["ls"], ["verify"], ["inspect"], ["prune"], ["doctor"]):
        assert "the URL holds credentials" in fails(2, *command, "s3://key:hunter2@bucket/a")
    assert "URLs are not supported" in fails(2, "convert", "s3://bucket/a", tmp_path / "b.pt")
    assert "holds no checkpoints to resume from" in fails(2, "ls", "hf://org/model")
    assert "expected one of s3://" in fails(2, "ls", "nowhere://host/a")
    folder = tmp_path / "s3:"
    folder.mkdir()
    assert located(folder) == folder
    shutil.rmtree(folder)
