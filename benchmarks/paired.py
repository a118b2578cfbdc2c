"""The statistics of interleaved pairs: medians, spread, ratios pair by pair."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

Progress = Callable[[str], None]  # called with a line about the current measurement
Value = TypeVar("Value")


def rounds(arms: Sequence[str], number: int) -> Iterator[list[str]]:
    """The order of the arms in each round: shuffled, so that none always comes behind the same other; the same in
    every run."""
    shuffler = random.Random(0)
    for _ in range(number):
        yield shuffler.sample(arms, len(arms))


class Countdown:
    """Adds the progress to each of `total` announcements, and how long the rest will take at the pace so far."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._start = time.perf_counter()

    def __call__(self, text: str) -> None:
        elapsed = time.perf_counter() - self._start
        left = f", {elapsed / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        self._done += 1
        self._progress(f"{self._done}/{self._total}{left}: {text}")


def interleaved(
    arms: Mapping[str, Callable[[], Value]],
    number: int,
    progress: Progress,
    *,
    prepare: Callable[[], object] = lambda: None,
    warm_up: int = 1,
) -> tuple[dict[str, list[Value]], dict[str, str]]:
    """What each arm returned in each of `number` rounds, by its name; and why arms failed, which are then out.

    The arms take turns in every round, in shuffled order; `prepare` is called before each. `warm_up` rounds more are
    run first, and dropped.
    """
    values: dict[str, list[Value]] = {name: [] for name in arms}
    failures: dict[str, str] = {}
    tell = Countdown(progress, len(arms) * (number + warm_up))
    for turn, names in enumerate(rounds(list(arms), number + warm_up)):
        for name in names:
            tell(name)
            if name in failures:
                continue
            prepare()
            try:
                value = arms[name]()
            except Exception as error:
                failures[name] = reason(error)
                continue
            if turn >= warm_up:
                values[name].append(value)
    return values, failures


class ArmFailed(RuntimeError):
    """The message is a reason, from another process."""


def reason(error: BaseException) -> str:
    """In one line, the last: peers with a child process put its whole traceback into the message."""
    if isinstance(error, ArmFailed):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[-1].strip()


def ratios(values: Sequence[float], over: Sequence[float]) -> list[float]:
    """Pair by pair; a pair one arm has not reached is left out."""
    return [value / other for value, other in zip(values, over, strict=False)]


def differences(values: Sequence[float], from_: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, from_, strict=False)]


def median(values: Sequence[float]) -> float:
    """NaN if there are none."""
    return statistics.median(values) if values else float("nan")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (smallest..largest)`."""
    if not values:
        return "-"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def worse(values: Sequence[float], than: Sequence[float]) -> str:
    """In how many pairs a value that should be small is the larger one: `5/7`."""
    pairs = list(zip(values, than, strict=False))
    return f"{sum(value > other for value, other in pairs)}/{len(pairs)}"
