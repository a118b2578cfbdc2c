"""The mirrors of one Saver, and so of a trainer: they get the files and folders that it saves, by name."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from lazyckpt.errors import ConfigError, MirrorError
from lazyckpt.ranks.board import SharedSave
from lazyckpt.tiers.arrival import Arrivals
from lazyckpt.tiers.described import Saved, number_in
from lazyckpt.tiers.helper import Helper
from lazyckpt.tiers.mirror import Mirror
from lazyckpt.tiers.mirrors import check_apart, tier_of
from lazyckpt.tiers.outgoing import Outgoing
from lazyckpt.tiers.pending import reason
from lazyckpt.tiers.uploads import Uploads
from lazyckpt.tiers.words import claimed, home_of, run_of
from lazyckpt.warn import warn_in_background


class Durable(Protocol):
    """A save that is durable, as the pipeline knows it."""

    path: Path
    step: int | None
    crcs: dict[str, int]  # of each file that the engine wrote
    writers: Mapping[str, Sequence[int]]  # the ranks that wrote each, if it is not rank 0

    @property
    def shared(self) -> SharedSave | None:
        """What several ranks know of a save that they make together."""


class SavedMirrors(Outgoing):
    """Each gets ``runs/a/checkpoint-500`` as its own ``checkpoint-500``."""

    def __init__(self, mirrors: tuple[Mirror, ...], *, uploads: bool) -> None:
        """Opens no connection. ``uploads``: whether this process does; of several ranks, rank 0 does. Raises
        ConfigError."""
        super().__init__()
        self._mirrors = mirrors
        for mirror in mirrors:
            if mirror.model is not None:
                raise ConfigError(f"Mirror({mirror}): model={mirror.model!r} is for the Checkpointer that tracks it")
            tier_of(mirror)  # raises ConfigError
        self._does_upload = uploads
        self._changing = threading.Lock()
        self._run = ""
        self._parents: dict[str, Path] = {}  # of what was saved, by name
        self._kept: frozenset[str] = frozenset()
        self._removals: dict[Path, Callable[[], None]] = {}  # of paths that uploads still need

    def expect(self, request: Durable) -> Arrivals:
        """Call it before a save, whose handle keeps what this returns."""
        arrivals = Arrivals()
        if not self._does_upload and request.shared is None:
            arrivals.refused = MirrorError("rank 0 uploads for all ranks; wait there", mirror=self._names)
        return arrivals

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._mirrors))

    # the background that publishes

    def published(self, arrivals: Arrivals, request: Durable) -> None:
        """Takes a file or folder that is durable now. With ``arrivals.is_held_back`` it waits for ``arrivals.go``. Of
        several ranks that have saved it each uploads its files, when rank 0 does."""
        path, shared = request.path, request.shared
        step = number_in(path.name) if request.step is None else request.step
        if shared is not None and shared.rank != 0:
            self._begin(arrivals, path, step, lambda: self._help(path, step, shared))
        if not self._does_upload:
            return
        try:
            saved = Saved(path, step, request.crcs, request.writers)
        except OSError as error:
            arrivals.begin([self._refused(f"{error.strerror}: {path}", step)])
            return
        arrivals.go = lambda: self._begin(arrivals, path, step, lambda: self._add(saved, shared))
        if not arrivals.is_held_back:
            arrivals.go()

    def _begin(
        self, arrivals: Arrivals, path: Path, step: int | None, begin: Callable[[], Sequence[Future[None]]]
    ) -> None:
        """Calls ``begin``, whose failure is none of the save: that is durable."""
        try:
            futures = begin()
        except Exception as error:  # such as no thread
            warn_in_background(f"{path} is not uploaded: {reason(error)}")
            futures = [self._refused(reason(error), step)]
        arrivals.begin(futures)

    def _refused(self, why: str, step: int | None) -> Future[None]:
        refused: Future[None] = Future()
        refused.set_exception(MirrorError(why, mirror=self._names, step=step))
        return refused

    def _help(self, path: Path, step: int | None, shared: SharedSave) -> list[Future[None]]:
        helping = [helper for helper in self._helping() if step is None or helper.mirror.takes(step)]
        return [helper.add(path, step, shared) for helper in helping]

    def _helping(self) -> list[Helper]:
        """The uploads of a rank other than 0."""
        with self._changing:
            if not self._helpers:
                self._helpers = [
                    Helper(mirror, tier_of(mirror), f"mirror/{number}") for number, mirror in enumerate(self._mirrors)
                ]
            return self._helpers

    def resumed(self, path: Path, step: int | None) -> None:
        """Notes that the run goes on from a file or folder of its own: a mirror that lacks it gets it. Raises
        OSError."""
        if self._does_upload:
            with self._changing:
                self._run = self._run or run_of(home_of(path.parent)) or ""
            saved = Saved(path, number_in(path.name) if step is None else step, {})
            self._begin(Arrivals(), path, saved.step, lambda: self._add(saved, resumed=True))

    def keep(self, names: Iterable[str]) -> None:
        """Retention leaves these, and those that were told last: the new ones may not be there yet."""
        with self._changing:
            before, self._kept = self._kept, frozenset(names)
            for uploads in self._leads:
                uploads.kept = self._kept | before

    def _add(self, saved: Saved, shared: SharedSave | None = None, *, resumed: bool = False) -> list[Future[None]]:
        """``resumed``: only mirrors from which a run resumes take it."""
        with self._changing:
            known = self._parents.setdefault(saved.path.name, saved.path.parent)
            if (why := self._refusal(saved, known)) is None:
                self._open(home_of(saved.path.parent))
                takers = [u for u in self._leads if saved.step is None or u.mirror.takes(saved.step)]
                takers = [u for u in takers if not resumed or u.mirror.what == "all"]
        if why is None:
            return [uploads.add(saved.path, saved.step, saved, shared) for uploads in takers]
        warn_in_background(str(MirrorError(why, mirror=self._names, step=saved.step)))
        return [self._refused(why, saved.step)]

    def _open(self, home: Path) -> None:
        """Starts the threads that are not there yet. Raises RuntimeError if the system refuses one."""
        for number, mirror in list(enumerate(self._mirrors))[len(self._leads) :]:
            tier = tier_of(mirror, home)
            self._leads.append(Uploads(mirror, tier, self._run_of, freed=self.freed, topic=f"mirror/{number}"))
            self._leads[-1].kept = self._kept

    def _refusal(self, saved: Saved, parent: Path) -> str | None:
        """Why it cannot go to the mirrors."""
        if parent != saved.path.parent:
            return f"{saved.path} is not uploaded: it has the name of {parent / saved.path.name}, which is there"
        try:
            check_apart(self._mirrors, parent)
        except ConfigError as error:
            return str(error)
        return None

    def _run_of(self, path: Path) -> str:
        """The id of the run, which its folder keeps. Raises OSError."""
        with self._changing:
            self._run = claimed(home_of(path.parent), self._run or uuid.uuid4().hex)
            return self._run

    # removals

    def let_go(self, path: Path, remove: Callable[[], None]) -> None:
        """Calls ``remove`` once the mirrors do not need ``path`` here: now, or later from another thread."""
        with self._changing:
            self._removals[path] = remove
        for uploads in list(self._leads):
            uploads.let_go(path)
        self.freed()

    def freed(self) -> None:
        """Removes what waited for uploads that are over."""
        with self._changing:
            held = self.holds()
            ready = [self._removals.pop(path) for path in list(self._removals) if path not in held]
        for remove in ready:
            remove()
