"""All ranks of a job, as one of them sees them: they exchange values, and watch each other's signs of life.

``Ranks.meet``: every rank gets a uuid and a generation from rank 0, through the store of torch.distributed. Nothing
here uses torch's process groups or touches a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed

from lazyckpt import private_names, waits
from lazyckpt.errors import ConfigError, LoadError, RankError, SaveError
from lazyckpt.ranks.lookout import Lookout
from lazyckpt.ranks.pulse import Pulse, Watch
from lazyckpt.ranks.rendezvous import Rendezvous
from lazyckpt.ranks.rounds import NO_RANKS, Point, RankLost, Seat, StoreLost, exchange
from lazyckpt.ranks.store import Client, PollingClient, client_of, root_of, serves
from lazyckpt.ranks.team import ALONE, GroupTeam, Team, has_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

KEYS = "lazyckpt"
_TOGETHER = "All ranks call load(…, all_ranks=True) together"


class WatchedStore:
    """The ``Store`` of the votes: the keys of the job, and a watch on the rank that a wait is for."""

    def __init__(self, client: Client, pulse: Pulse, rendezvous: Rendezvous) -> None:
        self._client, self._pulse, self._rendezvous = client, pulse, rendezvous

    def claim(self, key: str, value: bytes) -> bytes:
        return self._client.claim(f"{KEYS}/{key}", value)

    def look(self, key: str) -> bytes | None:
        return self._client.look(f"{KEYS}/{key}")

    def count(self, key: str) -> int:
        return self._client.count(f"{KEYS}/{key}")

    def delete(self, key: str) -> None:
        self._client.delete(f"{KEYS}/{key}")

    def release(self, key: str) -> None:
        self._client.release(f"{KEYS}/{key}")

    def wait(
        self, key: str, *, rank: int, at: Point, unless: str | None = None, others: Mapping[int, str] = NO_RANKS
    ) -> bytes | None:
        reply = self._client.ask(f"{KEYS}/{key}")
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


class Ranks:
    """All ranks of the job, as one of them sees them. ``meet`` makes one on each rank."""

    def __init__(self, seat: Seat, client: Client, pulse: Pulse) -> None:
        self._seat, self._client, self._pulse = seat, client, pulse
        self._leaving: list[Callable[[], object]] = []  # called once this rank gives no sign of life any more
        # Without a call of ``close``, this runs at exit: after the threads that save, if the ranks met before them.
        self._leave = weakref.finalize(self, _leave, pulse, client, self._leaving)
        self._leave.atexit = False  # saves that are pending then still need the store
        self.rank = seat.rank
        self.world_size = seat.world_size
        self.timeout_s = pulse.timeout_s
        _alive.add(self)

    @classmethod
    def meet(
        cls,
        store: Any,
        rank: int,
        world_size: int,
        path: Path,
        timeout_s: float,
        *,
        waiting: Callable[[], None] = lambda: None,
        together: str,
    ) -> Self:
        """Every rank calls it, in the same order; returns when all have. ``path`` and ``together``: what they meet for,
        and what all of them have to do, for messages. ``store``: of the default group.

        ``waiting`` is called while ranks are missing, and may raise; a warning names them. Raises SaveError if the
        store is lost, ConfigError if rank 0 does not come, RankError if another does not, and errors of ``waiting``."""
        shared = PollingClient(store)  # belongs to training too, so nothing here waits in it
        client = client_of(store, timeout_s)
        rendezvous = Rendezvous(path, world_size, waits.ABSENT_TIMEOUTS * timeout_s, waiting, together)
        try:
            begin = f"{KEYS}/join/{shared.count(f'{KEYS}/joined/{rank}')}"
            if rank == 0:
                told = _lead(client, shared, begin, serves(root_of(store)))
            else:
                told = _awaited(shared, begin, timeout_s, rendezvous)
            run, generation = told["run"], told["generation"]
            pulse = Pulse(client, f"{KEYS}/{run}/{generation}", rank, timeout_s)
            watched, server = WatchedStore(client, pulse, rendezvous), 0 if told["serves"] else None
            seat = Seat(run, generation, rank, world_size, watched, path, server=server)
            pulse.start()
        except BaseException as error:
            client.close()
            if isinstance(error, StoreLost):
                what = f"the store of torch.distributed is lost: {error}"
                raise SaveError(what, path=path, opening=True) from error
            raise
        # Rank 0 reports which others are missing; the others only check whether they wait in vain.
        rendezvous.missing = lambda: [r for r in range(world_size if rank == 0 else 0) if pulse.look(r) is None]
        ranks = cls(seat, client, pulse)
        try:
            ranks.exchange("a meeting", b"")
        except BaseException:
            ranks.close()
            raise
        pulse.complete = True
        if rank == 0:
            with contextlib.suppress(StoreLost):
                shared.delete(begin)
        return ranks

    def exchange(self, topic: str, value: bytes) -> list[bytes]:
        """Returns the values of all ranks, by rank. Every rank calls it, with the same topic, in the same order.

        Raises RankError, on all ranks, if one is lost or has another topic."""
        self._pulse.reached["exchange"] += 1
        return exchange(self._seat, self._pulse.reached["exchange"], topic, value)

    def lookout(self) -> Lookout:
        """For waits in collectives of torch, between the last exchange and the next one."""
        return Lookout(self._seat, self._pulse)

    def close(self) -> None:
        self._leave()


_alive: weakref.WeakSet[Ranks] = weakref.WeakSet()


def _disown() -> None:
    """Runs in a forked child, which has no part in the jobs of its parent: it must not wait for them, end them or speak
    for them."""
    for ranks in list(_alive):
        ranks._leave.detach()
        ranks._client.disown()


os.register_at_fork(after_in_child=_disown)


def _leave(pulse: Pulse, client: Client, leaving: list[Callable[[], object]]) -> None:
    pulse.stop()
    for leave in leaving:
        leave()
    client.close()


@contextlib.contextmanager
def all_ranks_at(path: str | os.PathLike[str], timeout_s: float) -> Iterator[Team]:
    """All ranks of torch.distributed, while they load one file. A process without others is alone.

    Raises LoadError if the store is lost, ConfigError if a rank does not load or loads another file, and RankError."""
    if not has_ranks():
        yield ALONE
        return
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    try:
        ranks = Ranks.meet(default_store(), rank, world_size, Path(path), timeout_s, together=_TOGETHER)
    except RankError:
        raise
    except SaveError as error:
        raise LoadError(error.what, path=path) from error
    with contextlib.closing(ranks):
        team = GroupTeam(ranks)
        team.compare(f"load({os.fspath(path)!r})")
        yield team


def default_store() -> Any:
    """The store of the default process group. Raises ConfigError if there is none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError("several ranks: call torch.distributed.init_process_group() first")
    private_names.check("torch.distributed")
    return distributed.distributed_c10d._get_default_store()


def _lead(client: Client, shared: Client, begin: str, serves: bool) -> dict[str, Any]:
    """Rank 0: starts a new generation. Returns its message to the others."""
    # The store itself outlives a restart of the workers under torchrun; the prefix of ``shared`` does not.
    run = client.claim(f"{KEYS}/run", uuid.uuid4().hex.encode()).decode()
    told = {"run": run, "generation": client.count(f"{KEYS}/generation"), "serves": serves}
    shared.set(begin, json.dumps(told).encode())
    return told


def _awaited(shared: Client, begin: str, timeout_s: float, rendezvous: Rendezvous) -> dict[str, Any]:
    """Another rank: returns the message of rank 0."""
    end = time.monotonic() + waits.ABSENT_TIMEOUTS * timeout_s
    pause_s = waits.JOIN_FIRST_LOOK_S
    while (found := shared.look(begin)) is None:
        if time.monotonic() > end:
            waited_s = waits.ABSENT_TIMEOUTS * timeout_s
            raise ConfigError(f"{rendezvous.path}: rank 0 not there after {waited_s:g} s. {rendezvous.together}")
        rendezvous.look()
        waits.pause(pause_s)
        pause_s = min(2 * pause_s, waits.JOIN_LAST_LOOK_S)
    told: dict[str, Any] = json.loads(found)
    return told
