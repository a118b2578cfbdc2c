"""Chooses the number of iterations between checkpoints: fixed, or derived from a limit of their cost.

``AutoInterval`` measures the cost of a checkpoint with a clock that it reads once per iteration. The cost is the time
inside ``save()``, plus the time by which iterations slow down until the checkpoint is durable. That includes waits at
the gate, and the cores and memory that copies take. It excludes a validation during these iterations, since a
checkpoint slows training down only until it is durable.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import mean, median
from typing import Literal

from lazyckpt.errors import ConfigError
from lazyckpt.metrics import CheckpointMetrics

_WARM_UP = 3  # first iterations, which are slow and not measured
_UNDISTURBED = 5  # iterations without a checkpoint to compare with, at least
_REMEMBERED = 50  # and at most
_CHECKPOINTS = 3  # last checkpoints whose costs count, since machine and training change


class FixedInterval:
    """Saves at every multiple of ``every`` steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def due(self, step: int, in_flight: bool) -> bool:
        return step % self.every == 0

    def saved(self, metrics: CheckpointMetrics) -> None:
        pass


class AutoInterval:
    """Finds the shortest interval that keeps the overhead within ``max_overhead``, again after every checkpoint.

    ``clock`` returns seconds. Call it from the training thread.
    """

    def __init__(self, max_overhead: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.every = _WARM_UP + _UNDISTURBED
        self._max_overhead = max_overhead
        self._clock = clock
        self._before: float | None = None  # when the current iteration began
        self._iterations = 0  # since the last checkpoint
        self._undisturbed: deque[float] = deque(maxlen=_REMEMBERED)  # seconds
        self._disturbed: list[float] | None = None  # seconds, until the last checkpoint is durable
        self._in_save = 0.0  # seconds in the last save()
        self._metrics = CheckpointMetrics()  # of that save
        self._costs: deque[float] = deque(maxlen=_CHECKPOINTS)
        self._learned = 0  # checkpoints measured
        self._warm_up = _WARM_UP

    def due(self, step: int, in_flight: bool) -> bool:
        """Ends an iteration; returns whether to save. ``in_flight``: whether a checkpoint is not durable yet."""
        now = self._clock()
        before, self._before = self._before, now
        self._iterations += 1
        if before is not None:
            self._measure(now - before, in_flight)
        if self._iterations < self.every or self._disturbed is not None or in_flight:
            return False
        self._before = now
        return True

    def saved(self, metrics: CheckpointMetrics) -> None:
        """Notes the end of a ``save()`` that was called right after ``due``. ``metrics`` are those of its handle."""
        assert self._before is not None
        self._metrics = metrics
        now = self._clock()
        self._in_save, self._before = now - self._before, now
        self._disturbed = []
        self._iterations = 0

    def _measure(self, seconds: float, in_flight: bool) -> None:
        if self._disturbed is not None:
            self._disturbed.append(seconds)
            if not in_flight:
                self._learn(self._disturbed)
                self._disturbed = None
        elif self._warm_up > 0:
            self._warm_up -= 1
        elif not in_flight:
            self._undisturbed.append(seconds)

    def _learn(self, disturbed: list[float]) -> None:
        usual = median(self._undisturbed)
        longer = max(sum(disturbed) - usual * len(disturbed), 0.0)
        cost = self._in_save + min(longer, self._metrics.durable_s)
        self._learned += 1
        if self._learned == 2:
            self._costs.clear()  # the first save pickles and copies everything, and makes the ring
        self._costs.append(cost)
        # Leave some iterations without a checkpoint to compare with.
        at_least = len(disturbed) + _UNDISTURBED
        self.every = max(math.ceil(mean(self._costs) / (self._max_overhead * usual)), at_least)


def interval(save_every: int | Literal["auto"], max_overhead: float) -> FixedInterval | AutoInterval:
    """Makes the interval that the knobs ask for. Raises ConfigError if they make no sense."""
    if isinstance(max_overhead, bool) or not isinstance(max_overhead, int | float) or not 0 < max_overhead < 1:
        raise ConfigError(f"max_overhead={max_overhead!r}: expected a part of the training time, as in 0.02 for 2 %")
    if save_every == "auto":
        return AutoInterval(max_overhead)
    if isinstance(save_every, bool) or not isinstance(save_every, int) or save_every < 1:
        raise ConfigError(f'save_every={save_every!r}: expected "auto" or a number of steps, at least 1')
    return FixedInterval(save_every)
