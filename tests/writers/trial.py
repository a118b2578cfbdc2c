"""Runs one training with one writer: rounds of steps, a save, and a write at a chosen instant."""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lazyckpt
from writers.judge import Copies, Flat, Outcome, Violation, judge, limit, pending, wait_until
from writers.registry import REGISTRY, SIZES, Writer
from writers.ways import WAYS, Way

HELD = "held"  # what does not fit into the ring is certain not to be copied yet
INSTANTS = (
    HELD,
    "at once",  # the write races with the copies
    "during",  # half of the chunks are copied
    "last chunk",
    "copied",  # everything is copied, and not durable yet
    "captured",  # after wait_captured(): always fine
)
COVERED = "captured"
PENDING = "pending at the write"
CASE_LIMIT_S = 120.0
HOLD_S = 0.03
MOST_FAILURES = 3  # with the same writer in every save: then everything that it writes to is known


@functools.cache
def refused(witness: str) -> str:
    """Why a witness does not work on this machine; empty if it does."""
    try:
        lazyckpt.Saver(witness=witness).close()
    except lazyckpt.ConfigError as error:
        return str(error)
    return ""


def witnesses() -> list[str]:
    """The witnesses that work here."""
    return [w for w in ("pages", "versions") if not refused(w)]


@dataclass(frozen=True)
class Round:
    steps: int  # of training before the save
    instant: str | None  # of the write; None: nothing is written before the save has ended


@dataclass(frozen=True)
class Plan:
    """A case of the trial, as its failure prints it."""

    writer: str
    witness: str = "auto"
    way: str = "checkpointer"
    size: str = "medium"
    rounds: tuple[Round, ...] = (Round(1, HELD),)
    seed: int = 0
    patient: bool = True  # waits for every save; otherwise the rounds follow each other as in a training loop
    evaluates: bool = False  # runs Python until the save has ended, without a call to lazyckpt; if patient
    ring_chunks: int = 2
    copy_threads: int = 1


@dataclass(frozen=True)
class Save:
    """One save, to be judged."""

    handle: lazyckpt.SaveHandle
    expected: Flat
    instant: str | None
    wrong: Callable[[Flat, Flat], list[str]]


class Trial:
    """Runs plans, and counts what came of them."""

    def __init__(self, copies: Copies, folder: Path) -> None:
        self._copies = copies
        self._folder = folder
        self.outcomes: Counter[str] = Counter()

    def run(self, plan: Plan) -> Counter[str]:
        """The outcomes of the saves; raises Violation, with the plan, for one that is not allowed."""
        before = self.outcomes.copy()
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            with limit(CASE_LIMIT_S, plan, self._copies.release), _case(plan, folder, self._copies) as case:
                for outcome in case.run():
                    self.outcomes[outcome] += 1
        except Violation as violation:
            violation.args = (f"{violation}\n{plan}",)
            raise
        except Exception as error:
            raise Violation(f"the training itself failed: {type(error).__name__}: {error}\n{plan}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Counter({k: n for k, n in (self.outcomes - before).items() if not k.startswith(PENDING)})


@contextlib.contextmanager
def _case(plan: Plan, folder: Path, copies: Copies) -> Iterator[Case]:
    size = SIZES[plan.size]
    knobs: dict[str, Any] = {
        "chunk_bytes": size.chunk_bytes,
        "host_buffer_bytes": plan.ring_chunks * size.chunk_bytes,
        "copy_threads": plan.copy_threads,
        "on_error": "warn",  # the judge asks each handle
        "witness": plan.witness,
    }
    writer = REGISTRY[plan.writer](size, random.Random(plan.seed))
    try:
        way = WAYS[plan.way](folder, **knobs)
        try:
            yield Case(plan, writer, way, copies)
        finally:
            copies.cancel()
            copies.release()
            writer.after()
            with contextlib.suppress(lazyckpt.SaveError):
                way.close()
    finally:
        writer.close()


class Case:
    def __init__(self, plan: Plan, writer: Writer, way: Way, copies: Copies) -> None:
        self._plan = plan
        self._writer = writer
        self._way = way
        self._copies = copies
        self._chance = random.Random(plan.seed + 1)
        self._step = 0
        self._blamed: set[str] = set()
        self._pending: list[str] = []
        way.track(writer.tracked)

    def run(self) -> Iterator[str]:
        """Yields outcomes, and PENDING for each write that came while chunks were not copied."""
        self._train(2)  # the state of the optimizer is there, and its parameters have earned what they can
        outcome: Outcome = "committed"
        if not self._plan.patient:
            saves = [self._save(part) for part in self._plan.rounds]
            for save in saves:
                outcome = self._judge(save)
                yield outcome
        else:
            for part in self._plan.rounds:
                outcome = self._round(part)
                yield outcome
                if outcome == "named":
                    yield from self._until_it_commits(part)
        yield from self._pending

    def _until_it_commits(self, part: Round) -> Iterator[Outcome]:
        """After a failure: a save without the writer commits, and soon one with it, too."""
        yield self._round(Round(1, None))
        for _ in range(MOST_FAILURES):
            outcome = self._round(Round(1, part.instant))
            yield outcome
            if outcome == "committed":
                return
        raise Violation(f"{MOST_FAILURES + 1} saves failed with the same writer, which tore {', '.join(self._blamed)}")

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._writer.train()

    def _round(self, part: Round) -> Outcome:
        save = self._save(part)
        if self._plan.evaluates:
            wait_until(save.handle.done, limit_s=60.0)
            if not save.handle.done():
                raise Violation("the save does not end while the main thread computes something else")
        else:
            with contextlib.suppress(lazyckpt.SaveError):
                save.handle.result(timeout=60)
        self._writer.after()
        outcome = self._judge(save)
        if part.instant is None:
            self._writer.write()  # too late to matter
            self._writer.after()
        return outcome

    def _save(self, part: Round) -> Save:
        """Trains, saves and writes."""
        writer = self._writer
        writer.after()
        self._step += 1
        self._train(part.steps)
        writer.before_save()
        expected = self._way.oracle()
        if part.instant is not None:
            writer.start()
        if part.instant not in (None, "at once"):
            self._copies.hold(at_most_s=HOLD_S)  # save() itself waits where eager bytes do not fit into the ring
        handle = self._way.save(self._step)
        wrong = functools.partial(writer.wrong, **writer.instant())
        if part.instant is not None:
            self._reach(part.instant, handle)
            if pending(handle) > 0:
                self._pending.append(f"{PENDING}, {part.instant}")
            writer.write()
        elif not self._plan.patient:
            writer.write()  # in a loop, it comes at some time
        self._copies.release()
        return Save(handle, expected, part.instant, wrong)

    def _judge(self, save: Save) -> Outcome:
        covered = (save.instant == COVERED and not self._writer.races) or (save.instant is None and self._plan.patient)
        outcome, names = judge(
            save.handle,
            self._way.read,
            save.expected,
            self._way.leaves,
            must_commit=covered or self._never_fails(),
            wrong=save.wrong,
        )
        again = self._blamed.intersection(names)
        self._blamed.update(names)
        # In a loop, the next save may begin before anybody knows.
        if again and not self._writer.swaps and self._plan.patient:
            raise Violation(f"{', '.join(again)} tore a save before: they must be eager since then")
        return outcome

    def _never_fails(self) -> bool:
        return self._plan.way in self._writer.always_commits

    def _reach(self, instant: str, handle: lazyckpt.SaveHandle) -> None:
        """Returns at the instant of the write."""
        chunks = pending(handle)
        if instant == HELD:
            self._copies.release(after_s=self._chance.random() * 0.02)
            return
        if instant == "at once":
            time.sleep(self._chance.choice((0.0, self._chance.random() / 2000)))
            return
        self._copies.release()
        if instant == "during":
            wait_until(lambda: pending(handle) <= chunks // 2)
        elif instant == "last chunk":
            wait_until(lambda: pending(handle) <= 1)
        elif instant == "copied":
            wait_until(lambda: pending(handle) == 0)
        else:
            assert instant == COVERED
            lazyckpt.wait_captured()
