"""How often to save, and what that takes: the papers' formulas on measured numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lazyckpt.config import Config
from lazyckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What ``advise`` found. Times are seconds, sizes bytes, intervals iterations."""

    state_bytes: int
    iteration_s: float
    write_bytes_per_s: float
    cost_s: float

    hide_bytes_per_s: float
    """Write at least so fast, and a checkpoint of every iteration is written during the next forward and backward:
    FastPersist, equation 1."""

    write_s: float
    """Writing one checkpoint takes so long; a failure in that time falls back to the one before."""

    disk_every: int
    """Saving more often, the disk does not keep up: a checkpoint would wait for the one before."""

    overhead_every: int
    """Saving more often costs more than the overhead allowed: CheckFreq's bound."""

    failure_every: int | None
    """Loses least to checkpoints and failures together, if both cost time: Young, with Daly's correction. None if the
    rate of failures was not told."""

    every: int
    """Save so often: the largest of these three."""

    overhead: float
    """The part of the training time that saving so often costs."""

    redo_s: float
    """GPU-seconds of work that a failure repeats on average: FastPersist, equation 2."""

    loss: float | None
    """The part of the training time that checkpoints and repeated work cost together. None if the rate of failures was
    not told."""

    ring_bytes: int
    """``host_buffer_bytes`` that lets every copy end before the next optimizer step."""

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
    """How often to save, and with what ring.

    ``iteration_s``: one iteration without a checkpoint, of which ``optimizer_s`` is the optimizer's step.
    ``write_bytes_per_s``: ``bytes / write_s`` of CheckpointMetrics. ``cost_s``: what one checkpoint costs the training:
    ``blocked_s``, and what iterations take longer meanwhile. ``failure_s``: the mean time between failures of the whole
    job, on ``gpus`` GPUs. ``max_overhead``: the part of the training time that checkpoints may cost.

    Raises ConfigError for a number that makes no sense.
    """
    _check("state_bytes", state_bytes)
    _check("iteration_s", iteration_s)
    _check("write_bytes_per_s", write_bytes_per_s)
    _check("optimizer_s", optimizer_s, zero=True)
    _check("cost_s", cost_s, zero=True)
    _check("max_overhead", max_overhead)
    _check("gpus", gpus)
    _check("chunk_bytes", chunk_bytes)
    if failure_s is not None:
        _check("failure_s", failure_s)
    if optimizer_s >= iteration_s:
        raise ConfigError(f"optimizer_s={optimizer_s}: is a part of an iteration, which takes {iteration_s} s")
    if max_overhead >= 1:
        raise ConfigError(f"max_overhead={max_overhead}: expected a part of the training time, as in 0.02 for 2 %")

    overlap_s = iteration_s - optimizer_s  # forward and backward
    write_s = state_bytes / write_bytes_per_s
    disk_every = _iterations(write_s / iteration_s)
    overhead_every = _iterations(cost_s / (max_overhead * iteration_s))
    failure_every = None if failure_s is None else _iterations(optimal_interval_s(cost_s, failure_s) / iteration_s)
    every = max(disk_every, overhead_every, failure_every or 1)
    overhead = cost_s / (every * iteration_s)
    # Young: half an interval is repeated on average; and here what had not become durable by then.
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
    """Computing time between checkpoints that wastes least (Daly 2006, equation 37; its first term is Young's)."""
    if cost_s >= 2 * failure_s:
        return failure_s
    ratio = cost_s / (2 * failure_s)
    return math.sqrt(2 * cost_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def _iterations(number: float) -> int:
    return max(math.ceil(number - 1e-9), 1)


def _check(name: str, value: float, *, zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{name}={value!r}: expected a number {'of at least 0' if zero else 'above 0'}")
