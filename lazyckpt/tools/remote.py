"""Checkpoints behind URLs: lists, verifies, prunes and pins them, and copies them from and to folders."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from lazyckpt import _engine
from lazyckpt.errors import CorruptFileError, LoadError, MirrorError, load_error
from lazyckpt.storage import folders, manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.direct import PART_BYTES
from lazyckpt.storage.manifest import MANIFEST, Checkpoint, FileEntry
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.stores.urls import located, opened
from lazyckpt.tiers.bucket import Bucket
from lazyckpt.tiers.mounted import RUN, MountedFolder, claimed, run_of, write_word
from lazyckpt.tiers.pending import parts_of
from lazyckpt.tiers.tier import Parts, Tier
from lazyckpt.tools import Progress

if TYPE_CHECKING:
    from typing_extensions import Buffer

_IN_FLIGHT = 8  # requests of a download


def bucket_of(url: StorePath) -> Bucket:
    """The place of a run. Raises ConfigError."""
    return Bucket(opened(str(url)))


def scan(url: StorePath) -> tuple[list[Checkpoint], list[LoadError], dict[str, int]]:
    """The checkpoints at a URL, the newest first; why others cannot be read; and the bytes of those that have no
    manifest, by name. Raises LoadError."""
    bucket = bucket_of(url)
    try:
        found = sorted(bucket.checkpoints(), key=lambda checkpoint: checkpoint.sequence, reverse=True)
    except OSError as error:
        raise load_error("cannot be read", error, path=url) from error
    return found, bucket.broken, bucket.halves


def pull(url: str | AnyPath, directory: Path, *, step: int | None = None, progress: Progress | None = None) -> Path:
    """Downloads the newest checkpoint of a run, or that of ``step``, into a run's folder; returns its folder there.

    It appears when it is durable and every checksum has matched. A Checkpointer of this folder with a mirror at ``url``
    then continues the run. Raises LoadError, and SaveError if the folder cannot be written to."""
    source = located(url)
    checkpoint = _chosen(source, step)
    target = MountedFolder(directory)
    folders.make_folder(directory)
    manifest.check_labels(checkpoint)
    text = manifest.read_manifest(checkpoint.path / MANIFEST)
    _refuse_other_run(directory, _run_at(source), checkpoint, text)
    target.upload(checkpoint, text, _with_progress(_parts_from(checkpoint.path), checkpoint, progress))
    return directory / checkpoint.path.name


def push(directory: Path, url: str | AnyPath, *, step: int | None = None, progress: Progress | None = None) -> AnyPath:
    """Uploads the newest checkpoint in a run's folder, or that of ``step``; returns where it is.

    Raises LoadError, MirrorError if the place belongs to another run, and OSError."""
    checkpoint = _chosen(directory, step)
    place = located(url)
    tier: Tier = bucket_of(place) if isinstance(place, StorePath) else MountedFolder(place)
    run = claimed(directory, uuid.uuid4().hex)
    if tier.belong(run) != run:
        raise MirrorError("it holds the checkpoints of another run", mirror=str(place), step=checkpoint.step)
    text = manifest.read_manifest(checkpoint.folder / MANIFEST)
    tier.upload(checkpoint, text, _with_progress(_parts_from(checkpoint.folder), checkpoint, progress))
    return place / checkpoint.path.name


def _chosen(place: AnyPath, step: int | None) -> Checkpoint:
    """Raises LoadError, which lists the steps, if there is no such checkpoint."""
    if isinstance(place, StorePath):
        found, *_ = scan(place)
    else:
        found = Catalog(place).scan()
    chosen = [checkpoint for checkpoint in found if step in (None, checkpoint.step)]
    if not chosen:
        there = ", ".join(str(number) for number in sorted(checkpoint.step for checkpoint in found)[-10:]) or "none"
        raise LoadError(f"no checkpoint{'' if step is None else f' of step {step}'}; there is: {there}", path=place)
    return chosen[0]


def _run_at(place: AnyPath) -> str | None:
    return bucket_of(place).run() if isinstance(place, StorePath) else run_of(place)


def _refuse_other_run(directory: Path, run: str | None, checkpoint: Checkpoint, text: bytes) -> None:
    """Raises LoadError if the folder holds another run, or another checkpoint of this step. An empty folder becomes one
    of the run."""
    there = directory / checkpoint.path.name / MANIFEST
    if not manifest.is_missing(there) and manifest.read_manifest(there) != text:
        what = "there is another checkpoint of this step; remove it, or give another folder"
        raise LoadError(what, path=there.parent)
    if (own := run_of(directory)) != run and (own is not None or Catalog(directory).holds_any()):
        raise LoadError("holds the checkpoints of another run; give another folder", path=directory)
    if own is None and run is not None:
        write_word(directory / RUN, run)


def _parts_from(folder: AnyPath) -> Parts:
    """The bytes of the files of a checkpoint, verified."""
    if isinstance(folder, Path):
        return lambda file: parts_of(folder / file.name, file, reuse=False)
    return lambda file: _downloaded(folder / file.name, file)


def _downloaded(path: StorePath, file: FileEntry) -> Iterator[Buffer]:
    """Raises CorruptFileError if the bytes are not those that were saved."""
    crc = 0
    ends = iter(range(0, file.nbytes, PART_BYTES))
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        asked: deque[Future[Buffer]] = deque()

        def ask() -> None:
            if (begin := next(ends, None)) is not None:
                end = min(begin + PART_BYTES, file.nbytes)
                asked.append(pool.submit(path.store.read, path.key, begin, end))

        for _ in range(_IN_FLIGHT):
            ask()
        while asked:
            part = asked.popleft().result()
            ask()
            crc = _engine.crc32(part, crc)
            if not asked and crc != file.crc32:
                raise CorruptFileError("checksum does not match", path=path)
            yield part


def _with_progress(parts: Parts, checkpoint: Checkpoint, progress: Progress | None) -> Parts:
    done = 0

    def told(file: FileEntry) -> Iterator[Buffer]:
        nonlocal done
        for part in parts(file):
            yield part
            done += memoryview(part).nbytes
            if progress is not None:
                progress(checkpoint.path.name, done, checkpoint.nbytes)

    return told


def remove(url: StorePath, checkpoint: Checkpoint) -> None:
    """Removes a checkpoint at a URL, manifest first. Raises OSError."""
    bucket_of(url).remove(checkpoint)


def pin(url: StorePath, step: int, pinned: bool) -> StorePath:
    """Makes every retention keep the checkpoint of ``step``, or not; returns its URL. Raises LoadError."""
    _chosen(url, step)
    store, name = opened(str(url)), manifest.folder_name(step)
    if pinned:
        store.create(f"{name}.pin", b"")
    else:
        store.remove([f"{name}.pin"])
    return url / name
