"""Computes how often to save, and the disk and ring that this takes, by the formulas of papers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lazyckpt.config import Config
from lazyckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What ``advise`` found. Times are seconds, sizes bytes, intervals iterations, costs parts of the training time.

    Attributes:
        state_bytes: As given, like ``iteration_s``, ``write_bytes_per_s`` and ``cost_s``.
        hide_bytes_per_s: The write rate at which each iteration's checkpoint is written during the next forward and
            backward (FastPersist, equation 1).
        write_s: Time to write one checkpoint; a failure in it falls back to the checkpoint before.
        disk_every: The shortest interval at which the disk keeps up.
        overhead_every: The shortest interval that keeps the overhead within ``max_overhead`` (CheckFreq).
        failure_every: The interval at which checkpoints and failures together cost least (Young, corrected by Daly);
            None if ``failure_s`` was not given.
        every: The interval to use: the largest of these three.
        overhead: The cost of checkpoints at that interval.
        redo_s: GPU-seconds of work that a failure repeats on average (FastPersist, equation 2).
        loss: The cost of checkpoints and repeated work together; None if ``failure_s`` was not given.
        ring_bytes: The ``host_buffer_bytes`` at which every copy ends before the next optimizer step.
    """

    state_bytes: int
    iteration_s: float
    write_bytes_per_s: float
    cost_s: float
    hide_bytes_per_s: float
    write_s: float
    disk_every: int
    overhead_every: int
    failure_every: int | None
    every: int
    overhead: float
    redo_s: float
    loss: float | None
    ring_bytes: int

    @property
    def hidden(self) -> bool:
        """Whether the disk is fast enough for a checkpoint of every iteration."""
        return self.write_bytes_per_s >= self.hide_bytes_per_s


def advise(
    *,
    state_bytes: int,
    iteration_s: float,
    write_bytes_per_s: float,
    optimizer_s: float = 0.0,
    cost_s: float = 0.0,
    max_overhead: float = 0.02,
    failure_s: float | None = None,
    gpus: int = 1,
    chunk_bytes: int = Config.chunk_bytes,
) -> Advice:
    """Computes how often to save, and with what ring.

    Args:
        state_bytes: Size of one checkpoint.
        iteration_s: Duration of one iteration without a checkpoint.
        write_bytes_per_s: The write rate of the disk: ``bytes / write_s`` of CheckpointMetrics.
        optimizer_s: Duration of the optimizer's step in an iteration.
        cost_s: Training time lost to one checkpoint: ``blocked_s``, and the time by which iterations slow down.
        max_overhead: The part of the training time that checkpoints may cost.
        failure_s: Mean time between failures of the whole job.
        gpus: Number of GPUs of the job.
        chunk_bytes: As in Config.

    Raises:
        ConfigError: If a number makes no sense.
    """
    _check(above_zero=True, state_bytes=state_bytes, iteration_s=iteration_s, write_bytes_per_s=write_bytes_per_s)
    _check(above_zero=True, max_overhead=max_overhead, gpus=gpus, chunk_bytes=chunk_bytes, failure_s=failure_s)
    _check(above_zero=False, optimizer_s=optimizer_s, cost_s=cost_s)
    if optimizer_s >= iteration_s:
        raise ConfigError(f"optimizer_s={optimizer_s}: expected a part of an iteration, which takes {iteration_s} s")
    if max_overhead >= 1:
        raise ConfigError(f"max_overhead={max_overhead}: expected a part of the training time, as in 0.02 for 2 %")

    overlap_s = iteration_s - optimizer_s  # forward and backward
    write_s = state_bytes / write_bytes_per_s
    disk_every = _iterations(write_s / iteration_s)
    overhead_every = _iterations(cost_s / (max_overhead * iteration_s))
    failure_every = None if failure_s is None else _iterations(optimal_interval_s(cost_s, failure_s) / iteration_s)
    every = max(disk_every, overhead_every, failure_every or 1)
    overhead = cost_s / (every * iteration_s)
    # A failure repeats half an interval on average (Young), and here also the time to write the checkpoint.
    lost_s = every * iteration_s / 2 + write_s
    not_written = max(state_bytes - write_bytes_per_s * overlap_s, 0.0)
    ring_chunks = min(math.ceil(not_written / chunk_bytes), math.ceil(state_bytes / chunk_bytes)) + 2
    return Advice(
        state_bytes=state_bytes,
        iteration_s=iteration_s,
        write_bytes_per_s=write_bytes_per_s,
        cost_s=cost_s,
        hide_bytes_per_s=state_bytes / overlap_s,
        write_s=write_s,
        disk_every=disk_every,
        overhead_every=overhead_every,
        failure_every=failure_every,
        every=every,
        overhead=overhead,
        redo_s=every / 2 * gpus * iteration_s,
        loss=None if failure_s is None else overhead + lost_s / failure_s,
        ring_bytes=ring_chunks * chunk_bytes,
    )


def optimal_interval_s(cost_s: float, failure_s: float) -> float:
    """Returns the time between checkpoints that wastes least (Daly 2006, equation 37; its first term is Young's)."""
    if cost_s >= 2 * failure_s:
        return failure_s
    ratio = cost_s / (2 * failure_s)
    return math.sqrt(2 * cost_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def _iterations(number: float) -> int:
    return max(math.ceil(number - 1e-9), 1)


def _check(*, above_zero: bool, **numbers: float | None) -> None:
    for name, value in numbers.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and (not number or value < 0 or (value == 0 and above_zero)):
            raise ConfigError(f"{name}={value!r}: expected a number {'above 0' if above_zero else 'of at least 0'}")
