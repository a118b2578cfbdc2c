"""The ranks that save into one folder together: which ranks take part, and how they talk.

``join``: every rank gets a uuid and a generation from rank 0, through the store of torch.distributed, and proves that
it sees rank 0's folder. ``ballot``: one for each save (votes.py), on background threads. ``close``: this rank's sign of
life ends. Nothing here uses torch's process groups.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import distributed

from lazyckpt import private_names, waits
from lazyckpt.errors import ConfigError, SaveError, save_error
from lazyckpt.ranks.lookout import Lookout
from lazyckpt.ranks.pulse import Pulse, Watch
from lazyckpt.ranks.rendezvous import Rendezvous
from lazyckpt.ranks.rounds import NO_RANKS, Point, RankLost, Seat, StoreLost, exchange
from lazyckpt.ranks.store import Client, PollingClient, client_of, root_of, serves
from lazyckpt.ranks.votes import Ballot
from lazyckpt.storage import claim, hidden, locks, mounts, removal
from lazyckpt.storage.claim import FolderClaim
from lazyckpt.storage.shared import AttachedStaging, SharedFile, SharedFileStaging, SharedFolder, SharedStaging
from lazyckpt.warn import warn

_KEYS = "lazyckpt"


class WatchedStore:
    """The ``Store`` of the votes: the keys of the group, and a watch on the rank that a wait is for."""

    def __init__(self, client: Client, pulse: Pulse, rendezvous: Rendezvous) -> None:
        self._client, self._pulse, self._rendezvous = client, pulse, rendezvous

    def claim(self, key: str, value: bytes) -> bytes:
        return self._client.claim(f"{_KEYS}/{key}", value)

    def look(self, key: str) -> bytes | None:
        return self._client.look(f"{_KEYS}/{key}")

    def count(self, key: str) -> int:
        return self._client.count(f"{_KEYS}/{key}")

    def delete(self, key: str) -> None:
        self._client.delete(f"{_KEYS}/{key}")

    def release(self, key: str) -> None:
        self._client.release(f"{_KEYS}/{key}")

    def wait(
        self, key: str, *, rank: int, at: Point, unless: str | None = None, others: Mapping[int, str] = NO_RANKS
    ) -> bytes | None:
        reply = self._client.ask(f"{_KEYS}/{key}")
        watches = {other: Watch(self._pulse, other, at) for other in (rank, *others)}
        pause_s, longest_s = self._pulse.period_s, self._pulse.period_s
        if unless is not None or not self._pulse.complete:
            pause_s, longest_s = waits.OUTCOME_FIRST_LOOK_S, min(waits.OUTCOME_LAST_LOOK_S, longest_s)
        next_watch = time.monotonic()
        told = None
        try:
            while (told := reply.wait(pause_s)) is None:
                if unless is not None and self.look(unless) is not None:
                    return None
                if not self._pulse.complete:
                    self._rendezvous.look()
                if time.monotonic() >= next_watch:
                    for other, watch in list(watches.items()):
                        try:
                            watch.check()
                        except RankLost:
                            if other == rank or self.look(others[other]) is None:
                                raise
                            del watches[other]  # it has set its key
                    next_watch = time.monotonic() + self._pulse.period_s
                pause_s = min(2 * pause_s, longest_s)
            return told
        finally:
            if told is None:
                reply.abandon()


class RankGroup:
    """All ranks that save into one folder, as one of them sees them. ``join`` makes one on each rank; the ranks join in
    the same order."""

    def __init__(self, seat: Seat, mine: FolderClaim, lock: int, client: Client, pulse: Pulse) -> None:
        """``lock``: of rank 0, on the file that names ``mine``; see ``claim.take``."""
        self._seat = seat
        self._claim = mine
        self._client = client
        self._pulse = pulse
        self._previous: Ballot | None = None
        # Without a call of ``close``, this runs at exit: after the threads that save, if the group was joined before
        # them.
        self._leave = weakref.finalize(self, _leave, pulse, client, seat.directory, mine, lock)
        self._leave.atexit = False  # saves that are pending then still need the store
        self.rank = seat.rank
        self.world_size = seat.world_size
        self.generation = seat.generation
        self.directory = seat.directory
        self.timeout_s = pulse.timeout_s
        _groups.add(self)

    @classmethod
    def join(cls, directory: Path, *, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> RankGroup:
        """Call it on every rank; returns when all ranks have joined. Rank 0 makes the folder if it is missing,
        and removes what earlier generations of the job have left there. ``waiting`` is called while ranks are missing,
        and may raise; a warning names them.

        Raises ConfigError if the ranks do not see one folder, or if torch.distributed is not initialized; SaveError if
        rank 0 cannot write to it; RankError if a rank does not join."""
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError("several ranks: call torch.distributed.init_process_group() first")
        private_names.check("torch.distributed")
        shared = distributed.distributed_c10d._get_default_store()
        return join(shared, distributed.get_rank(), distributed.get_world_size(), directory, timeout_s, waiting)

    def ballot(self, ordinal: int, step: int | None, layout: str, target: Path, *, lone: bool = False) -> Ballot:
        """The vote on one save. ``ordinal`` counts the saves of this group from 1, also those that fail; ``layout`` is
        the description on which the ranks must agree; ``target`` is the final folder, on the file system of the group's
        folder. ``lone``: it is a lone file, which exists when rank 0 begins. Sends nothing."""
        self._previous = self._ballot(ordinal, step, layout, target, self._previous, lone)
        return self._previous

    def peek(self, ordinal: int, target: Path) -> Ballot:
        """Looks at the vote on a save in which this rank may not take part."""
        return self._ballot(ordinal, None, "", target, None)

    def _ballot(
        self, ordinal: int, step: int | None, layout: str, target: Path, previous: Ballot | None, lone: bool = False
    ) -> Ballot:
        def folder(name: str) -> SharedFolder:
            kind = SharedFile if lone else SharedFolder
            return kind(target, self.directory / name, self._claim, self._pulse.timeout_s)

        return Ballot(self._seat, ordinal, step, layout, target=target, folder=folder, previous=previous)

    def name_of(self, ordinal: int) -> str:
        """A name for a save, the same on all ranks, which no other save has."""
        return f"{self._seat.run}/{self.generation}/{ordinal}"

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

    def exchange(self, topic: str, value: bytes) -> list[bytes]:
        """Returns the values of all ranks, by rank. Every rank calls it, with the same topic, in the same order.

        Raises RankError, on all ranks, if one is lost or has another topic."""
        self._pulse.reached["exchange"] += 1
        return exchange(self._seat, self._pulse.reached["exchange"], topic, value)

    def lookout(self) -> Lookout:
        """For waits in collectives of torch, between the last exchange and the next one."""
        return Lookout(self._seat, self._pulse)

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
        self._leave()


_groups: weakref.WeakSet[RankGroup] = weakref.WeakSet()


def _disown() -> None:
    """Runs in a forked child, which has no part in the jobs of its parent: it must not wait for them, end them or speak
    for them."""
    for group in list(_groups):
        group._leave.detach()
        group._client.disown()


os.register_at_fork(after_in_child=_disown)


def _leave(pulse: Pulse, client: Client, directory: Path, mine: FolderClaim, lock: int) -> None:
    pulse.stop()
    if lock >= 0:
        claim.let_go(directory, mine, lock)
    client.close()


def join(
    store: Any,
    rank: int,
    world_size: int,
    directory: Path,
    timeout_s: float,
    waiting: Callable[[], None] = lambda: None,
) -> RankGroup:
    """``store`` is that of the default group. It belongs to training too, so nothing here waits in it."""
    shared = PollingClient(store)
    client = client_of(store, timeout_s)
    rendezvous = Rendezvous(directory, world_size, waits.ABSENT_TIMEOUTS * timeout_s, waiting)
    lock = -1
    before = claim.live_claim(directory) if rank == 0 else None
    try:
        begin = f"{_KEYS}/join/{shared.count(f'{_KEYS}/joined/{rank}')}"
        if rank == 0:
            told, lock = _found(client, shared, begin, directory, serves(root_of(store)))
        else:
            told = _awaited(shared, begin, timeout_s, rendezvous)
        if "error" in told:
            raise SaveError(f"rank 0 {told['error']}", path=directory, opening=True)
        run, generation = told["run"], told["generation"]
        pulse = Pulse(client, f"{_KEYS}/{run}/{generation}", rank, timeout_s)
        watched, server = WatchedStore(client, pulse, rendezvous), 0 if told["serves"] else None
        seat = Seat(run, generation, rank, world_size, watched, directory, server=server)
        pulse.start()
        # Rank 0 reports which others are missing; the others only check whether they wait in vain.
        rendezvous.missing = lambda: [r for r in range(world_size if rank == 0 else 0) if pulse.look(r) is None]
    except BaseException as error:
        locks.drop(lock)
        client.close()
        if isinstance(error, StoreLost):
            what = f"the store of torch.distributed is lost: {error}"
            raise SaveError(what, path=directory, opening=True) from error
        raise
    group = RankGroup(seat, FolderClaim(run, generation, told["host"]), lock, client, pulse)
    try:
        _check_same_folder(group, directory, told["directory"])
        if before is not None and before.run != run:
            warn(f"{directory} belonged to {before}, which still runs; its next save fails. Give each job a folder")
    except BaseException:
        group.close()
        raise
    pulse.complete = True
    if rank == 0:
        with contextlib.suppress(StoreLost):
            shared.delete(begin)
    return group


def _found(client: Client, shared: Client, begin: str, directory: Path, serves: bool) -> tuple[dict[str, Any], int]:
    """Rank 0: starts a new generation, in the folder and in the store. Returns its message to the others, and the lock
    of the claim."""
    # The store itself outlives a restart of the workers under torchrun; the prefix of ``shared`` does not.
    run = client.claim(f"{_KEYS}/run", uuid.uuid4().hex.encode()).decode()
    new = FolderClaim.here(run, client.count(f"{_KEYS}/generation"))
    told = {**vars(new), "directory": str(directory), "serves": serves}
    lock = -1
    try:
        hidden.make(directory)
        lock = claim.take(directory, new)
        removal.sweep(directory, new)
        shared.set(begin, json.dumps(told).encode())
    except BaseException as error:
        locks.drop(lock)
        if isinstance(error, OSError):
            shared.set(begin, json.dumps({"error": f"cannot write there: {error.strerror}"}).encode())
            raise save_error(error, path=directory, opening=True) from error
        raise
    return told, lock


def _awaited(shared: Client, begin: str, timeout_s: float, rendezvous: Rendezvous) -> dict[str, Any]:
    """Another rank: returns the message of rank 0."""
    end = time.monotonic() + waits.ABSENT_TIMEOUTS * timeout_s
    pause_s = waits.JOIN_FIRST_LOOK_S
    while (found := shared.look(begin)) is None:
        if time.monotonic() > end:
            waited_s = waits.ABSENT_TIMEOUTS * timeout_s
            raise ConfigError(f"rank 0 has not opened a Checkpointer for {waited_s:g} s. Does every rank open it?")
        rendezvous.look()
        waits.pause(pause_s)
        pause_s = min(2 * pause_s, waits.JOIN_LAST_LOOK_S)
    told: dict[str, Any] = json.loads(found)
    return told


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
