"""A bucket, or another place, holds whole checkpoints of one run. Thousands are listed in a few requests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from file_server import Files, InMemory
from object_store import S3, Asked

import lazyckpt
from lazyckpt import LoadError, MirrorError
from lazyckpt.storage import manifest
from lazyckpt.storage.manifest import Checkpoint, FileEntry
from lazyckpt.stores.urls import located, opened
from lazyckpt.tiers.bucket import INDEX, Bucket
from lazyckpt.tools import remote
from lazyckpt.tools.doctor_url import try_out

Place: TypeAlias = S3 | Files | InMemory


@pytest.fixture
def bucket(s3: S3) -> Bucket:
    return bucket_at(s3)


@pytest.fixture
def any_bucket(place: Place) -> Bucket:
    return bucket_at(place)


def bucket_at(place: Place) -> Bucket:
    return Bucket(opened(place.url(), place.options))


def saved(folder: Path, step: int, value: float = 0.0) -> Checkpoint:
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(weights=torch.full((1000,), value or float(step)))
        return manifest.read_checkpoint(ckpt.save(step).result())


def parts_of(checkpoint: Checkpoint, asked: list[str] | None = None) -> object:
    def parts(file: FileEntry) -> Iterator[bytes]:
        if asked is not None:
            asked.append(file.name)
        yield (checkpoint.folder / file.name).read_bytes()

    return parts


def upload(bucket: Bucket, checkpoint: Checkpoint, asked: list[str] | None = None) -> None:
    text = (checkpoint.folder / "manifest.json").read_bytes()
    bucket.upload(checkpoint, text, parts_of(checkpoint, asked))  # type: ignore[arg-type]


def steps(bucket: Bucket) -> list[int]:
    return sorted(found.step for found in bucket.checkpoints())


def test_the_labels_of_many_files_are_asked_for_at_once(s3: S3) -> None:
    """Rank 0 looks for the file of each of a thousand ranks."""
    bucket = Bucket(opened(s3.url(), s3.options))
    files = [FileEntry(f"__{rank}_0.distcp", 3, rank) for rank in range(40)]
    for file in files[1:]:
        bucket._store.write(f"step-00000001/{file.name}", [b"abc"], 3, manifest.label_of(file))
    answered = threading.Event()

    def second(asked: Asked) -> bool:
        if asked.method == "HEAD" and "__2_0" in asked.path:
            answered.set()
        return False

    s3.proxy.inject("reset", second)
    held = s3.proxy.inject("stall", lambda asked: asked.method == "HEAD" and "__1_0" in asked.path)
    checkpoint = Checkpoint(bucket._root / "step-00000001", 1, 1, None, datetime.now(timezone.utc), tuple(files))
    with ThreadPoolExecutor(1) as pool:
        lacking = pool.submit(bucket._lacking, checkpoint, files)
        assert held.seen.wait(60) and answered.wait(60)
        s3.proxy.heal()
        assert lacking.result(60) == files[:1]


def is_manifest(asked: Asked) -> bool:
    return asked.method == "PUT" and asked.path.partition("?")[0].endswith("/manifest.json")


def removed(asked: Asked) -> str:
    """The last part of the name of the object that a request removes."""
    if asked.method != "POST" or "delete" not in asked.path:
        return ""
    return re.findall(rb"([^/<>]*)</Key>", asked.body)[0].decode()


def test_the_manifest_is_written_last_and_removed_first(bucket: Bucket, s3: S3, tmp_path: Path) -> None:
    assert bucket.run() is None and bucket.belong("me") == "me" == bucket.run()
    upload(bucket, saved(tmp_path, 3))
    (found,) = bucket.checkpoints()
    assert (found.step, found.sequence, str(found.path)) == (3, 1, f"{s3.url()}/step-00000003")
    writes = [asked.path.partition("?")[0] for asked in s3.proxy.asked if asked.method in ("PUT", "POST")]
    assert [path.rpartition("/")[2] for path in writes][-1] == "manifest.json"
    bucket.remove(found)
    assert [name for name in map(removed, s3.proxy.asked) if name] == ["manifest.json", "state.pt"]
    assert steps(bucket) == []


def test_an_upload_that_was_cut_off_is_not_seen_and_goes_on(bucket: Bucket, s3: S3, tmp_path: Path) -> None:
    bucket.claim()
    checkpoint = saved(tmp_path, 3)
    s3.proxy.inject("status", is_manifest, status=400, code="Broken")
    asked: list[str] = []
    with pytest.raises(OSError, match="Broken"):
        upload(bucket, checkpoint, asked)
    assert steps(bucket) == [] and "run/step-00000003/state.pt" in s3.names()
    upload(bucket, checkpoint, asked)
    assert steps(bucket) == [3] and asked == ["state.pt"]  # sent once
    upload(bucket, checkpoint, asked)
    assert asked == ["state.pt"]


def test_a_step_that_was_saved_again_replaces_its_older_copy(any_bucket: Bucket, place: Place, tmp_path: Path) -> None:
    any_bucket.claim()
    upload(any_bucket, saved(tmp_path / "a", 3))
    place.put("run/step-00000003/rank-1.pt", b"of the older one")
    other = saved(tmp_path / "b", 3, value=7.0)
    state = other.folder / "state.pt"
    upload(any_bucket, other)
    assert place.body("run/step-00000003/state.pt") == state.read_bytes()
    assert "run/step-00000003/rank-1.pt" not in place.names()


def test_what_a_cut_off_upload_left_is_tidied_up_when_it_is_a_day_old(
    any_bucket: Bucket, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_bucket.claim()
    upload(any_bucket, saved(tmp_path, 3))
    place.put("run/step-00000002/state.pt", b"half")
    place.put("run/notes/step.txt", b"mine")
    assert steps(any_bucket) == [3]
    any_bucket.tidy()
    assert "run/step-00000002/state.pt" in place.names()  # it may be on its way
    monkeypatch.setattr("lazyckpt.tiers.bucket._ABANDONED_S", -60.0)
    assert steps(any_bucket) == [3]
    any_bucket.tidy()
    assert "run/step-00000002/state.pt" not in place.names() and "run/notes/step.txt" in place.names()
    assert steps(any_bucket) == [3]


def test_another_run_and_another_process_are_told(any_bucket: Bucket, place: Place, tmp_path: Path) -> None:
    assert any_bucket.belong("me") == "me"
    any_bucket.claim()
    second = bucket_at(place)
    assert second.belong("you") == "me"
    checkpoint = saved(tmp_path, 3)
    second.claim()
    with pytest.raises(MirrorError, match=r"process \d+ on .* uploads to it now"):
        upload(any_bucket, checkpoint)
    upload(second, checkpoint)
    assert steps(any_bucket) == [3]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"id"', b"\xff", b"1"])
def test_a_foreign_object_in_the_place_of_ours_is_told(any_bucket: Bucket, place: Place, text: bytes) -> None:
    place.put("run/run.json", text)
    with pytest.raises(LoadError, match=r"run\.json"):
        any_bucket.belong("me")


def test_damaged_manifests_are_named_and_the_others_are_found(any_bucket: Bucket, place: Place, tmp_path: Path) -> None:
    any_bucket.claim()
    for step in (1, 2, 3, 4):
        upload(any_bucket, saved(tmp_path, step))
    text = place.body("run/step-00000002/manifest.json")
    place.put("run/step-00000002/manifest.json", text.replace(b'"step": 2', b'"step": 5'))
    place.put("run/step-00000003/state.pt", b"short")
    place.put("run/step-00000004/manifest.json", b"")
    assert steps(any_bucket) == [1]
    told = sorted(str(error) for error in any_bucket.broken)
    assert "step-00000002/manifest.json: checksum does not match" in told[0]
    assert "state.pt has 5 bytes" in told[1] and "step-00000004" in told[2]


@pytest.mark.long
def test_thousands_of_checkpoints_are_listed_without_a_request_for_each(bucket: Bucket, s3: S3, tmp_path: Path) -> None:
    bucket.claim()
    first = saved(tmp_path, 1)
    told = json.loads((first.folder / "manifest.json").read_text())
    objects: dict[str, bytes] = {}
    for step in range(1, 521):
        described = {**told, "step": step, "sequence": step, "files": [{**told["files"][0], "bytes": 1}]}
        described["crc32"] = manifest.checksum(described)
        objects[f"run/{manifest.folder_name(step)}/manifest.json"] = json.dumps(described).encode()
        objects[f"run/{manifest.folder_name(step)}/state.pt"] = b"x"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(s3.put, objects, objects.values()))
    assert steps(bucket) == list(range(1, 521))
    bucket.tidy()
    assert f"run/{INDEX}" in s3.names()
    fresh = bucket_at(s3)
    s3.proxy.asked.clear()
    assert steps(fresh) == list(range(1, 521))
    assert len(s3.proxy.asked) <= 5  # two pages of a thousand, and the index
    s3.put(f"run/{manifest.folder_name(7)}/manifest.json", b"replaced behind the index")
    assert steps(fresh) == [step for step in range(1, 521) if step != 7]
    s3.put(f"run/{INDEX}", b"not an index")
    assert len(steps(bucket_at(s3))) == 519


def test_a_place_that_was_emptied_by_hand_is_claimed_again(any_bucket: Bucket, place: Place, tmp_path: Path) -> None:
    any_bucket.belong("me")
    any_bucket.claim()
    upload(any_bucket, saved(tmp_path, 1))
    for name in place.names():
        place.delete(name)
    upload(any_bucket, saved(tmp_path, 2))
    assert steps(any_bucket) == [2] and any_bucket.run() == "me" and "run/writer.json" in place.names()


def test_a_process_that_ends_gives_the_place_back(any_bucket: Bucket, place: Place, tmp_path: Path) -> None:
    any_bucket.belong("me")
    any_bucket.claim()
    second = bucket_at(place)
    second.claim()
    with pytest.raises(MirrorError, match="uploads to it now"):
        upload(any_bucket, saved(tmp_path, 1))
    any_bucket.release()  # it is not its own any more
    assert "run/writer.json" in place.names()
    second.release()
    upload(any_bucket, saved(tmp_path, 1))
    assert steps(any_bucket) == [1]


def test_a_commit_whose_answer_was_lost_is_one(bucket: Bucket, s3: S3, tmp_path: Path) -> None:
    bucket.belong("me")
    fault = s3.proxy.inject("truncate", is_manifest)  # the server has the manifest, the client no answer
    upload(bucket, saved(tmp_path, 1))
    assert fault.seen.is_set() and steps(bucket) == [1]


def test_a_commit_is_taken_back_if_files_have_disappeared_meanwhile(bucket: Bucket, s3: S3, tmp_path: Path) -> None:
    bucket.belong("me")
    checkpoint = saved(tmp_path, 1)

    def remove_state(asked: Asked) -> bool:
        if is_manifest(asked):
            s3.client.delete_object(Bucket=s3.bucket, Key="run/step-00000001/state.pt")
        return False

    s3.proxy.inject("status", remove_state, times=10_000)
    with pytest.raises(OSError, match=r"state\.pt was removed or replaced while the checkpoint was uploaded"):
        upload(bucket, checkpoint)
    assert "run/step-00000001/manifest.json" not in s3.names()


def test_a_copy_inside_a_checkpoint_is_none_of_its_files(any_bucket: Bucket, place: Place, tmp_path: Path) -> None:
    any_bucket.belong("me")
    checkpoint = saved(tmp_path, 1)
    for file in checkpoint.folder.iterdir():
        place.put(f"run/step-00000001/step-00000001/{file.name}", file.read_bytes())
    upload(any_bucket, checkpoint)
    assert steps(any_bucket) == [1]


def test_manifests_that_are_none_do_not_stop_the_index(any_bucket: Bucket, place: Place) -> None:
    for step in range(1, 40):
        place.put(f"run/{manifest.folder_name(step)}/manifest.json", b"\xff\xfe")
    assert steps(any_bucket) == [] and len(any_bucket.broken) == 39
    any_bucket.tidy()


def test_a_sequence_after_which_none_can_follow_is_refused(any_bucket: Bucket, place: Place, tmp_path: Path) -> None:
    any_bucket.belong("me")
    upload(any_bucket, saved(tmp_path, 1))
    told = json.loads(place.body("run/step-00000001/manifest.json")) | {"sequence": 2**63 - 1}
    told["crc32"] = manifest.checksum(told)
    place.put("run/step-00000001/manifest.json", json.dumps(told).encode())
    assert steps(any_bucket) == [] and "not a whole number" in str(any_bucket.broken[0])


def test_an_index_has_a_bound_and_a_larger_one_is_not_read(
    bucket: Bucket, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (saved(tmp_path, 1).folder / "manifest.json").read_bytes()
    for step in range(1, 41):
        s3.put(f"run/{manifest.folder_name(step)}/state.pt", b"x")
        told = json.loads(text) | {"step": step, "sequence": step}
        told["files"][0]["bytes"] = 1
        s3.put(f"run/{manifest.folder_name(step)}/manifest.json", json.dumps(sealed(told)).encode())
    most = 8_000
    monkeypatch.setattr("lazyckpt.tiers.bucket._MAX_INDEX_BYTES", most)
    assert steps(bucket) == list(range(1, 41))
    bucket.tidy()
    index = s3.body(f"run/{INDEX}")
    assert most / 2 < len(index) <= most and 10 < len(json.loads(index)["manifests"]) < 40
    writes = len(s3.proxy.asked)
    bucket.tidy()
    assert len(s3.proxy.asked) == writes  # what has no room in it does not make a new one
    s3.proxy.asked.clear()
    fresh = bucket_at(s3)
    assert steps(fresh) == list(range(1, 41)) and 2 < len(s3.proxy.asked) < 40
    monkeypatch.setattr("lazyckpt.tiers.bucket._MAX_INDEX_BYTES", len(index) - 1)
    s3.proxy.asked.clear()
    assert steps(bucket_at(s3)) == list(range(1, 41))
    assert len(s3.proxy.asked) > 40  # the manifests themselves


def sealed(told: dict[str, object]) -> dict[str, object]:
    return {**told, "crc32": manifest.checksum(told)}


ODD = ["logs//b", "logs/../b", "logs/\x01b", "step-00000002/tensorboard//b"]


@pytest.mark.long(first=1)
@pytest.mark.parametrize("odd", ODD)
def test_an_object_with_a_strange_name_is_no_matter(bucket: Bucket, s3: S3, tmp_path: Path, odd: str) -> None:
    bucket.belong("me")
    upload(bucket, saved(tmp_path, 1))
    s3.put(f"run/{odd}", b"foreign")
    upload(bucket, saved(tmp_path, 2))
    assert steps(bucket) == [1, 2] and bucket.broken == []
    bucket.tidy()
    bucket.remove(next(found for found in bucket.checkpoints() if found.step == 2))
    assert steps(bucket) == [1] and f"run/{odd}" in s3.names()
    url = s3.url()
    assert [each.step for each in remote.scan(located(url))[0]] == [1]  # type: ignore[arg-type]
    assert [trial.fault for trial in try_out(located(url))] == [""] * 5  # type: ignore[arg-type]


def test_a_strange_name_in_the_folder_of_a_checkpoint_is_its_fault_alone(
    bucket: Bucket, s3: S3, tmp_path: Path
) -> None:
    bucket.belong("me")
    for step in (1, 2):
        upload(bucket, saved(tmp_path, step))
    s3.put("run/step-00000002/\x01b", b"foreign")
    assert steps(bucket) == [1]
    told = r'step-00000002: cannot be listed: "run/step-00000002/\\u\{1\}b" has a name that cannot be read; rename or'
    assert re.search(told, str(bucket.broken[0])), str(bucket.broken[0])


@pytest.mark.parametrize("odd", ["/b", "\x01b"])
def test_a_strange_name_directly_in_the_place_is_told(bucket: Bucket, s3: S3, tmp_path: Path, odd: str) -> None:
    bucket.belong("me")
    upload(bucket, saved(tmp_path, 1))
    s3.put(f"run/{odd}", b"foreign")
    upload(bucket, saved(tmp_path, 2))  # looks only into its folder
    with pytest.raises(OSError, match=r'"run/.*" has a name that cannot be read; rename or remove that object'):
        steps(bucket)
    listed, *others = try_out(located(s3.url()))  # type: ignore[arg-type]
    assert "rename or remove that object" in listed.fault and [trial.fault for trial in others] == [""] * 4
