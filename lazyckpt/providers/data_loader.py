"""A DataLoader whose place in the epoch can be saved.

A DataLoader keeps neither its iterator nor its position, and its order comes from the draws of ``iter()``
and of the first ``next()``. So the state is *where the epoch's randomness began* and *how many batches were
handed out*, and the way back is to begin the epoch again from there and to drop that many batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from lazyckpt.errors import ConfigError, RestoreError
from lazyckpt.providers.rng import capture_rng, check_rng, restore_rng
from lazyckpt.warn import warn

_START_KEYS = {"generators", "epochs", "rng", "workers_alive"}
_FIRST = "first"  # beside them after begin(): the global generators before the first batch


def track_loader(loader: Any) -> Any:
    """Returns an iterable to use instead of ``loader``, with ``state_dict()`` and ``load_state_dict()``.

    A loader that has both methods itself (such as torchdata's StatefulDataLoader) comes back untouched, any
    other as a ``TrackedLoader``. Raises ``ConfigError`` for an iterator: it cannot begin again.
    """
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return loader
    if hasattr(loader, "__next__") or not hasattr(loader, "__iter__"):
        raise ConfigError(
            f"track_loader() needs a DataLoader, not a {type(loader).__name__}: an epoch must be repeatable. "
            "Pass the loader itself, not iter(loader)."
        )
    return TrackedLoader(loader)


@dataclass
class _Epoch:
    """One pass over the loader. Only the newest iterator counts in the current epoch."""

    number: int = 0
    start: dict[str, Any] | None = None  # the randomness it began from; None before its first batch and after its end
    yielded: int = 0


class _BuiltOtherwise(ValueError):
    """Says how the loader differs from the saved one."""


class TrackedLoader:
    """Iterates a DataLoader and knows its position; every other attribute is the loader's own.

    After ``load_state_dict`` the next ``iter()`` continues the saved epoch: its remaining batches, and all random
    numbers drawn from then on, are those of the run that was not interrupted. The batches already consumed are fetched
    again and dropped. Any other ``iter()`` begins a new epoch: at its first ``next()``, so that everything the loader
    draws to begin comes from one recorded state. After a ``break`` the position stays until a new ``iter()``.

    ``epoch`` and ``batch`` tell the position, so this loop resumes where it was, also at the end of an epoch:

        for epoch in range(loader.epoch, epochs):
            loader.set_epoch(epoch)  # for samplers that need it, such as DistributedSampler
            for batch in loader:
                ...

    A resumed run cannot repeat two kinds of random numbers, because they do not follow from the epoch's beginning:
    those that *persistent* workers draw after their first epoch; and those that a sampler, or an IterableDataset
    without workers, draws from the *global* generators to choose later batches. Give these a generator or a seed of
    their own.

    Not thread-safe, like the DataLoader itself.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch = _Epoch()
        self._resuming = False
        self._workers_lived = False  # where the position is from, which is between two epochs

    def wraps(self, loader: Any) -> bool:
        """Whether this iterates ``loader``, or is it."""
        return loader is self._loader or loader is self

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0. It counts up when an epoch ends, and when a new ``iter()``
        gives one up."""
        return self._epoch.number

    @property
    def batch(self) -> int:
        """How many batches of this epoch were handed out."""
        return self._epoch.yielded

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch that begins next, and tells it to the loader, its samplers and its dataset, as
        far as they have ``set_epoch``.

        In the epoch that was restored, this changes nothing. Another number there gives up the restored position, with
        a warning.
        """
        if self._resuming and epoch != self.epoch:
            warn(
                f"set_epoch({epoch}) gives up the restored position, batch {self.batch} of epoch {self.epoch}; to "
                "resume there, begin with range(loader.epoch, …)"
            )
            self._resuming = False
        if not self._resuming and self._epoch.start is None:
            self._epoch.number = epoch  # also that of an iterator that has handed out nothing yet
        elif not self._resuming:
            self._epoch = _Epoch(epoch)
        for part in (*self._parts(), getattr(self._loader, "dataset", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if not self._resuming:
            given_up = self._epoch.start is not None
            self._epoch = _Epoch(self._epoch.number + given_up)
        self._resuming = False
        return self._batches(self._epoch)

    def begin(self) -> Iterator[Any]:
        """As ``iter()``, but a new epoch begins now, as it does in the loader itself, and not with its first batch.

        For trainers that draw random numbers between the two: these numbers do not become part of the epoch.
        """
        if self._resuming:
            return iter(self)
        iter(self)  # gives up an epoch that has begun
        epoch = self._epoch
        epoch.start = self._capture_start()
        return self._hand_out(epoch, iter(self._loader), begun=True)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up special methods, also before __init__ has run. The loader's would make the copy a
        # plain loader, which has no position.
        if name == "_loader" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """The position, as tensors and plain objects: the number of this epoch (``epoch``), the batches handed out in
        it (``yielded``), the randomness that it began from (``start``; None between epochs), the present state of the
        loader's and its samplers' own generators, and their epochs (``now``), and how the loader was ``built``."""
        epoch = self._epoch
        position = {"epoch": epoch.number, "yielded": epoch.yielded, "start": epoch.start}
        now = {**self._capture_own(), "workers_alive": self._workers_alive}
        return {**position, "now": now, "built": self._built()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` at the next ``iter()``. Earlier iterators no longer count.

        The global generators are left alone: restoring these is ``restore_rng``'s part, before or after.
        Raises ``RestoreError`` for a state that is malformed or of a differently built loader.
        """
        self.check(state)
        with self._misfits():
            self._restore_own(state["now"])
        self._epoch = _Epoch(int(state.get("epoch", 0)), state["start"], int(state["yielded"]))
        self._resuming = self._epoch.start is not None
        self._workers_lived = not self._resuming and bool(state["now"].get("workers_alive"))
        if not self._resuming and (changes := self._changes(state)):
            warn(f"the loader was built otherwise when it was saved: {changes}; the next epoch begins with the new one")

    def check(self, state: Any) -> None:
        """Raise what ``load_state_dict`` would raise, and change nothing. Reads no contents of tensors."""
        with self._misfits():
            yielded, start = int(state["yielded"]), state["start"]
            int(state.get("epoch", 0))
            if start is not None:
                if changes := self._changes(state):
                    raise _BuiltOtherwise(changes)
                if start.keys() - {_FIRST} != _START_KEYS:
                    raise ValueError(f"its start has {sorted(start)} instead of {sorted(_START_KEYS)}")
                check_rng(start["rng"])
                check_rng(start.get(_FIRST, start["rng"]))
                if yielded < 0:
                    raise ValueError(f"{yielded} batches had been consumed")
                if self._has_exact_length() and yielded > (here := len(self._loader)):
                    raise ValueError(f"{yielded} batches of the epoch had been consumed, this loader has only {here}")
            parts = self._parts()
            for own in [state["now"]] + [start] * (start is not None):
                for generator, value in zip(_generators(parts), own["generators"], strict=True):
                    if (there := tuple(generator.get_state().shape)) != (saved := tuple(value.shape)):
                        raise ValueError(f"a generator's state has shape {saved} instead of {there}")
                for _, epoch in zip(_with_epoch(parts), own["epochs"], strict=True):
                    int(epoch)

    def _built(self) -> dict[str, Any]:
        loader = self._loader
        inner = getattr(loader, "batch_sampler", None)
        size = getattr(inner if inner is not None else loader, "batch_size", None)
        return {
            "batch size": size if isinstance(size, int) else None,
            "batches of an epoch": len(loader) if self._has_exact_length() else None,
            "sampler": type(getattr(inner, "sampler", None) or getattr(loader, "sampler", None)).__name__,
        }

    def _changes(self, state: dict[str, Any]) -> str:
        """Says how the loader differs from the saved one; "" if it does not."""
        was, here = state.get("built", {}), self._built()
        differing = [name for name in here if was.get(name, here[name]) != here[name]]
        return ", ".join(f"{name}: {was[name]} then, {here[name]} now" for name in differing)

    def _has_exact_length(self) -> bool:
        """Whether every epoch has the loader's length. A sampler of the user's may return an estimate."""
        of_torch = all(type(part).__module__.startswith("torch.utils.data.") for part in self._parts())
        return of_torch and not isinstance(self._loader.dataset, torch.utils.data.IterableDataset)

    @contextlib.contextmanager
    def _misfits(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            why = str(error) if isinstance(error, _BuiltOtherwise) else f"{type(error).__name__}: {error}"
            raise RestoreError(
                f"the saved position does not fit this {type(self._loader).__name__} ({why}). Build it as in the run "
                "that saved it, with the same samplers and generators, or leave it out: restore(loader=False)."
            ) from error

    def _batches(self, epoch: _Epoch) -> Iterator[Any]:
        if epoch.start is None:
            epoch.start = self._capture_start()
            batches = iter(self._loader)
        else:
            batches = self._replay(epoch.start, epoch.yielded)
        yield from self._hand_out(epoch, batches)

    def _capture_start(self) -> dict[str, Any]:
        if self._workers_lived and not self._workers_alive:
            rng = capture_rng()
            iter(self._loader)  # persistent workers draw their seed when they start
            restore_rng(rng)
        self._workers_lived = False
        return {**self._capture_own(), "rng": capture_rng(), "workers_alive": self._workers_alive}

    @staticmethod
    def _hand_out(epoch: _Epoch, batches: Iterator[Any], *, begun: bool = False) -> Iterator[Any]:
        if begun and epoch.start is not None:
            epoch.start[_FIRST] = capture_rng()
        for batch in batches:
            epoch.yielded += 1
            yield batch
        epoch.number, epoch.start, epoch.yielded = epoch.number + 1, None, 0

    def _replay(self, start: dict[str, Any], count: int) -> Iterator[Any]:
        """Returns the loader's iterator as it was ``count`` batches after ``start``."""
        over = self._has_exact_length() and count == len(self._loader)
        # A RandomSampler with a generator draws once more from it when it ends, and that decides over later epochs.
        if over and not self._loader.persistent_workers and not _generators(self._parts()):
            return iter(())  # nothing of the epoch has to be fetched again
        own, rng = self._capture_own(), capture_rng()
        try:
            # Persistent workers draw their seed when they start, so only in their first epoch.
            if start["workers_alive"] and not self._workers_alive:
                iter(self._loader)
            elif self._workers_alive and not start["workers_alive"]:
                self._loader._iterator = None
            self._restore_own(start)
            restore_rng(start["rng"])
            batches: Iterator[Any] = iter(self._loader)
            if count and _FIRST in start:
                restore_rng(start[_FIRST])
            replayed = sum(1 for _ in islice(batches, count))
        finally:
            self._restore_own(own)
            restore_rng(rng)
        if replayed < count:
            raise RestoreError(
                f"{count} batches of this epoch had been consumed when it was saved, but the loader has only "
                f"{replayed}: data or batch size have changed. Restore with the same, or leave the loader out: "
                "restore(loader=False)."
            )
        return batches

    @property
    def _workers_alive(self) -> bool:
        """Whether persistent workers wait for the next epoch; DataLoader keeps an iterator only then."""
        return getattr(self._loader, "_iterator", None) is not None

    def _capture_own(self) -> dict[str, Any]:
        parts = self._parts()
        return {
            "generators": [generator.get_state() for generator in _generators(parts)],
            "epochs": [part.epoch for part in _with_epoch(parts)],
        }

    def _restore_own(self, state: dict[str, Any]) -> None:
        parts = self._parts()
        for generator, value in zip(_generators(parts), state["generators"], strict=True):
            generator.set_state(value.cpu())
        for part, epoch in zip(_with_epoch(parts), state["epochs"], strict=True):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            else:
                part.epoch = epoch

    def _parts(self) -> list[Any]:
        """The loader and the samplers below it, always in the same order."""
        parts = [self._loader]
        for part in parts:
            below = (getattr(part, name, None) for name in ("sampler", "batch_sampler"))
            parts += [p for p in below if p is not None and all(p is not known for known in parts)]
        return parts


def _generators(parts: list[Any]) -> list[torch.Generator]:
    found = (getattr(part, "generator", None) for part in parts)
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _with_epoch(parts: list[Any]) -> list[Any]:
    return [part for part in parts if isinstance(getattr(part, "epoch", None), int)]
