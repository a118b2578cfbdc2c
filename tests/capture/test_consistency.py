"""A snapshot is of one instant: whatever training does right after ``save()``, no checkpoint is mixed of two rounds."""

from __future__ import annotations

import ctypes
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from fake_cuda import Mode
from lazyckpt.capture.snapshot import Snapshot
from trainings import MAKE, Device, Host, Place, Training, values_in
from trials import Trials

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy", "nothing_is_learnt")

ROUNDS = 20  # of one training, before another one is made
KIB = 1024
Pending = Callable[[lazyckpt.SaveHandle], int]
MakePlace = Callable[[], Place]


@pytest.fixture(params=["host", "device"])
def make_place(request: pytest.FixtureRequest, trials: Trials) -> Iterator[MakePlace]:
    if request.param == "host":
        yield Host
        return
    gpu = request.getfixturevalue("gpu")

    def device() -> Device:
        gpu.give_back()
        gpu.driver.configure(mode=trials.random.choice(list(Mode)))
        return Device(gpu)

    yield device
    gpu.driver.forget_violations()  # of the rounds without the gate


class Rounds:
    """Saves, and trains on at once. The ring holds a quarter of the state at most, so that most of it waits.

    Half of the time the disk is held until somebody comes to the gate: what does not fit into the ring is certain to be
    pending then. Otherwise copies and training race. Only rounds count in which something that its owner was about to
    change was pending when that one came to the gate: with forward and backward over.
    """

    def __init__(self, disk: Any, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self._disk = disk
        self._chance = chance
        self._gate = True
        self._pending_at_the_gate = False
        self.counted: Counter[str] = Counter()  # of the rounds that the gate has kept apart
        wait = Snapshot._wait

        def wait_at_the_gate(snapshot: Snapshot, owners: int, **where: Any) -> None:
            pending = snapshot.job.pending_chunks(owners) > 0
            self._pending_at_the_gate |= pending
            if self._gate:
                if pending:
                    disk.release(after_s=chance.choice((0.0, chance.random() / 1000)))
                wait(snapshot, owners, **where)

        monkeypatch.setattr(Snapshot, "_wait", wait_at_the_gate)

    def without_gate(self) -> None:
        self._gate = False

    def checkpointer(self, training: Training, folder: Path, **knobs: Any) -> lazyckpt.Checkpointer:
        training.train()  # so that the optimizer has its state
        lazy, _ = training.sizes()
        chunk = self._chance.choice([size * KIB for size in (8, 16, 32, 64) if 8 * size * KIB <= lazy])
        most = lazy // 4 // chunk
        ring = chunk * (self._chance.randint(2, most) if self._gate else most)
        ckpt = lazyckpt.Checkpointer(folder, chunk_bytes=chunk, host_buffer_bytes=ring, keep_last=1, **knobs)
        ckpt.track(**training.tracked)
        training.train()
        return ckpt

    def run(self, training: Training, ckpt: lazyckpt.Checkpointer, rounds: int) -> Iterator[str | None]:
        """Yields, for each round that counts, what its checkpoint has wrong, or None."""
        counted = 0
        for number in range(20 * rounds):
            lazy, eager = training.sizes()
            ring = int(ckpt.config.host_buffer_bytes)
            assert ring <= (lazy + eager) / 4
            # save() itself waits if its eager bytes do not fit.
            held = eager + 32 * KIB < ring and (not self._gate or self._chance.random() < 0.5)
            if held:
                self._disk.hold()
            expected = training.values()
            handle = ckpt.save(number)
            if self._chance.random() < 0.5:
                time.sleep(self._chance.random() / 2000)
            self._pending_at_the_gate = False
            training.train()
            was_pending = self._pending_at_the_gate
            assert was_pending or not held
            if not self._gate:
                training.place.settle()  # before anything else is copied
            self._disk.release()
            try:
                found = values_in(torch.load(handle.result(timeout=60) / "state.pt", mmap=True))
                problem = difference({name: found[name] for name in expected}, expected)
            except lazyckpt.TornSnapshotError as error:
                problem = str(error)
            changed = difference(training.values()["model"], expected["model"])
            assert changed is not None, "the values cannot tell rounds apart"
            if held or (was_pending and self._gate):
                self.counted["held" if held else "raced"] += self._gate
                yield problem
                counted += 1
                if counted == rounds:
                    return
            elif self._gate:
                assert problem is None
        raise AssertionError(f"chunks were pending in {counted} rounds only: the test tests nothing")


def difference(found: Any, expected: Any, name: str = "") -> str | None:
    """The first place where two states differ."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        differences = (difference(found[key], expected[key], f"{name}.{key}") for key in expected)
        return next(filter(None, differences), None)
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        differences = (difference(*both, f"{name}.{at}") for at, both in enumerate(zip(found, expected, strict=True)))
        return next(filter(None, differences), None)
    return None if found == expected else f"{name.removeprefix('.')} is {found}, was {expected}"


@pytest.fixture
def rounds(disk: Any, trials: Trials, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return Rounds(disk, trials.random, monkeypatch)


@pytest.mark.long(first=1)
@pytest.mark.timeout(3600)  # with all trials
def test_no_checkpoint_is_mixed_of_two_rounds(make_place: MakePlace, rounds: Rounds, trials: Trials, shm: Path) -> None:
    """And, so that this says something: without the gate nearly every one is, in every kind of training."""

    def problems(make: Any, count: int) -> Iterator[str | None]:
        done = 0
        while done < count:
            training = make(make_place(), trials.random)
            with rounds.checkpointer(training, shm / "run", on_error="warn") as ckpt:
                n = min(ROUNDS, count - done)
                yield from rounds.run(training, ckpt, n)
                done += n

    each = trials.count(6, 460)
    for name, make in MAKE.items():
        for problem in problems(make, each):
            assert problem is None, f"{name}: {problem}"
    rounds.without_gate()
    few = trials.count(3, 40)
    mixed = Counter({name: sum(p is not None for p in problems(make, few)) for name, make in MAKE.items()})
    assert all(mixed[name] >= 0.9 * few for name in MAKE), mixed
    rate = f"{mixed.total() / (few * len(MAKE)):.1%} of {few * len(MAKE)}"
    where = "a fake device" if isinstance(make_place(), Device) else "the host"
    trials.report(
        f"mutation right after save(), on {where}",
        each * len(MAKE),
        shm,
        kinds_of_training=len(MAKE),
        **{f"pending_at_the_gate,_{kind}": count for kind, count in sorted(rounds.counted.items())},
        mixed_without_the_gate=rate,
    )


def add_behind_autograd(tensor: torch.Tensor, at: int) -> None:
    tensor.data.flatten()[at] += 1.0


def write_by_address(tensor: torch.Tensor, at: int) -> None:
    byte = ctypes.c_ubyte.from_address(tensor.data_ptr() + at * tensor.element_size())
    byte.value ^= 0xA5


def write_by_numpy(tensor: torch.Tensor, at: int) -> None:
    tensor.detach().numpy()[at] = -1.0


@pytest.mark.timeout(1800)  # with all trials
def test_audit_names_what_is_written_behind_the_gate(disk: Any, pending: Pending, trials: Trials, shm: Path) -> None:
    """Where ``_version`` does not see it: one element of any tensor, by any way, at any instant before the step."""
    chance = trials.random
    training = MAKE["fused"](Host(), chance)
    training.train()
    ring = training.sizes()[0] // 4 // KIB // 8 * 8 * KIB
    names = {id(p): f"model.{at}" for at, p in enumerate(training.model)} | {
        id(state[name]): f"optimizer.state.{at}.{name}"
        for at, state in training.optimizer.state_dict()["state"].items()
        for name in ("exp_avg", "exp_avg_sq")
    }
    count = trials.count(60, 1000)
    found = Counter[str]()
    knobs = {"chunk_bytes": 8 * KIB, "host_buffer_bytes": ring, "keep_last": 1}
    with lazyckpt.Checkpointer(shm, audit=True, witness="versions", **knobs) as ckpt:
        ckpt.track(**training.tracked)
        training.train()
        for number in range(count):
            ckpt.save(number).result(timeout=60)  # no false alarm
            training.train()
            tensor = chance.choice(training.owned(training.optimizer))
            expected = training.values()
            disk.hold()
            handle = ckpt.save(number)
            assert pending(handle) > 0
            races = chance.random() < 0.5
            if races:
                disk.release(after_s=chance.random() / 2000)
            write = chance.choice((add_behind_autograd, write_by_address, write_by_numpy))
            write(tensor, chance.randrange(tensor.numel()))
            disk.release()
            training.train()
            try:
                saved = torch.load(handle.result(timeout=60) / "state.pt")
                whole = difference({name: values_in(saved[name]) for name in expected}, expected) is None
                found["written_after_the_copy" if races and whole else "missed"] += 1
            except lazyckpt.TornSnapshotError as error:
                found["named" if f" {names[id(tensor)]} was written" in str(error) else str(error)] += 1
    assert found.keys() <= {"named", "written_after_the_copy"} and found["named"] > 0.9 * count, found
    trials.report("a write behind the gate, with audit=True", count, shm, **found)
