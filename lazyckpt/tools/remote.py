"""Checkpoints behind URLs: lists, verifies, prunes and pins them, and copies them from and to folders."""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lazyckpt import _engine
from lazyckpt.errors import CorruptFileError, LoadError, MirrorError, ReadError, load_error
from lazyckpt.pipeline.wait_bar import WaitBar
from lazyckpt.storage import folders, manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.direct import PART_BYTES
from lazyckpt.storage.fields import Layout
from lazyckpt.storage.manifest import MANIFEST, NO_STEP, PIN, Checkpoint, FileEntry
from lazyckpt.stores.calls import awaited, begun
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.stores.urls import is_url, located, opened
from lazyckpt.tiers.bucket import Bucket
from lazyckpt.tiers.described import Saved
from lazyckpt.tiers.mirror import Mirror
from lazyckpt.tiers.mounted import MountedFolder, write_copy
from lazyckpt.tiers.pending import parts_of
from lazyckpt.tiers.tier import Parts, Tier
from lazyckpt.tiers.words import RUN, claimed, home_of, run_of, write_word
from lazyckpt.tools import Progress
from lazyckpt.tools.trainers import list_trainer
from lazyckpt.warn import warn

if TYPE_CHECKING:
    from typing_extensions import Buffer

_IN_FLIGHT = 8  # requests of a download


def bucket_of(url: StorePath) -> Bucket:
    """The place of a run. Raises ConfigError."""
    return Bucket(opened(str(url)) if url.key else url.store)


def _place_of(url: Place) -> AnyPath:
    """Raises ConfigError for a URL that lazyckpt cannot read."""
    if not isinstance(url, Mirror):
        return located(url)
    return StorePath(opened(str(url), url.options), "") if is_url(str(url)) else Path(str(url))


def scan(url: StorePath) -> tuple[list[Checkpoint], list[LoadError], dict[str, int]]:
    """The checkpoints at a URL, the newest first; why others cannot be read; and the bytes of those that have no
    manifest, by name. Raises LoadError."""
    bucket = bucket_of(url)
    try:
        found = sorted(bucket.checkpoints(), key=lambda checkpoint: checkpoint.sequence, reverse=True)
    except OSError as error:
        raise load_error("cannot be read", error, path=url) from error
    return found, bucket.broken, bucket.halves


def copies_in(folder: Path) -> list[Checkpoint]:
    """What trainers have saved, in the folder of a mirror; the newest first. Raises LoadError."""
    return [checkpoint for checkpoint in _all_in(folder) if checkpoint.layout != "state"]


Place: TypeAlias = str | os.PathLike[str] | StorePath | Mirror


def pull(
    url: Place | Iterable[Place],
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download the newest checkpoint of a run, or that of ``step``, into a folder; returns where it is there.

    ``url`` is a mirror, or one checkpoint in it. A run that resumes from the copy with the same mirror continues the
    run there. The copy appears when it is durable and every checksum has matched; one that is there already is not
    downloaded again. At a terminal a long download shows a bar. Of several ranks, one calls this.

    Several mirrors: the newest checkpoint of all. If it is damaged there, the next one, with a warning; if all are,
    the error of the newest.

    Raises LoadError if there is no such checkpoint, if it is damaged, or if the folder holds another one of this name
    or another run; OSError if the folder cannot be written to.
    """
    if not isinstance(url, str | os.PathLike | StorePath | Mirror):
        copy = pull_newest(url, Path(directory), step=step, progress=progress)
        if copy is None:
            raise LoadError("none of the mirrors has a checkpoint", path=directory)
        return copy
    root, checkpoint = _source(_place_of(url), step)
    return _pull(root, checkpoint, Path(directory), progress)


def pull_newest(
    places: Iterable[Place],
    directory: Path,
    *,
    step: int | None = None,
    above: int = NO_STEP,
    progress: Progress | None = None,
) -> Path | None:
    """As ``pull`` of several mirrors. Returns None if none of them has a checkpoint of a step ``above`` this one.

    Without ``above``, raises ReadError if one of them cannot be read, and no other has one: it may hold the newest. And
    LoadError if all that they have are damaged: a run must not begin anew by mistake."""
    found: list[tuple[AnyPath, Checkpoint]] = []
    home = home_of(directory.absolute())
    unread: LoadError | None = None
    failed: list[LoadError] = []
    for place in (_place_of(one) for one in places if not isinstance(one, Mirror) or one.what == "all"):
        try:
            whole, broken = _listed(place, home)
        except ReadError as error:
            unread = error
            warn(f"mirror {place} is passed over: {error.what}")
        except LoadError:
            continue  # there is no such folder yet
        else:
            found += [(place, one) for one in whole if above == NO_STEP or one.step > above]
            failed += broken
    found = [(place, one) for place, one in found if step in (None, one.step)]
    for damage in failed:
        warn(f"passed over: {damage}")
    for place, checkpoint in sorted(found, key=lambda pair: (pair[1].step, pair[1].sequence), reverse=True):
        try:
            return _pull(place, checkpoint, directory, progress)
        except LoadError as error:
            warn(f"passed over: {error}")
            failed.insert(0, error)
    if above == NO_STEP and unread is not None:
        raise ReadError(f"{unread.what}; it may hold the newest checkpoint", path=unread.path, errno=5)
    if above == NO_STEP and failed:
        raise failed[0]
    return None


def _pull(root: AnyPath, checkpoint: Checkpoint, directory: Path, progress: Progress | None) -> Path:
    folders.make_folder(directory)
    manifest.check_labels(checkpoint)
    text = manifest.read_manifest(checkpoint.manifest)
    adopted = _refuse_other_run(directory, _run_at(root), checkpoint, text)
    readable = _readable(_parts_from(checkpoint.base), checkpoint)
    try:
        with WaitBar() as bar:
            parts = _with_progress(readable, checkpoint, progress or _shown_by(bar))
            if checkpoint.layout == "state":
                MountedFolder(directory).upload(checkpoint, text, parts)
            elif not _is_there(directory, checkpoint):
                write_copy(replace(checkpoint, path=directory / checkpoint.path.name), parts, None)
    except BaseException:
        if adopted is not None:
            adopted.unlink(missing_ok=True)
        raise
    return directory / checkpoint.path.name


def _readable(parts: Parts, checkpoint: Checkpoint) -> Parts:
    """The same, but a file that is gone from the mirror is a LoadError."""

    def read(file: FileEntry) -> Iterator[Buffer]:
        try:
            yield from parts(file)
        except FileNotFoundError as error:
            raise LoadError("is missing", path=checkpoint.base / file.name) from error

    return read


def _shown_by(bar: WaitBar) -> Progress:
    return lambda name, done, total: bar.show(f"downloading {name}", lambda: done / max(1, total))


def push(
    directory: str | os.PathLike[str],
    url: Place,
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> AnyPath:
    """Upload the newest checkpoint in a run's folder, or that of ``step``; returns where it is. The folder may be a
    trainer's, or one of its checkpoints.

    Raises LoadError, MirrorError if the place belongs to another run, and OSError."""
    place = _place_of(url)
    tier: Tier = bucket_of(place) if isinstance(place, StorePath) else MountedFolder(place)
    checkpoint, text = _to_push(Path(directory), step, tier)
    parent = checkpoint.folder.parent
    run = claimed(parent if checkpoint.layout == "state" else home_of(parent), uuid.uuid4().hex)
    if tier.belong(run) != run:
        raise MirrorError("it holds the checkpoints of another run", mirror=str(place), step=checkpoint.step)
    tier.upload(checkpoint, text, _with_progress(_parts_from(checkpoint.base), checkpoint, progress))
    return place / checkpoint.path.name


def _to_push(directory: Path, step: int | None, tier: Tier) -> tuple[Checkpoint, bytes]:
    """The checkpoint that a local path means, and its manifest. Raises LoadError and OSError."""
    if os.path.isdir(directory) and Catalog(directory).holds_any():
        checkpoint = _chosen(directory, Catalog(directory).scan(), step)
        return checkpoint, manifest.read_manifest(checkpoint.folder / MANIFEST)
    found = list_trainer(directory) if os.path.isdir(directory) else []
    named = [one for one in found if not one.faults and step in (None, one.step)]
    if (found and not named) or not os.path.lexists(directory):
        raise LoadError(f"no checkpoint{'' if step is None else f' of step {step}'}", path=directory)
    path = directory / named[0].name if named else directory
    highest = max((one.sequence for one in tier.checkpoints()), default=0)
    saved = Saved(path.absolute(), named[0].step if named else step, {})
    text = saved.described(highest + 1, highest or None)
    return manifest.checkpoint_of(saved.path, text, saved.layout), text


def _source(place: AnyPath, step: int | None) -> tuple[AnyPath, Checkpoint]:
    """The place of a run, and its checkpoint that is meant: ``place`` is either of them. Raises LoadError."""
    layouts: tuple[Layout, ...] = ("state", "file")
    if any(not manifest.is_missing(manifest.manifest_of(place, layout)) for layout in layouts):
        return place.parent, manifest.read_described(place)
    return place, _chosen(place, _all_in(place), step)


def _all_in(place: AnyPath) -> list[Checkpoint]:
    """The checkpoints in a mirror, the newest first. Raises LoadError."""
    return _listed(place)[0]


def _listed(place: AnyPath, home: Path | None = None) -> tuple[list[Checkpoint], list[LoadError]]:
    """As ``_all_in``, and why others there cannot be used. ``home``: of the run, which knows whether the mirror's file
    system is mounted."""
    if isinstance(place, StorePath):
        return scan(place)[:2]
    folder = MountedFolder(place, home)
    try:
        found = folder.checkpoints()
    except OSError as error:
        raise load_error("cannot be read", error, path=place) from error
    return sorted(found, key=lambda one: one.sequence, reverse=True), folder.broken


def _chosen(place: AnyPath, found: list[Checkpoint], step: int | None) -> Checkpoint:
    """Raises LoadError, which lists the steps, if there is no such checkpoint."""
    chosen = [checkpoint for checkpoint in found if step in (None, checkpoint.step)]
    if not chosen:
        there = ", ".join(str(number) for number in sorted(checkpoint.step for checkpoint in found)[-10:]) or "none"
        raise LoadError(f"no checkpoint{'' if step is None else f' of step {step}'}; there is: {there}", path=place)
    return chosen[0]


def _run_at(place: AnyPath) -> str | None:
    return bucket_of(place).run() if isinstance(place, StorePath) else run_of(place)


def _refuse_other_run(directory: Path, run: str | None, checkpoint: Checkpoint, text: bytes) -> Path | None:
    """Raises LoadError if the folder holds another run, or another checkpoint of this name. An empty folder becomes one
    of the run; then returns the file that says so."""
    there = directory / checkpoint.path.name
    if checkpoint.layout == "state":
        is_other = not manifest.is_missing(there / MANIFEST) and manifest.read_manifest(there / MANIFEST) != text
        holds_any = Catalog(directory).holds_any()
    else:
        is_other = os.path.lexists(there) and not _is_there(directory, checkpoint)
        holds_any = bool(list_trainer(directory))
    if is_other:
        raise LoadError("there is another checkpoint of this name; remove it, or give another folder", path=there)
    home = directory if checkpoint.layout == "state" else home_of(directory)
    if (own := run_of(home)) != run and (own is not None or (run is not None and holds_any)):
        raise LoadError("holds the checkpoints of another run; give another folder", path=directory)
    if own is None and run is not None:
        write_word(home / RUN, run)
        return home / RUN
    return None


def _is_there(directory: Path, checkpoint: Checkpoint) -> bool:
    """Whether a folder has the files of a trainer's checkpoint, by their checksums. Raises OSError."""
    copy = replace(checkpoint, path=directory / checkpoint.path.name)
    try:
        saved = Saved(copy.folder, None, {})
    except FileNotFoundError:
        return False
    return saved.layout == checkpoint.layout and {*saved.entries()} >= {*checkpoint.files}


def _parts_from(folder: AnyPath) -> Parts:
    """The bytes of the files of a checkpoint, verified."""
    if isinstance(folder, Path):
        return lambda file: parts_of(folder / file.name, file, reuse=False)
    return lambda file: _downloaded(folder / file.name, file)


def _downloaded(path: StorePath, file: FileEntry) -> Iterator[Buffer]:
    """Raises CorruptFileError if the bytes are not those that were saved."""
    crc = 0
    ends = iter(range(0, file.nbytes, PART_BYTES))
    asked: deque[Future[Buffer]] = deque()

    def ask() -> None:
        if (begin := next(ends, None)) is not None:
            end = min(begin + PART_BYTES, file.nbytes)
            asked.append(begun(partial(path.store.read, path.key, begin, end)))

    for _ in range(_IN_FLIGHT):
        ask()
    while asked:
        part = awaited(asked.popleft()).result()
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


def remove(place: AnyPath, checkpoint: Checkpoint) -> None:
    """Removes a checkpoint in a mirror, manifest first. Raises OSError."""
    tier: Tier = bucket_of(place) if isinstance(place, StorePath) else MountedFolder(place)
    tier.remove(checkpoint)


def pin(url: StorePath, step: int, pinned: bool) -> StorePath:
    """Makes every retention keep the checkpoint of ``step``, or not; returns its URL. Raises LoadError."""
    store, name = opened(str(url)), _chosen(url, scan(url)[0], step).path.name
    if pinned:
        store.create(f"{name}{PIN}", b"")
    else:
        store.remove([f"{name}{PIN}"])
    return url / name
