"""Useful work of a job that fails at random: in closed form, and as a simulation of every event.

A job trains for ``interval_s``, then saves: training stops for ``cost_s``, and the checkpoint is durable ``durable_s``
after that began. Failures come at exponential intervals, during restarts, too. Then ``restart_s`` pass, and training
goes on from the newest durable checkpoint.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Saving:
    """How a job saves. Seconds."""

    interval_s: float  # training between two checkpoints
    cost_s: float  # lost to training with each
    durable_s: float  # from the call until a restart would find it; at least cost_s if the call writes
    restart_s: float  # from a failure until training goes on
    in_flight: int = 2  # a save waits while so many are not durable


def goodput(saving: Saving, mtbf_s: float) -> float:
    """The part of the time that goes into work that is kept.

    Exact if no save waits for an earlier one. The k-th checkpoint after a failure is durable if the next failure comes
    later than restart + interval + durable + (k - 1) periods. The sum of these probabilities over all k is the number
    of checkpoints between two failures. With ``durable_s == cost_s`` this is the formula of Daly (2006).
    """
    period_s = saving.interval_s + saving.cost_s
    first_s = saving.restart_s + saving.interval_s + saving.durable_s
    checkpoints = math.exp(-first_s / mtbf_s) / -math.expm1(-period_s / mtbf_s)
    return checkpoints * saving.interval_s / mtbf_s


def simulate(
    saving: Saving,
    mtbf_s: float,
    failures: int,
    seed: int = 0,
    durable_s: Callable[[random.Random], float] | None = None,
) -> float:
    """The same part of the time, counted over ``failures`` failures.

    Args:
        durable_s: Draws the time until a checkpoint is durable; by default it is always that of ``saving``.
    """
    draw = random.Random(seed)
    useful_s = elapsed_s = 0.0
    for _ in range(failures):
        fails = draw.expovariate(1 / mtbf_s)
        elapsed_s += fails
        now = saving.restart_s
        kept = trained = 0.0  # of this life
        pending: list[tuple[float, float]] = []  # when durable, and the work in it
        while True:
            now += saving.interval_s
            trained += saving.interval_s
            while len(pending) >= saving.in_flight:  # the save waits
                durable, work = heapq.heappop(pending)
                now, kept = max(now, durable), max(kept, work if durable <= fails else 0.0)
            if now > fails:
                break
            heapq.heappush(pending, (now + (durable_s(draw) if durable_s else saving.durable_s), trained))
            now += saving.cost_s
        kept = max([kept, *(work for durable, work in pending if durable <= fails)])
        useful_s += kept
    return useful_s / elapsed_s
