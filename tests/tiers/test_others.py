"""Several ranks upload one checkpoint: rank 0 and another one as threads of this process, with a board between them."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from file_server import Folders
from object_store import S3, Asked

from lazyckpt import Mirror, MirrorError, waits
from lazyckpt.ranks.board import SharedSave
from lazyckpt.ranks.rounds import RankLost, StoreLost
from lazyckpt.storage import manifest
from lazyckpt.storage.manifest import FileEntry
from lazyckpt.tiers import mirrors as mirrors_module
from lazyckpt.tiers.arrival import Arrivals
from lazyckpt.tiers.bucket import Bucket
from lazyckpt.tiers.helper import Helper
from lazyckpt.tiers.mirrors import Mirrors, tier_of
from lazyckpt.tiers.others import Word
from lazyckpt.tiers.outgoing import Outgoing, await_uploads
from lazyckpt.tiers.tier import Tier
from lazyckpt.tiers.uploads import Uploads


class Board:
    """That of ranks/board.py, in this process."""

    def __init__(self) -> None:
        self._told: dict[str, bytes] = {}
        self.lost: set[int] = set()
        self.stopped = False
        self.words: list[Word] = []

    def tell(self, topic: str, value: bytes) -> None:
        self.check()
        self._told[topic] = value
        self.words.append(Word.decode(value))

    def told(self, topic: str) -> bytes | None:
        self.check()
        return self._told.get(topic)

    def check(self) -> None:
        if self.stopped:
            raise StoreLost("it was stopped")

    def watch(self, rank: int) -> Any:
        return Watch(self, rank)


class Watch:
    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank

    def check(self) -> None:
        self.board.check()
        if self.rank in self.board.lost:
            raise RankLost(self.rank, "has closed its Checkpointer or Saver")


class Job:
    """Two ranks that have saved into one folder, and one mirror."""

    def __init__(self, folder: Path, place: str, **knobs: Any) -> None:
        self.folder = folder
        self.board = Board()
        self.place = place
        mirror = Mirror(place, **knobs)
        self.tiers: list[Tier] = [tier_of(mirror), tier_of(mirror)]
        self.uploads = Uploads(mirror, self.tiers[0], lambda path: "run", topic="mirror/0")
        self.helper = Helper(mirror, self.tiers[1], "mirror/0")
        self._saves = 0

    def save(self, step: int, sequence: int, nbytes: int = 100_000) -> SharedSave:
        """Makes a checkpoint of which each rank has written a file of its own."""
        path = self.folder / manifest.folder_name(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        files = []
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
            body = bytes([sequence]) * nbytes
            (path / name).write_bytes(body)
            files.append(FileEntry(name, len(body), zlib.crc32(body)))
        writers = {"__0_0.distcp": [0], "__1_0.distcp": [1, 0]}
        told = manifest.describe(step=step, sequence=sequence, parent=None, files=files, world_size=2, writers=writers)
        (path / "manifest.json").write_text(json.dumps(told))
        self._saves += 1
        return SharedSave(self.board, 0, f"save {self._saves}")  # type: ignore[arg-type]

    def path(self, step: int) -> Path:
        return self.folder / manifest.folder_name(step)

    def committed(self, step: int, save: SharedSave) -> list[Any]:
        """Tells both ranks; returns their Futures."""
        other = SharedSave(save.board, 1, save.name)
        return [self.uploads.add(self.path(step), step, save=save), self.helper.add(self.path(step), step, other)]

    def steps(self) -> list[int]:
        return sorted(checkpoint.step for checkpoint in tier_of(Mirror(self.place)).checkpoints())

    def close(self) -> list[bool]:
        """Rank 0 first, as in a job whose rank 0 has nothing else to do."""
        ended = [self.uploads.close()]
        self.board.lost.add(0)
        return [*ended, self.helper.close()]


@pytest.fixture(params=["bucket", "folder", "server"])
def job(request: pytest.FixtureRequest, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """With a place of each kind. A file server keeps no labels."""
    monkeypatch.setattr(waits, "MIRROR_LAST_LOOK_S", 0.1)
    fsspec.register_implementation("folders", Folders, clobber=True)
    root = Folders.roots[tmp_path.name] = tmp_path / "served"
    root.mkdir()
    places = {"bucket": s3.url(), "folder": str(tmp_path / "lustre"), "server": f"folders://{tmp_path.name}"}
    job = Job(tmp_path / "a", places[request.param])
    yield job
    s3.proxy.heal()
    job.board.stopped = True
    job.uploads.close(), job.helper.close()


@pytest.fixture
def bucket_job(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(waits, "MIRROR_LAST_LOOK_S", 0.1)
    job = Job(tmp_path / "a", s3.url())
    yield job
    s3.proxy.heal()
    job.board.stopped = True
    job.uploads.close(), job.helper.close()


def sent_by(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that a rank sends from now on."""
    names: list[str] = []
    for method in ("upload", "share"):
        real = getattr(tier, method)

        def noting(checkpoint: Any, second: Any, parts: Any, last: Any = None, real: Any = real) -> None:
            def noted(file: FileEntry) -> Any:
                names.append(file.name)
                return parts(file)

            real(checkpoint, second, noted, last)

        monkeypatch.setattr(tier, method, noting)
    return names


def wait_for(condition: Any) -> None:
    looks = threading.Event()
    for _ in range(6000):
        if condition():
            return
        looks.wait(0.01)
    raise AssertionError("did not come true in a minute")


def of_rank_1(asked: Asked) -> bool:
    return asked.method in ("PUT", "POST") and "__1_0" in asked.path


def test_each_rank_sends_the_files_that_it_was_the_first_to_write(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [sent_by(tier, monkeypatch) for tier in job.tiers]
    for future in job.committed(1, job.save(1, 1)):
        future.result(60)
    assert [sorted(names) for names in sent] == [[".metadata", "__0_0.distcp"], ["__1_0.distcp"]]
    assert job.steps() == [1]
    assert job.close() == [True, True]


def test_a_checkpoint_without_other_ranks_is_rank_0s_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart, with any number of ranks."""
    sent = sent_by(job.tiers[0], monkeypatch)
    job.save(1, 1)
    job.uploads.add(job.path(1), 1).result(60)
    assert sorted(sent) == [".metadata", "__0_0.distcp", "__1_0.distcp"] and job.board.words == []


def test_the_files_of_a_lost_rank_are_sent_by_rank_0(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = sent_by(job.tiers[0], monkeypatch)
    save = job.save(1, 1)
    there = job.uploads.add(job.path(1), 1, save=save)
    wait_for(lambda: len(sent) == 2)
    assert not there.done()
    job.board.lost.add(1)
    there.result(60)
    assert sorted(sent) == [".metadata", "__0_0.distcp", "__1_0.distcp"] and job.steps() == [1]


def test_the_files_of_a_slow_rank_are_sent_by_rank_0(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that lives, and sends nothing."""
    monkeypatch.setattr(waits, "MIRROR_PATIENCE_S", 0.2)
    with pytest.warns(UserWarning, match=r"rank 1 lives, and has not uploaded its files of step 1 within 0 s") as told:
        for step in (1, 2):
            job.uploads.add(job.path(step), step, save=job.save(step, step)).result(60)
    assert job.steps() == [1, 2]
    assert len([warning for warning in told if "rank 1 lives" in str(warning.message)]) == 1


def test_without_a_board_rank_0_sends_everything(job: Job) -> None:
    job.board.stopped = True
    job.uploads.add(job.path(1), 1, save=job.save(1, 1)).result(60)
    assert job.steps() == [1]


def test_a_file_that_no_rank_can_read_is_told_with_its_rank(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    save = job.save(1, 1)
    job.board.lost.add(1)
    unreadable = str(job.path(1) / "__1_0.distcp")
    real = os.open

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        if os.fspath(path) == unreadable:
            raise PermissionError(13, "Permission denied", unreadable)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    told = r"rank 1 has not uploaded __1_0\.distcp, and rank 0 cannot read it: Permission denied"
    with pytest.warns(UserWarning, match=told):
        there = job.uploads.add(job.path(1), 1, save=save)
        wait_for(lambda: job.uploads.failing)
    assert job.steps() == []
    monkeypatch.setattr(os, "open", real)
    with pytest.warns(UserWarning, match="works again"):
        there.result(60)


def test_no_rank_begins_before_rank_0_has_claimed_the_place(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which belongs to another run."""
    assert tier_of(Mirror(job.place)).belong("another run") == "another run"
    sent = sent_by(job.tiers[1], monkeypatch)
    with pytest.warns(UserWarning, match="another run"):
        for future in job.committed(1, job.save(1, 1)):
            with pytest.raises(MirrorError, match="holds the checkpoints of another run"):
                future.result(60)
    assert sent == [] and job.steps() == []


def test_a_commit_waits_for_a_file_with_the_right_label(bucket_job: Job, s3: S3) -> None:
    """One of an older upload of the step has the same size."""
    job = bucket_job
    save = job.save(1, 2)
    there = job.uploads.add(job.path(1), 1, save=save)
    wait_for(lambda: job.board.words)
    job.tiers[1]._store.write("step-00000001/__1_0.distcp", [b"\1" * 100_000], 100_000, "crc32-00000000")  # type: ignore[attr-defined]
    looks = len(s3.proxy.asked)
    wait_for(lambda: len(s3.proxy.asked) > looks + 6)
    assert not there.done() and job.steps() == []
    job.helper.add(job.path(1), 1, SharedSave(save.board, 1, save.name)).result(60)
    there.result(60)
    assert s3.body("run/step-00000001/__1_0.distcp") == b"\2" * 100_000


def test_of_checkpoints_that_wait_all_ranks_take_the_same(bucket_job: Job, s3: S3) -> None:
    job = bucket_job
    held = s3.proxy.inject("stall", lambda asked: "__0_0" in asked.path and asked.method == "PUT", times=1000)
    saves = [job.committed(1, job.save(1, 1))]
    assert held.seen.wait(60)
    saves += [job.committed(step, job.save(step, step)) for step in (2, 3)]
    wait_for(lambda: "run/step-00000001/__1_0.distcp" in s3.names())
    s3.proxy.heal()
    for futures in saves[::2]:
        for future in futures:
            future.result(60)
    for future in saves[1]:
        with pytest.raises(MirrorError, match="step 2: step 3, which is newer, goes there instead"):
            future.result(60)
    assert job.steps() == [1, 3] and not any("step-00000002" in name for name in s3.names())


def test_a_rank_learns_that_a_checkpoint_has_gone(bucket_job: Job, s3: S3) -> None:
    job = bucket_job
    held = s3.proxy.inject("stall", lambda asked: "step-00000001/__" in asked.path and asked.method == "PUT", times=99)
    first = job.committed(1, job.save(1, 1))
    assert held.seen.wait(60)
    second = job.committed(2, job.save(2, 2))
    shutil.rmtree(job.path(2))
    s3.proxy.heal()
    for future in first:
        future.result(60)
    for future in second:
        with pytest.raises(MirrorError, match="was removed before it was uploaded"):
            future.result(60)


def test_a_rank_that_fails_says_so_and_rank_0_goes_on(bucket_job: Job, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    job = bucket_job
    monkeypatch.setattr(waits, "MIRROR_PATIENCE_S", 2.0)
    real = job.tiers[1].share

    def refused(*arguments: Any) -> None:
        raise PermissionError(13, "the credentials are missing")

    monkeypatch.setattr(job.tiers[1], "share", refused)
    with pytest.warns(UserWarning, match=r"rank 1 could not upload its files of step 1: the credentials are missing"):
        for future in job.committed(1, job.save(1, 1)):
            future.result(60)
    monkeypatch.setattr(job.tiers[1], "share", real)
    with pytest.warns(UserWarning, match="works again on rank 1: step 2"):
        for future in job.committed(2, job.save(2, 2)):
            future.result(60)
    assert job.steps() == [1, 2]


def test_a_step_that_was_saved_again_is_not_mixed(job: Job) -> None:
    """Rank 0 uploads the first save; another rank finds the second one in its place."""
    first = job.save(1, 1)
    there = job.uploads.add(job.path(1), 1, save=first)
    wait_for(lambda: (current := job.uploads._current) is not None and current.sent == 200_000)  # all of its own
    job.save(1, 2)
    other = job.helper.add(job.path(1), 1, SharedSave(first.board, 1, first.name))
    wait_for(lambda: not job.helper._shares or job.helper._shares[0].tried)
    job.board.lost.add(1)
    for future in (there, other):
        with pytest.raises(MirrorError, match="was saved again before it was uploaded"):
            future.result(60)
    assert job.steps() == []


def test_a_rank_that_slept_does_not_end_an_upload_that_is_over(
    job: Job, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has sent the file itself, and the step was saved again since."""
    monkeypatch.setattr(waits, "MIRROR_PATIENCE_S", 0.2)
    slept, wakes = threading.Event(), threading.Event()
    real = job.tiers[1].share

    def sleepy(checkpoint: Any, files: Any, parts: Any, place: str) -> None:
        def late(file: FileEntry) -> Iterator[Any]:
            for part in parts(file):
                if checkpoint.sequence == 1:
                    slept.set()
                    wakes.wait(60)
                yield part

        real(checkpoint, files, late, place)

    monkeypatch.setattr(job.tiers[1], "share", sleepy)
    first = job.committed(1, job.save(1, 1))
    assert slept.wait(60)
    first[0].result(60)
    second = job.committed(1, job.save(1, 2))
    second[0].result(60)
    wakes.set()
    first[1].result(60), second[1].result(60)
    (found,) = tier_of(Mirror(job.place)).checkpoints()
    manifest.check_labels(found)
    assert found.sequence == 2 and job.steps() == [1]
    assert body_in(job, "__1_0.distcp") == b"\2" * 100_000
    assert sorted(names_in(job)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    completed = [asked for asked in s3.proxy.asked if of_rank_1(asked) and "?uploadId=" in asked.path]
    assert sum(asked.method == "POST" for asked in completed) == (2 if job.place == s3.url() else 0)  # by rank 0


def names_in(job: Job) -> list[str]:
    tier = tier_of(Mirror(job.place))
    if isinstance(tier, Bucket):
        return [entry.name.rpartition("/")[2] for entry in tier._store.entries("step-00000001")]
    return os.listdir(f"{job.place}/step-00000001")


def body_in(job: Job, name: str) -> bytes:
    tier = tier_of(Mirror(job.place))
    if isinstance(tier, Bucket):
        return tier._store.whole(f"step-00000001/{name}", 1 << 20)
    return Path(job.place, "step-00000001", name).read_bytes()


def test_a_file_that_came_too_late_is_put_right(bucket_job: Job, s3: S3) -> None:
    """Its last bytes were with the store before rank 0 had gone on, which nothing takes back."""
    job = bucket_job
    save = job.save(1, 1)
    old = manifest.read_checkpoint(job.path(1))
    for future in job.committed(1, save):
        future.result(60)
    for future in job.committed(1, job.save(1, 2)):
        future.result(60)
    (file,) = (file for file in old.files if file.name == "__1_0.distcp")
    job.tiers[1].share(old, [file], lambda file: iter([b"\1" * 100_000]), "")
    with pytest.raises(Exception, match="not the file that the manifest means"):
        manifest.check_labels(tier_of(Mirror(job.place)).checkpoints()[0])
    job.tiers[1].mend(old, [file], lambda file: iter([(job.path(1) / file.name).read_bytes()]))
    manifest.check_labels(tier_of(Mirror(job.place)).checkpoints()[0])


@pytest.mark.parametrize("how", ["closed", "no store"])
def test_a_rank_without_rank_0_asks_the_place(job: Job, how: str) -> None:
    save = job.save(1, 1)
    job.uploads.add(job.path(1), 1, save=save).done()
    wait_for(lambda: job.board.words)  # rank 0 has begun, and waits for this rank
    other = SharedSave(save.board, 1, save.name)
    job.board.lost.add(1)
    wait_for(lambda: job.steps() == [1])
    job.save(2, 2)
    job.board.lost.add(0)
    job.board.stopped = how == "no store"
    job.board._told.clear()  # the last word got lost
    there = [job.helper.add(job.path(1), 1, other)]
    there.append(job.helper.add(job.path(2), 2, SharedSave(save.board, 1, "save 2")))
    there[0].result(60)
    told = "has closed its Checkpointer" if how == "closed" else "the store of torch.distributed is lost"
    with pytest.raises(MirrorError, match=f"{told}.*, and had not uploaded it"):
        there[1].result(60)
    assert not job.helper.close()


def test_the_end_does_not_wait_for_a_rank_0_that_fails(bucket_job: Job, s3: S3) -> None:
    job = bucket_job
    s3.proxy.inject("status", lambda asked: "__0_0" in asked.path, times=10_000, status=403, code="AccessDenied")
    with pytest.warns(UserWarning, match="could not be uploaded"):
        _, other = job.committed(1, job.save(1, 1))
        wait_for(lambda: job.helper.failing and not job.helper._closing)
    assert job.helper.is_at_work() and job.helper.lag_s > 0.0
    assert not job.helper.close() and not job.uploads.close()
    with pytest.raises(MirrorError, match="closed before rank 0 had uploaded it"):
        other.result(60)


def test_a_cap_holds_for_each_rank(s3: S3, tmp_path: Path) -> None:
    job = Job(tmp_path / "a", s3.url(), max_bytes_per_s=64 << 20)
    began = time.monotonic()
    for future in job.committed(1, job.save(1, 1, 16 << 20)):
        future.result(60)
    assert time.monotonic() - began >= 0.25
    assert job.close() == [True, True]


def test_an_upload_begins_anew_where_rank_0_does(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank sends its files into each place that rank 0 tells, once."""
    sent = sent_by(job.tiers[1], monkeypatch)
    real, calls = job.tiers[0].upload, []

    def failing_once(checkpoint: Any, text: bytes, parts: Any, others: Any) -> None:
        calls.append(1)

        def broken(file: FileEntry) -> Any:
            if file.name == "__0_0.distcp" and len(calls) == 1:
                wait_for(lambda: len(sent) == 1 and not job.helper._new)
                raise OSError(28, "No space left on device")
            return parts(file)

        real(checkpoint, text, broken, others)

    monkeypatch.setattr(job.tiers[0], "upload", failing_once)
    with pytest.warns(UserWarning, match="No space left"):
        for future in job.committed(1, job.save(1, 1)):
            future.result(60)
    assert job.steps() == [1] and len(calls) == 2
    assert sent == ["__1_0.distcp"] * (1 if job.place.startswith("s3:") else 2)  # without labels, rank 0 begins anew
    places = {word.place for word in job.board.words if word.now}
    assert len(places) == 2


def test_a_checkpoint_is_committed_even_if_no_thread_can_upload_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(mirrors_module, "Helper", refused)
    mirrors, arrivals = Mirrors([Mirror(tmp_path / "m")], tmp_path / "a"), Arrivals()
    save: Any = SharedSave(Board(), 1, "save 1")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="is not uploaded by this rank: can't start new thread"):
        mirrors.committed(tmp_path / "a" / "step-00000001", 1, arrivals, save)
    (future,) = arrivals.futures
    assert isinstance(future.exception(0), MirrorError)


def test_a_rank_waits_for_the_commit_by_rank_0(bucket_job: Job, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a signal ends the job: a rank that has sent its files is not done."""
    job = bucket_job
    held = s3.proxy.inject("stall", lambda asked: "__0_0" in asked.path and asked.method == "PUT", times=1000)
    outgoing = Outgoing()
    outgoing._helpers.append(job.helper)
    _, there = job.committed(1, job.save(1, 1))
    assert held.seen.wait(60)
    wait_for(lambda: "run/step-00000001/__1_0.distcp" in s3.names())
    assert outgoing.waiting() and not outgoing.failing() and await_uploads(0.01) == [s3.url()]
    s3.proxy.heal()
    assert await_uploads(60.0) == [] and there.done() and outgoing.lag_s == 0.0
