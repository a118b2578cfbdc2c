"""The statistics of interleaved pairs: medians, spread, ratios pair by pair."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence


def rounds(arms: Sequence[str], number: int) -> Iterator[list[str]]:
    """The order of the arms in each round: shuffled, so that none always comes behind the same other; the same in
    every run."""
    shuffler = random.Random(0)
    for _ in range(number):
        yield shuffler.sample(arms, len(arms))


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
