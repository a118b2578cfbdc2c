"""The mirrors of one run: the checkpoints on their way there, and what of them ``restore()`` can take."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

from lazyckpt.errors import ConfigError, LoadError, MirrorError, ReadError
from lazyckpt.ranks.board import SharedSave
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.stores.urls import hub_repository, is_url, opened
from lazyckpt.tiers import in_use
from lazyckpt.tiers.arrival import Arrivals
from lazyckpt.tiers.bucket import Bucket
from lazyckpt.tiers.helper import Helper
from lazyckpt.tiers.listings import Listing, listings
from lazyckpt.tiers.mirror import Mirror
from lazyckpt.tiers.mounted import MountedFolder
from lazyckpt.tiers.outgoing import Outgoing
from lazyckpt.tiers.pending import newest_due
from lazyckpt.tiers.publishing import Models, Publications
from lazyckpt.tiers.tier import Tier
from lazyckpt.tiers.uploads import Uploads
from lazyckpt.tiers.words import RUN, claimed, run_of, write_word
from lazyckpt.warn import warn, warn_in_background


class Mirrors(Outgoing):
    """Those of the run in the folder ``directory``."""

    def __init__(self, given: Iterable[Mirror], directory: Path, models: Models | None = None) -> None:
        """``models``: makes what goes to mirrors of weights. Opens no connection. Raises ConfigError."""
        super().__init__()
        self._directory = directory
        self._mirrors = tuple(given)
        check_apart(self._mirrors, directory)
        self._models = models
        self._late: list[tuple[Uploads, Checkpoint]] = []  # publications that wait until the module is tracked
        tiers = {mirror: tier_of(mirror, self._directory) for mirror in self._mirrors}
        self._readers = {mirror: tier for mirror, tier in tiers.items() if mirror.what == "all"}
        self.highest = 0  # sequence of a checkpoint that was found there
        self._naming = threading.Lock()

    def start(self, known: list[Checkpoint]) -> None:
        """Begins to upload. ``known``, the newest first: the checkpoints so far, of which a killed process may not have
        uploaded the newest."""
        if known:
            with contextlib.suppress(OSError):  # the uploads try again, and warn
                self._own_run()
        for uploads in self._leading():
            if (missing := newest_due(known, uploads.mirror)) is not None:
                self._late.append((uploads, missing))
        self._begin_late([uploads for uploads in self._leads if uploads.mirror.what == "all"])

    def _begin_late(self, to: Sequence[Uploads] | None = None) -> None:
        """Begins what a killed process may not have uploaded ``to`` these; None: to all, once a module is tracked."""
        if to is None and (self._models is None or not self._models.is_ready()):
            return
        late, self._late = self._late, []
        for uploads, missing in late:
            if to is None or uploads in to:
                uploads.add(Path(missing.path), missing.step)
            else:
                self._late.append((uploads, missing))

    def _leading(self) -> list[Uploads]:
        """The uploads of a process that saves alone, or of rank 0."""
        for number in range(len(self._leads), len(self._mirrors)):
            mirror, topic = self._mirrors[number], f"mirror/{number}"
            self._leads.append(self._uploads_to(mirror, topic))
        return self._leads

    def _uploads_to(self, mirror: Mirror, topic: str) -> Uploads:
        tier, run = tier_of(mirror, self._directory), lambda _: self._own_run()
        if mirror.what == "all":
            return Uploads(mirror, tier, run, found=self.found, topic=topic)
        assert self._models is not None
        return Publications(mirror, tier, run, self._models, topic=topic)

    def _helping(self) -> list[Helper]:
        """The uploads of a rank that is not rank 0."""
        for number in range(len(self._helpers), len(self._mirrors)):
            mirror = self._mirrors[number]
            self._helpers.append(Helper(mirror, tier_of(mirror, self._directory), f"mirror/{number}"))
        return self._helpers

    def _own_run(self) -> str:
        """The id of this run. A folder gets one with its first checkpoint: restored from a mirror before that, it is a
        place of the run there."""
        with self._naming:
            return claimed(self._directory, uuid.uuid4().hex)

    # the background that commits

    def committed(self, path: Path, step: int, arrivals: Arrivals | None, save: SharedSave | None = None) -> None:
        """Takes a checkpoint that is durable now. ``arrivals``: what ``expect`` returned for it. ``save``: if several
        ranks have saved it; then each uploads its files."""
        try:
            if save is None or save.rank == 0:
                taking = [uploads for uploads in self._leading() if uploads.mirror.takes(step)]
                futures = [uploads.add(path, step, save=save) for uploads in taking]
            else:
                helping = [helper for helper in self._helping() if helper.mirror.takes(step)]
                futures = [helper.add(path, step, save) for helper in helping]
        except RuntimeError as error:  # no thread; the checkpoint is committed all the same
            warn_in_background(f"{path} is not uploaded by this rank: {error}")
            futures = [_refused(mirror, step, str(error)) for mirror in self._mirrors if mirror.takes(step)]
        if arrivals is not None:
            arrivals.begin(futures)

    # the thread that saves

    def found(self, sequence: int) -> None:
        """Notes that a checkpoint of this number is in a mirror: the next ones are numbered above it."""
        self.highest = max(self.highest, sequence)

    def expect(self) -> Arrivals:
        """Call it before a checkpoint is saved; its handle keeps what this returns."""
        self._begin_late()
        return Arrivals()

    def holds(self) -> set[Path]:
        return super().holds() | {Path(missing.path) for _, missing in self._late}

    def close(self) -> list[str]:
        self._begin_late()
        return super().close()

    # restore

    def located(self, path: str | os.PathLike[str]) -> AnyPath | None:
        """The place of a URL below one of the mirrors, with the mirror's options; None for others."""
        return below(self._mirrors, path)

    def owns(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint lies in one of the mirrors."""
        parent = str(checkpoint.path.parent)
        return any(parent == str(mirror) for mirror in self._readers)

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Makes the folder one of the run whose checkpoint was restored from a mirror, unless it is one. Warns if that
        fails."""
        try:
            if run_of(self._directory) is not None:
                return
            for mirror, tier in self._readers.items():
                if str(checkpoint.path.parent) == str(mirror) and (run := tier.run()) is not None:
                    write_word(self._directory / RUN, run)
                    if not is_url(str(mirror)):
                        in_use.remember(Path(str(mirror)), self._directory)
        except (OSError, LoadError) as error:
            warn(f"{self._directory} could not be made a folder of the run in {checkpoint.path.parent}: {error}")

    def listings(self, local: list[Checkpoint], suffice: Callable[[Iterable[Checkpoint]], bool] = any) -> list[Listing]:
        """As ``listings.listings``; ``local``: the checkpoints in the folder of the run."""
        self._begin_late()
        asked = dict(self._readers)
        answered: list[Mirror] = []
        try:
            found = listings(asked, self._directory, local, suffice)
            answered = [listing.mirror for listing in found if listing.unread is None]
        finally:  # one thread at a time asks a tier, and some may go on
            self._readers |= {mirror: tier_of(mirror, self._directory) for mirror in asked if mirror not in answered}
        self.found(max((checkpoint.sequence for listing in found for checkpoint in listing.found), default=0))
        return found


def _refused(mirror: Mirror, step: int, why: str) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(MirrorError(why, mirror=str(mirror), step=step))
    return future


class TieredCatalog(Catalog):
    """The checkpoints of a folder and of its mirrors."""

    def __init__(self, local: Catalog, mirrors: Mirrors) -> None:
        super().__init__(local.root)
        self._local = local
        self._mirrors = mirrors
        self.damaged = local.damaged

    def scan(self) -> list[Checkpoint]:
        """As ``Catalog.scan``; of equal checkpoints, the one in the folder first. A mirror that cannot be read is a
        warning if there is another checkpoint. Raises ReadError if there is none: it may hold some."""
        found = self._local.scan()
        self.broken = list(self._local.broken)
        self.unread = []
        for listing in self._mirrors.listings(list(found)):
            if listing.unread is not None:
                self.unread.append(listing.unread)
                warn(f"mirror {listing.mirror} is passed over: {listing.unread.what}")
            found += listing.found
            self.broken += listing.broken
        if not found:
            for unread in self.unread:
                raise ReadError(f"{unread.what}; it may hold the newest checkpoint", path=unread.path, errno=errno.EIO)
            return []
        chosen = self._chosen_by_rollback(max(c.sequence for c in found))
        return sorted(found, key=lambda c: (c.sequence <= chosen, c.sequence), reverse=True)

    def folder_of(self, step: int) -> AnyPath | None:
        """The folder of this step in a mirror. Raises ReadError if none that can be read has it: another may."""

        def has_it(known: Iterable[Checkpoint]) -> bool:
            return any(checkpoint.step == step for checkpoint in known)

        there = self._mirrors.listings(self._local.scan(), has_it)
        for checkpoint in (checkpoint for listing in there for checkpoint in listing.found):
            if checkpoint.step == step:
                return checkpoint.path
        for unread in (listing.unread for listing in there if listing.unread is not None):
            raise ReadError(f"{unread.what}; it may hold step {step}", path=unread.path, errno=errno.EIO)
        return None


def below(mirrors: Iterable[Mirror], path: str | os.PathLike[str]) -> AnyPath | None:
    """The place of a URL below one of the mirrors, with the mirror's options; None for others."""
    for mirror in mirrors:
        if mirror.what == "all" and is_url(place := str(mirror)) and str(path).startswith(f"{place}/"):
            return StorePath(opened(place, mirror.options), str(path).removeprefix(f"{place}/"))
    return None


def check_apart(mirrors: Sequence[Mirror], directory: Path) -> None:
    """Raises ConfigError if two of these places are one."""
    known = {directory.resolve(): "the folder of the run itself"}
    for mirror in mirrors:
        if is_url(str(mirror)):
            continue
        place = Path(str(mirror)).resolve()
        if place in known:
            raise ConfigError(f"mirrors: {mirror} is {known[place]}")
        known[place] = "there twice"


def tier_of(mirror: Mirror, directory: Path | None = None) -> Tier:
    """``directory``: the folder of the run. Opens no connection. Raises ConfigError."""
    place = str(mirror)
    if (repository := hub_repository(place)) is not None:
        from lazyckpt.tiers.hub import Hub

        return Hub(repository, mirror.options)
    return Bucket(opened(place, mirror.options)) if is_url(place) else MountedFolder(Path(place), directory)
