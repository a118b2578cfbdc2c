"""The calls of a Saver about its mirrors."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from lazyckpt import waits
from lazyckpt.config import Config
from lazyckpt.gate.gate import gate
from lazyckpt.pipeline.background import Background
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.sharded.crew import rank_here
from lazyckpt.pipeline.wait_bar import WaitBar
from lazyckpt.storage import paths
from lazyckpt.warn import warn

if TYPE_CHECKING:
    from lazyckpt.tiers.outgoing import Outgoing
    from lazyckpt.tiers.saved import SavedMirrors


class Mirroring:
    """The mirrors of a Saver, if it has some."""

    _background: Background
    _mirrors: SavedMirrors | None = None

    def _open_mirrors(self, config: Config, leaving: list[Callable[[], None]]) -> None:
        """Raises ConfigError. ``leaving``: actions for the end."""
        if not config.mirrors:
            return
        from lazyckpt.tiers.mirror import mirrors_of
        from lazyckpt.tiers.saved import SavedMirrors

        self._mirrors = SavedMirrors(mirrors_of(config.mirrors), uploads=rank_here() == 0)
        self._background.let_go = self._mirrors.let_go
        then = "a run that resumes from the newest checkpoint here uploads it"
        leaving.append(partial(close_mirrors, self._mirrors, then))
        finish_first(self, self.finish)

    def _mirrored(self, request: Request) -> Request:
        """Has the mirrors take this save, once it is durable."""
        if self._mirrors is not None:
            request.arrivals = arrivals = self._mirrors.expect(request)
            request.then = partial(self._mirrors.published, arrivals)
        return request

    def mirror(self, handle: SaveHandle) -> None:
        """For the trainers: has the mirrors take a durable folder that was held back (``StagedFolder.save``)."""
        if handle.arrivals is not None:
            handle.arrivals.go()

    def resumed(self, path: str | os.PathLike[str], step: int | None = None) -> None:
        """Tell that training goes on from the file or folder ``path``, which was saved with a Saver. Mirrors that lack
        it get it, and take later saves as of the same run. Of a link, that is what it leads to. Does nothing without
        mirrors."""
        if self._mirrors is None:
            return
        local = paths.local(path)
        if local.is_symlink():
            local = local.resolve()
        try:
            self._mirrors.resumed(local, step)
        except OSError as error:
            warn(f"{local} does not go to the mirrors: {error.strerror}")

    def keep_mirrored(self, names: Iterable[str]) -> None:
        """For the trainers: retention of the mirrors leaves the files and folders of these names, such as the best
        checkpoint. Call it before they are saved."""
        if self._mirrors is not None:
            self._mirrors.keep(names)

    @property
    def finish(self) -> Callable[[], object]:
        """For Checkpointer: waits until everything is durable, also when the Saver is gone."""
        return self._background.finish

    @property
    def mirror_lag_s(self) -> float:
        """How long the oldest checkpoint that a mirror does not have yet has been durable here; 0.0 if they have all
        that they take."""
        return 0.0 if self._mirrors is None else self._mirrors.lag_s


def at_the_end(owner: object) -> list[Callable[[], None]]:
    """A list for actions that run when ``owner`` is gone, or at exit."""
    actions: list[Callable[[], None]] = []
    weakref.finalize(owner, call, actions)
    return actions


def finish_first(owner: object, finish: Callable[[], object]) -> None:
    """If ``owner`` is forgotten, calls ``finish`` before the actions of ``at_the_end``: mirrors get saves in flight."""
    weakref.finalize(owner, _finish, finish, os.getpid()).atexit = False


def _finish(finish: Callable[[], object], process: int) -> None:
    if os.getpid() == process and not gate.is_held():  # a collection may run anywhere
        finish()


def call(actions: list[Callable[[], None]]) -> None:
    """Calls each, the last one first, once."""
    while actions:
        actions.pop()()


def close_mirrors(mirrors: Outgoing, then: str) -> None:
    """Waits until the mirrors have what they take; warns of those that fail, and says what happens ``then``. Shows how
    far they are."""
    with WaitBar() as bar:
        while (behind := mirrors.waiting()) and not mirrors.failing():
            where, progress = behind[0]
            bar.show(f"uploading to {where}", lambda: progress)  # noqa: B023
            time.sleep(waits.HANDLE_LOOK_S)
    if lacking := mirrors.close():
        warn(f"not all checkpoints are in {', '.join(lacking)}; {then}")
