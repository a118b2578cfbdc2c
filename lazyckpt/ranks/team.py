"""The ranks that restore together: all take the same checkpoint, or none does."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import distributed

from lazyckpt.errors import ConfigError, LazyCkptError, LoadError, ReadError, RestoreError
from lazyckpt.ranks.lookout import Lookout

Answer = TypeVar("Answer")


class Team:
    """A process that restores by itself."""

    rank = 0
    world_size = 1

    def follow(self, act: Callable[[], Answer]) -> Answer:
        """Lets rank 0 act, and returns its answer, or raises its error, on every rank."""
        return act()

    def agree(self, act: Callable[[], Answer]) -> Answer:
        """Lets every rank act. If one raises, all do: its own error, or that of the first other rank, by name."""
        return act()

    def gather(self, act: Callable[[], Answer]) -> list[Answer]:
        """As ``agree``; returns the answers of all ranks."""
        return [act()]

    def compare(self, call: str) -> None:
        """Raises ConfigError on every rank unless all make the same call."""


ALONE = Team()


class Exchange(Protocol):
    """What a ``GroupTeam`` needs of a rank group (ranks/group.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def exchange(self, topic: str, value: bytes) -> list[bytes]:
        """Returns the values of all ranks. Raises RankError if a rank does not answer in time."""

    def lookout(self) -> Lookout:
        """For waits in collectives of torch, before the next exchange."""


class GroupTeam(Team):
    """The ranks of a group. All of them restore at the same time, as all of them save."""

    def __init__(self, group: Exchange) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._rounds = itertools.count()

    def follow(self, act: Callable[[], Answer]) -> Answer:
        value, error = self._outcome(act) if self.rank == 0 else (None, None)
        (answer, others), *_ = self._exchange((value, error))
        if error is not None:
            raise error
        if others is not None:
            raise _of_rank(0, others)
        return answer  # type: ignore[no-any-return]

    def agree(self, act: Callable[[], Answer]) -> Answer:
        value, error = self._outcome(act)
        self._tell(None, error)
        return value  # type: ignore[return-value]

    def gather(self, act: Callable[[], Answer]) -> list[Answer]:
        return self._tell(*self._outcome(act))

    def lookout(self) -> Lookout:
        return self._group.lookout()

    def compare(self, call: str) -> None:
        calls = [others for others, _ in self._exchange((call, None))]
        for rank, others in enumerate(calls):
            if others != calls[0]:
                raise ConfigError(f"rank 0 calls {calls[0]}, rank {rank} calls {others}: all ranks restore the same")

    def _tell(self, value: Any, error: Exception | None) -> list[Any]:
        """Returns the values of all ranks. If one has an error, raises it: this rank's own, or that of the first."""
        answers = self._exchange((value, error))
        if error is not None:
            raise error
        for rank, (_, others) in enumerate(answers):
            if others is not None:
                raise _of_rank(rank, others)
        return [value for value, _ in answers]

    def _exchange(self, value: Any) -> list[Any]:
        try:
            data = pickle.dumps(value)
        except Exception:  # the error refers to an object that cannot be pickled
            data = pickle.dumps((None, RestoreError(f"{type(value[1]).__name__}: {value[1]}")))
        topic = f"restore/{next(self._rounds)}"
        return [pickle.loads(answer) for answer in self._group.exchange(topic, data)]

    def _outcome(self, act: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
        try:
            return act(), None
        except Exception as error:
            return None, error
        except BaseException as interrupt:  # the others would wait for this rank
            self.lookout().leave(interrupt)
            raise


def _of_rank(rank: int, error: Exception) -> LazyCkptError:
    """The error of another rank, of the same class, so that this rank skips the same damaged checkpoint."""
    if isinstance(error, ReadError):
        return ReadError(f"rank {rank}: {error.what}", path=error.path, errno=error.errno)
    if isinstance(error, LoadError):
        return type(error)(f"rank {rank}: {error.what}", path=error.path)
    return RestoreError(f"rank {rank}: {error}")


def has_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
