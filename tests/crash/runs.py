"""Cuts a run off again and again while it saves. Acknowledged checkpoints survive, and every final name is whole.

A cut counts only if something had a temporary name right before it: a save or a removal was under way.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crash.actor import Server, Task
from crash.history import History, staged_in
from lazyckpt.storage import folders, manifest
from trials import Trials


def wait_for(log: Path, word: str, times: int = 1) -> None:
    end = time.monotonic() + 60
    while not log.exists() or sum(line.startswith(word) for line in log.read_text().splitlines()) < times:
        assert time.monotonic() < end, f"the run does not come to {word!r}"
        time.sleep(0.001)


def phase_of(path: Path) -> str:
    """The phase of a live run, as its temporary names show."""
    if path.name.startswith(folders.TRASH):
        return "clean"
    try:
        names = os.listdir(path)
    except OSError:  # another process removed it
        names = []
    return "described" if manifest.MANIFEST in names else "writing" if names else "empty"


def cut_runs(
    server: Server,
    root: Path,
    log: Path,
    trials: Trials,
    few: int,
    figure: str,
    cut: Callable[[int], None],
    **task: Any,
) -> None:
    """``cut`` ends the process of a number. Each run continues the one before, in ``root``."""
    chance = trials.random
    wanted = trials.count(few, 1000)
    history = History()
    counted = attempts = acknowledged = 0
    phases: Counter[str] = Counter()
    value = 1
    while counted < wanted:
        attempts += 1
        assert attempts < 4 * wanted + 20, f"too few cuts hit a save: {counted} of {attempts}"
        log.unlink(missing_ok=True)
        leftovers = set(staged_in(root))  # of lone files: the next one sweeps them
        knobs = {"io_backend": chance.choice(("io_uring", "posix")), "direct_io": chance.random() < 0.5}
        pid = server.start(Task(str(root), str(log), "endless", value, chance.getrandbits(32), knobs, **task))
        wait_for(log, "resumed")
        wait_for(log, "durable", chance.randrange(4))
        time.sleep(chance.uniform(0, 0.04))
        caught = [phase_of(path) for path in staged_in(root) if path not in leftovers]
        cut(pid)
        history.read(log)
        history.settle(history.check(root))
        words = [line.split()[0] for line in log.read_text().splitlines()]
        value += words.count("saving")
        acknowledged += words.count("durable")
        counted += bool(caught)
        phases.update(caught)
    trials.report(figure, counted, root, acknowledged=acknowledged, **phases)
