"""The ranks that save into one folder together: which ranks take part, and how they talk.

``join``: the ranks meet (meeting.py), and each proves that it sees rank 0's folder. ``ballot``: one for each save
(votes.py), on background threads. ``close``: this rank's sign of life ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed

from lazyckpt import waits
from lazyckpt.errors import ConfigError, RankError, SaveError, save_error
from lazyckpt.ranks.board import Board, SharedSave
from lazyckpt.ranks.meeting import KEYS, Ranks, default_store
from lazyckpt.ranks.pulse import Pulse
from lazyckpt.ranks.rounds import RankLost, Seat, StoreLost
from lazyckpt.ranks.store import Client
from lazyckpt.ranks.votes import Ballot
from lazyckpt.storage import claim, hidden, mounts, removal
from lazyckpt.storage.claim import FolderClaim
from lazyckpt.storage.shared import AttachedStaging, SharedFile, SharedFileStaging, SharedFolder, SharedStaging
from lazyckpt.warn import warn

_TOGETHER = (
    "All ranks save and restore sharded state together: each tracks its DTensors in a Checkpointer and makes the same "
    "calls, or calls stage(all_ranks=True)"
)


class RankGroup(Ranks):
    """All ranks that save into one folder. ``join`` makes one on each rank; the ranks join in the same order."""

    _claim: FolderClaim

    def __init__(self, seat: Seat, client: Client, pulse: Pulse) -> None:
        super().__init__(seat, client, pulse)
        self.directory = seat.directory
        self.generation = seat.generation
        self._previous: Ballot | None = None

    @classmethod
    def join(cls, directory: Path, *, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> RankGroup:
        """Call it on every rank; returns when all ranks have joined. Rank 0 makes the folder if it is missing,
        and removes what earlier generations of the job have left there. ``waiting`` is called while ranks are missing,
        and may raise; a warning names them.

        Raises ConfigError if the ranks do not see one folder, or if torch.distributed is not initialized; SaveError if
        rank 0 cannot write to it; RankError if a rank does not join."""
        store = default_store()
        return join(store, distributed.get_rank(), distributed.get_world_size(), directory, timeout_s, waiting)

    def take_folder(self) -> None:
        """Rank 0 makes and claims the folder. Not before all ranks have met: if it has slept and the job has started
        again meanwhile, the others never come, and the folder stays with the newer start."""
        told: dict[str, Any] = {}
        failure: OSError | None = None
        if self.rank == 0:
            try:
                told = self._take()
            except OSError as error:
                failure, told = error, {"error": f"cannot write there: {error.strerror}"}
        told = json.loads(self.exchange("the folder", json.dumps(told).encode())[0])
        if failure is not None:
            raise save_error(failure, path=self.directory, opening=True) from failure
        if "error" in told:
            raise SaveError(f"rank 0 {told['error']}", path=self.directory, opening=True)
        self._claim = FolderClaim(**told["claim"])
        _check_same_folder(self, self.directory, told["directory"])

    def _take(self) -> dict[str, Any]:
        mine = FolderClaim.here(self._seat.run, self.generation)
        hidden.make(self.directory)
        lock = claim.take(self.directory, mine)
        self._leaving.append(partial(claim.let_go, self.directory, mine, lock))
        removal.sweep(self.directory, mine)
        return {"claim": asdict(mine), "directory": str(self.directory)}

    def ballot(
        self,
        ordinal: int,
        step: int | None,
        layout: str,
        target: Path,
        *,
        lone: bool = False,
        latest: Path | None = None,
    ) -> Ballot:
        """The vote on one save. ``ordinal`` counts the saves of this group from 1, also those that fail; ``layout`` is
        the description on which the ranks must agree; ``target`` is the final folder, on the file system of the group's
        folder. ``lone``: it is a lone file, which exists when rank 0 begins. ``latest``: as in ``Request``. Sends
        nothing."""
        self._previous = self._ballot(ordinal, step, layout, target, self._previous, lone, latest)
        return self._previous

    def peek(self, ordinal: int, target: Path) -> Ballot:
        """Looks at the vote on a save in which this rank may not take part."""
        return self._ballot(ordinal, None, "", target, None)

    def _ballot(
        self,
        ordinal: int,
        step: int | None,
        layout: str,
        target: Path,
        previous: Ballot | None,
        lone: bool = False,
        latest: Path | None = None,
    ) -> Ballot:
        def folder(name: str) -> SharedFolder:
            kind = SharedFile if lone else SharedFolder
            return kind(target, self.directory / name, self._claim, self._pulse.timeout_s, latest)

        return Ballot(self._seat, ordinal, step, layout, target=target, folder=folder, previous=previous)

    def name_of(self, ordinal: int) -> str:
        """A name for a save, the same on all ranks, which no other save has."""
        return f"{self._seat.run}/{self.generation}/{ordinal}"

    def shared(self, ordinal: int) -> SharedSave:
        """A save, for what the ranks do about it when it is committed. Sends nothing."""
        board = Board(self._client, f"{KEYS}/{self._seat.run}/{self.generation}", self._pulse)
        return SharedSave(board, self.rank, self.name_of(ordinal))

    def reach(self, ordinal: int) -> None:
        """Tells the others that this rank saves its part, so that they wait for as long as it lives. Before that they
        give it up after ``ABSENT_TIMEOUTS``: it may hang in training, or in ``save()``."""
        self._pulse.reached["save"] = max(self._pulse.reached["save"], ordinal)

    def stage(self, target: Path, *, keep_others: bool = False, lone: bool = False) -> SharedStaging:
        """Rank 0: makes the staged folder of a checkpoint, or of a ``lone`` file, in the group's folder. Raises
        OSError, also where the kernel could not give it its final name."""
        if mounts.is_fixed(target):
            what = "several ranks cannot replace it (a mount point, the working folder); save into a folder below it"
            raise OSError(errno.EBUSY, what, str(target))
        if not mounts.on_one_mount(self.directory, target.parent):
            raise OSError(errno.EXDEV, f"it is staged in {self.directory}, on another mount", str(target))
        inside = None if target.parent == self.directory else self.directory
        staging = SharedFileStaging if lone else SharedStaging
        return staging(target, self._claim, inside, keep_others=keep_others)

    def attach(self, target: Path, name: str) -> AttachedStaging:
        """Other ranks: finds the staged folder by its name."""
        return AttachedStaging(target, self.directory / name)

    def lost_rank(self, path: Path) -> RankError | None:
        """Returns the error, for ``path``, of the rank whose loss made a collective of torch fail. Waits until that
        rank has been silent for ``rank_timeout_s``. None if all live."""
        try:
            self.lookout().search()
        except RankLost as lost:
            return RankError(lost.why, rank=lost.rank, path=path)
        except StoreLost as error:
            aborted = self._seat.without_store(error)
            return RankError(aborted.why, rank=aborted.rank, path=path)
        return None

    def check_claim(self) -> None:
        """Raises SaveError if another job has taken the folder. Call it before removing something there."""
        try:
            found = claim.other_claim(self.directory, self._claim)
        except OSError as error:
            raise save_error(error, path=self.directory) from error
        if found is not None:
            raise SaveError(f"the folder belongs to {found} now", path=self.directory)

    def close(self) -> None:
        """Call it when all saves of this rank are settled.

        Rank 0 gives the others a few seconds to read the outcome of the last save. Without it they look into the
        folder. Otherwise this waits for no rank."""
        last = self._previous
        with contextlib.suppress(StoreLost):
            end = time.monotonic() + min(waits.FAREWELL_S, self._pulse.timeout_s)
            while self.rank == 0 and last is not None and not last.forgotten() and time.monotonic() < end:
                time.sleep(waits.FAREWELL_LOOK_S)
        super().close()


def join(
    store: Any,
    rank: int,
    world_size: int,
    directory: Path,
    timeout_s: float,
    waiting: Callable[[], None] = lambda: None,
) -> RankGroup:
    """``store`` is that of the default group."""
    before = claim.live_claim(directory) if rank == 0 else None
    group = RankGroup.meet(store, rank, world_size, directory, timeout_s, waiting=waiting, together=_TOGETHER)
    try:
        group.take_folder()
        if before is not None and before.run != group._claim.run:
            warn(f"{directory} belonged to {before}, which still runs; its next save fails. Give each job a folder")
    except BaseException:
        group.close()
        raise
    return group


def _check_same_folder(group: RankGroup, directory: Path, theirs: str) -> None:
    """Raises ConfigError, on all ranks, unless every rank finds in its folder the claim of rank 0."""
    other = _other_claim(directory, group._claim)
    kind = mounts.file_system(directory)[0] if directory.exists() else "no"
    answers = group.exchange("one folder", json.dumps([other, os.uname().nodename, str(directory), kind]).encode())
    for rank, (found, host, path, on) in enumerate(map(json.loads, answers)):
        if found is None:
            continue
        if rank == 0:
            raise ConfigError(f"{theirs} belongs to {found} now, which has just opened it; a folder serves one job")
        raise ConfigError(
            f"rank {rank} ({path} on {host}, {on} file system) does not see the folder of rank 0 ({theirs}), but one "
            f"that belongs to {found}: several ranks save into one folder, on a file system that all nodes share"
        )


def _other_claim(directory: Path, mine: FolderClaim) -> str | None:
    """Returns None if the folder belongs to ``mine``, else names its owner. Gives a network file system time to show
    it."""
    end = time.monotonic() + (0 if claim.is_local(directory) else waits.STALE_NAME_S)
    while True:
        try:
            found = claim.other_claim(directory, mine)
        except OSError as error:
            found = f"an unknown job (cannot read {claim.CLAIM}: {error.strerror})"
        if found is None or time.monotonic() > end:
            return found
        time.sleep(waits.OWNER_LOOK_S)
        with contextlib.suppress(OSError):
            os.listdir(directory)  # looks again for names that were missing
