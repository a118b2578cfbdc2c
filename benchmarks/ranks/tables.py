"""Many ranks: a sharded training job with checkpoints, and every engine that can save it, in one run of its processes.

The ranks are gloo processes on this machine that share its cores and its disk. A block is as in `train`: N cycles of
save, forward and backward, and optimizer step, then the drain; it ends when the last rank is durable. In every round
each arm trains one block, and one block has no checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.arms import NONE
from benchmarks.disk import rates_table
from benchmarks.paired import Progress, median, ratios, reason, spread
from benchmarks.pictures import Picture
from benchmarks.ranks.contest import Interval, Results, Sample, compete
from benchmarks.ranks.loading import Loads, Saved, load, save
from benchmarks.ranks.member import Member, run_ranks
from benchmarks.ranks.task import Task
from benchmarks.report import Table
from benchmarks.settings import Settings

UNSEEN = ("dcp-async-process", "torch_checkpointing")  # they talk in child processes
INTERVALS = (1, 2)  # steps from one checkpoint to the next; without --full only the first


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    """Each rank holds half of `state_bytes`: with two ranks, the training of `train`."""
    task = _task(settings, INTERVALS if settings.full else INTERVALS[:1])
    results, saved, loads = run_ranks(_save_and_load, settings.ranks, task, progress)
    for interval in results.intervals:
        yield _cost(interval, results, settings)
    yield _agreement(results.intervals[0], settings)
    yield _loads(loads, saved, settings.ranks, settings.ranks)
    alone = run_ranks(_load, 1, (task, saved), progress)
    yield _loads(alone, saved, settings.ranks, 1)


def calls(settings: Settings, progress: Progress, *, goal_ms: float) -> Table:
    """Only what a call of each engine costs, on all ranks; `goal_ms`: of lazyckpt's, while the other ranks wait."""
    table = Table(f"{settings.ranks} ranks, what a call costs, ms", ["arm", "call alone", "blocked", "plan", "goal"])
    try:
        results = run_ranks(compete, settings.ranks, _task(settings, INTERVALS[:1]), progress)
    except Exception as error:
        table.missing("all", reason(error))
        return table
    for name, samples in _arms(results.intervals[0], table):
        alone, blocked, plan = ([1e3 * s for s in _all(samples, field)] for field in ("alone_s", "blocked_s", "plan_s"))
        goal = f"call alone ≤ {goal_ms:g}: {'met' if median(alone) <= goal_ms else 'missed'}" if plan and alone else "-"
        table.add(name, *(spread(values, 1) for values in (alone, blocked, plan)), goal)
    table.notes += [
        f"{results.state_bytes / 1e9:.2f} GB of sharded AdamW state, {settings.pairs} rounds; of ranks, the slowest.",
        "Call alone: save() while the other ranks wait; of engines that talk inside of it, none. Blocked: the call "
        "with all ranks at work, and the waits before it and before the optimizer begins; mean per checkpoint.",
    ]
    return table


def _task(settings: Settings, intervals: Sequence[int]) -> Task:
    return Task(
        settings.directory,
        arms=[kind.name for kind in settings.kinds],
        state_bytes=settings.state_bytes // 2 * settings.ranks,
        pairs=settings.pairs,
        steps=settings.steps,
        intervals=intervals,
        compute=settings.compute,
    )


def _save_and_load(member: Member, task: Task) -> tuple[Results, Saved, Loads]:
    results = compete(member, task)
    saved = save(member, task)
    return results, saved, load(member, task, saved)


def _load(member: Member, told: tuple[Task, Saved]) -> Loads:
    return load(member, *told)


def _cost(interval: Interval, results: Results, settings: Settings) -> Table:
    rhythm = "every step" if interval.every == 1 else f"every {interval.every} steps"
    table = Table(
        f"{settings.ranks} ranks, a checkpoint {rhythm} ({results.state_bytes / 1e9:.2f} GB of sharded AdamW state)",
        ["arm", "time over none", "blocked, ms", "call alone, ms", "step over none", "durable, s"],
    )
    table.picture = Picture("", "time over no checkpoints")
    none = interval.samples[NONE.name]
    for name, samples in _arms(interval, table):
        over_none = ratios(_all(samples, "seconds"), _all(none, "seconds"))
        table.add(
            name,
            spread(over_none),
            spread([1e3 * s for s in _all(samples, "blocked_s")], 1),
            spread([1e3 * s for s in alone], 1) if (alone := _all(samples, "alone_s")) else "-",
            spread(ratios(_all(samples, "step_s"), _all(none, "step_s"))),
            spread(_all(samples, "durable_s")),
        )
        table.picture.add("", name, over_none)
    table.notes += [
        f"{settings.pairs} rounds; a block is {settings.steps} cycles of save, forward + backward "
        f"({results.compute_s:.2f} s) and step, then drain and sync. All ranks together wrote the state raw in "
        f"{results.write_s:.2f} s. Of the ranks, the slowest.",
        "Blocked: the call, what it waits for, the wait before the optimizer begins; mean per checkpoint. "
        "Call alone: save() while the other ranks wait, as with a core for each rank.",
        "Step: the median of those that begin with a save, without what blocked it. "
        "Durable: one checkpoint with nothing beside it, from the call until every rank knows that it is on the disk.",
    ]
    return table


def _agreement(interval: Interval, settings: Settings) -> Table:
    columns = ["arm", "plan, ms", "commit, ms", "eager, %", "collectives", "store calls"]
    table = Table(f"{settings.ranks} ranks: what they agree on, per checkpoint", columns)
    for name, samples in _arms(interval, table):
        table.add(
            name,
            spread([1e3 * s for s in _all(samples, "plan_s")], 1),
            spread([1e3 * s for s in _all(samples, "commit_s")], 1),
            spread([100 * share for share in _all(samples, "eager")], 1),
            *("-" if name in UNSEEN else spread(_all(samples, talk), 1) for talk in ("collectives", "store_calls")),
        )
    table.notes += [
        "Plan: what each rank will write, its own plan and what it hears from the others; of the ranks, the slowest. "
        "Commit: from the moment when the files of the last rank were durable until every rank knew that the "
        "checkpoint was. Eager: the share of the bytes that was copied inside of save().",
        "Collectives and store calls: of the rank with most of them, above training without checkpoints, after the "
        f"first checkpoints. Those in child processes are not seen ({', '.join(UNSEEN)}).",
    ]
    return table


def _loads(loads: Loads, saved: Saved, saved_on: int, ranks: int) -> Table:
    title = f"Load of {saved.nbytes / 1e9:.2f} GB that {saved_on} ranks saved, on {ranks}"
    table = rates_table(title, loads.seconds, loads.failures, saved.nbytes)
    table.notes.append(
        f"Into live state, on all ranks together. Before each: {loads.cache}. The raw read is of as many bytes."
    )
    return table


def _arms(interval: Interval, table: Table) -> Iterator[tuple[str, list[Sample]]]:
    """Those that were measured; the others are noted as missing."""
    for name in dict.fromkeys([*interval.samples, *interval.failures]):
        if name in interval.failures:
            table.missing(name, interval.failures[name])
        elif name != NONE.name:
            yield name, interval.samples[name]


def _all(samples: Sequence[Sample], field: str) -> list[float]:
    """The values of one field, without those that are None."""
    return [value for sample in samples if (value := getattr(sample, field)) is not None]
