"""Whether the default settings come within 10 % of the best that a sweep finds.

Every combination is tried once; those that did best are measured again beside the default, in turns, so that luck in
the first trial is no merit. Once for a checkpoint alone, once in a training.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.arms import ArmKind
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.latency import Case, DurableSave
from benchmarks.paired import Countdown, Progress, interleaved, median, ratios, reason, spread
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.train import contest
from benchmarks.workload import Training
from lazyckpt.config import MIB

CHUNK_MIB = (2, 8, 32)
IO_DEPTH = (2, 8, 32)
COPY_THREADS = (1, 2, 4)
RING_SHARES = (1 / 4, 1.0)  # of the state
FINALISTS = 4
WITHIN = 0.9
DEFAULT = "default"
TENSORS = 300

Knobs = dict[str, Any]


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    nbytes = settings.state_bytes
    case = Case("tuning", ((TENSORS // 3, nbytes // TENSORS // 4 * 4),))
    finalists = _sweep(case, nbytes, settings, progress)
    yield _alone(case, nbytes, finalists, settings, progress)
    yield _in_training(finalists, settings, progress)


def _combinations(nbytes: int) -> Iterator[Knobs]:
    for mib, depth, threads, share in itertools.product(CHUNK_MIB, IO_DEPTH, COPY_THREADS, RING_SHARES):
        chunk = mib * MIB
        ring = max(2, math.ceil(share * nbytes / chunk) + (2 if share == 1 else 0)) * chunk
        yield {"chunk_bytes": chunk, "io_depth": depth, "copy_threads": threads, "host_buffer_bytes": ring}


def _name(knobs: Knobs) -> str:
    chunk, ring = knobs["chunk_bytes"] // MIB, knobs["host_buffer_bytes"] // MIB
    return f"chunk {chunk}, depth {knobs['io_depth']}, threads {knobs['copy_threads']}, ring {ring} MiB"


def _sweep(case: Case, nbytes: int, settings: Settings, progress: Progress) -> dict[str, Knobs]:
    """The best, by the second of two saves; the first one faults the ring in."""
    model, optimizer = case.build(settings.device)
    combinations = list(_combinations(nbytes))
    tell = Countdown(progress, len(combinations))
    seconds: dict[str, float] = {}
    directory = settings.directory / "sweep"
    for knobs in combinations:
        tell(_name(knobs))
        try:
            with DurableSave(model, optimizer, directory, **knobs) as save:
                save()
                os.sync()
                seconds[_name(knobs)] = save()
        except Exception as error:
            progress(reason(error))
        shutil.rmtree(directory, ignore_errors=True)
    best = sorted(seconds, key=seconds.__getitem__)[:FINALISTS]
    return {_name(knobs): knobs for knobs in combinations if _name(knobs) in best}


def _alone(case: Case, nbytes: int, finalists: dict[str, Knobs], settings: Settings, progress: Progress) -> Table:
    model, optimizer = case.build(settings.device)
    with ExitStack() as stack:
        arms = {
            name: stack.enter_context(DurableSave(model, optimizer, settings.directory / name, **knobs))
            for name, knobs in {DEFAULT: {}, **finalists}.items()
        }
        seconds, failures = interleaved(arms, settings.pairs, progress, prepare=os.sync)
    table = Table(f"A checkpoint of {nbytes / 1e9:.2f} GB alone", ["setting", "durable, GB/s", "default, of it"])
    for name, values in seconds.items():
        if name in failures:
            table.missing(name, failures[name])
        else:
            shares = [100 * ratio for ratio in ratios(values, seconds[DEFAULT])]
            table.add(name, spread([nbytes / s / 1e9 for s in values]), f"{spread(shares, 0)} %")
    table.notes.append(_verdict({name: ratios(values, seconds[DEFAULT]) for name, values in seconds.items()}))
    return table


def _in_training(finalists: dict[str, Knobs], settings: Settings, progress: Progress) -> Table:
    kinds = [ArmKind(name, partial(LazyCkpt, **knobs)) for name, knobs in {DEFAULT: {}, **finalists}.items()]
    training = Training(settings.state_bytes, device=settings.device)
    with contest(kinds, training, settings.steps, settings.directory / "training", **settings.compute) as one:
        one.run(settings.pairs, progress)
    table = Table("In a training with a checkpoint at every step", ["setting", "time over none", "blocked, ms"])
    for series in one.series.values():
        if series.failure:
            table.missing(series.name, series.failure)
        else:
            table.add(series.name, spread(series.ratio), spread([1e3 * s for s in series.blocked_s], 1))
    default = one.series[DEFAULT].ratio
    table.notes.append(_verdict({s.name: ratios(s.ratio, default) for s in one.series.values()}))
    return table


def _verdict(shares: dict[str, list[float]]) -> str:
    """`shares`: how much of a setting's speed the default has, in each round."""
    name, least = min(((name, median(values)) for name, values in shares.items()), key=lambda item: item[1])
    verdict = "within" if least >= WITHIN else "not within"
    return f"The default has {least:.0%} of the speed of the best ({name}): {verdict} {1 - WITHIN:.0%} of it."
