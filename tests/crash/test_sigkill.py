"""Kills training at random instants of a save. Acknowledged checkpoints must be there, and every final name whole.

A kill counts only if the trainer left a temporary folder, and so was saving. SIGKILL keeps the page cache: this tests
atomicity. test_power_cuts.py and test_crash_images.py test durability.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lazyckpt
from lazyckpt.storage.catalog import Catalog
from trials import Trials

TRAINER = Path(__file__).with_name("trainer.py")
FINAL = re.compile(r"step-\d{8}")
PHASES = ("empty", "writing", "written", "manifest")


def load_trainer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainer", TRAINER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digest = load_trainer().digest


class Trainers:
    """A process that forks trainers, and their log."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.run.mkdir()
        self.log = folder / "log"
        self.log.touch()
        self.server = subprocess.Popen(
            [sys.executable, TRAINER, self.run, self.log], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self) -> int:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write("\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def kill(self, pid: int) -> None:
        assert self.server.stdout is not None
        os.kill(pid, signal.SIGKILL)
        code = int(self.server.stdout.readline())
        assert code == -signal.SIGKILL, f"the trainer ended by itself with {code}"

    def close(self) -> None:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(10)
        self.server.stdout.close()

    def temporaries(self) -> list[Path]:
        return [self.run / n for n in os.listdir(self.run) if n.startswith(".tmp-step-")]

    def wait_for_durable(self, more: int) -> None:
        """Waits until ``more`` checkpoints were acknowledged."""
        lines = len(self.logged())
        end = time.monotonic() + 20
        while sum(words[0] == "durable" for words in self.logged()[lines:]) < more:
            assert time.monotonic() < end, "the trainer does not save"
            time.sleep(0.001)

    def logged(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    trainers = Trainers(tmp_path)
    yield trainers
    trainers.close()


def is_readable(path: Path) -> bool:
    try:
        lazyckpt.load(path)
    except lazyckpt.LoadError:
        return False
    return True


def phase_of(folder: Path) -> str:
    """The phase in which a trainer died, as its staged folder shows."""
    if (folder / "manifest.json").exists():
        return "manifest"
    if not (folder / "state.pt").exists():
        return "empty"
    return "written" if is_readable(folder / "state.pt") else "writing"


def wait_for_phase(trainers: Trainers, phase: str, chance: random.Random) -> None:
    """Returns at about the beginning of a phase, or a random while later."""
    seen = set(trainers.temporaries())
    wanted = {"empty": "", "writing": "state.pt", "written": "state.pt", "manifest": "manifest.json"}[phase]
    end = time.monotonic() + 20
    while True:
        assert time.monotonic() < end, "the trainer does not save"
        new = [t for t in trainers.temporaries() if t not in seen]
        if any(os.path.lexists(t / wanted) for t in new):
            break
    if phase in ("writing", "written"):
        time.sleep(chance.uniform(0, 0.005 if phase == "writing" else 0.03))


def check_catalog(trainers: Trainers) -> int:
    """Checks that each committed checkpoint holds what the trainer saved. Returns the step of the newest."""
    saved: dict[int, str] = {}
    acknowledged = 0
    for words in trainers.logged():
        if words[0] == "saving":
            step = int(words[1])
            assert saved.setdefault(step, words[2]) == words[2], f"step {step} was not repeated bit for bit"
        elif words[0] == "durable":
            acknowledged = max(acknowledged, int(words[1]))
    folders = [trainers.run / n for n in os.listdir(trainers.run) if FINAL.fullmatch(n)]
    catalog = Catalog(trainers.run)
    found = catalog.scan()
    assert not catalog.broken and len(found) == len(folders), "something half has a final name"
    for checkpoint in found:
        by_us = lazyckpt.load(checkpoint.path)
        by_torch = torch.load(checkpoint.path / "state.pt")
        assert digest(by_us) == digest(by_torch) == saved[checkpoint.step], f"step {checkpoint.step} is torn"
    newest = found[0].step if found else 0
    assert newest >= acknowledged, f"step {acknowledged} was acknowledged, {newest} is the newest"
    assert newest == max((c.step for c in found), default=0)
    return newest


@pytest.mark.timeout(60 * 60)
def test_sigkill_while_saving(trainers: Trainers, trials: Trials) -> None:
    chance = trials.random
    wanted = trials.count(20, 1000)
    phases: Counter[str] = Counter()
    counted = attempts = newest = 0
    while counted < wanted:
        attempts += 1
        assert attempts < 4 * wanted + 20, f"too few kills hit a save: {counted} of {attempts}"
        leftovers = set(trainers.temporaries())
        lines = len(trainers.logged())
        pid = trainers.start()
        while len(trainers.logged()) <= lines:  # resumed
            time.sleep(0.002)
        assert not leftovers & set(trainers.temporaries()), "what the dead left is not swept"
        assert trainers.logged()[lines] == ["resumed", str(newest or None)]
        trainers.wait_for_durable(chance.randrange(4))
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0, 0.1))
        else:
            wait_for_phase(trainers, chance.choice(PHASES), chance)
        trainers.kill(pid)
        left = trainers.temporaries()
        if left:
            counted += 1
            phases.update(phase_of(folder) for folder in left)
        newest = check_catalog(trainers)
    assert len(phases) >= 2
    trials.report("random SIGKILLs while saving", counted, trainers.run, **{p: phases[p] for p in PHASES})
