"""What the engines do between the ranks: when they plan and commit, and how often they talk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

STORE_CALLS = ("add", "append", "check", "compare_set", "delete_key", "get", "multi_get", "multi_set", "set", "wait")


@dataclass(frozen=True)
class Phase:
    """Of one save on one rank; moments are on the clock of the machine, which its processes share."""

    plan_s: float
    files_at: float  # this rank's files were durable
    committed_at: float  # this rank knew that the checkpoint was


class Phases:
    """The saves of this process, in the order in which they were committed; and of lazy ones, the share of their bytes
    that was copied inside of save()."""

    def __init__(self) -> None:
        self.eager: list[float] = []
        self._saves: list[Phase] = []
        self._plan_s = 0.0

    def add(self, phase: Phase) -> None:
        self._saves.append(phase)

    def take(self) -> tuple[list[Phase], list[float]]:
        """The saves since the last call, and their eager shares."""
        taken = self._saves, self.eager
        self._saves, self.eager = [], []
        return taken

    @contextmanager
    def of_dcp(self) -> Iterator[None]:
        """Notes the saves of torch.distributed.checkpoint too, with any storage writer, on whatever thread they run."""
        with ExitStack() as stack:
            for name, instead in (("reduce_scatter", self._plan), ("all_reduce", self._write)):
                method = partial(instead, getattr(_DistWrapper, name))
                stack.enter_context(mock.patch.object(_DistWrapper, name, lambda *told, method=method: method(*told)))
            yield

    def _plan(self, original: Callable[..., Any], *told: Any) -> Any:
        begin = time.perf_counter()
        plan = original(*told)
        self._plan_s = time.perf_counter() - begin
        return plan

    def _write(self, original: Callable[..., Any], wrapper: Any, step: str, write: Any, finish: Any) -> Any:
        files_at = 0.0

        def written() -> Any:
            nonlocal files_at
            result = write()
            files_at = time.perf_counter()
            return result

        metadata = original(wrapper, step, written, finish)
        self.add(Phase(self._plan_s, files_at, time.perf_counter()))
        return metadata


class Traffic:
    """Counts what this process says to other ranks: collectives of all its process groups, and calls of a store.

    Engines take turns, and one may talk while it is not its turn (a sign of life). A connection to a store belongs to
    the engine in whose turn it was first used. Out of turn its calls do not count. All use the default store.
    """

    def __init__(self) -> None:
        self.turn = ""
        self._store_calls = 0
        self._owners: dict[int, tuple[Any, str]] = {}
        self._default = dist.distributed_c10d._get_default_store()

    def count(self) -> tuple[int, int]:
        """Collectives and calls of a store until now; those of child processes are not among them."""
        groups: Iterable[Any] = dist.distributed_c10d._world.pg_map
        return sum(group._get_sequence_number_for_group() for group in groups), self._store_calls

    @contextmanager
    def of_stores(self) -> Iterator[None]:
        """Counts calls of a store in Python; process groups use theirs only when they connect."""
        with ExitStack() as stack:
            for name in STORE_CALLS:
                if hasattr(dist.Store, name):
                    stack.enter_context(mock.patch.object(dist.Store, name, self._counting(getattr(dist.Store, name))))
            yield

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(store: Any, *told: Any, **named: Any) -> Any:
            _, owner = self._owners.setdefault(id(store), (store, self.turn))
            if owner == self.turn or store is self._default:
                self._store_calls += 1
            return call(store, *told, **named)

        return counted
