"""What a row is, how it is trained and what must hold of it.

A row is a function that trains: with lazyckpt or without, from the beginning or from a checkpoint, with this seed. A
row for a plain loop is written as a ``Recipe`` and ``loop`` makes the function of it. In the other rows a trainer
saves by itself, and through lazyckpt's integration.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import lazyckpt
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.pipeline import background

STEPS = 12
EVERY = 2  # steps between checkpoints
RESUMED = 6  # the checkpoint from which training goes on a second time
EARLY = 2  # checkpoints whose eager share is not looked at: frozen parameters are lazy from the third one on
LATE_S = 0.03  # copies begin so late that training gets to the tensors first, if nothing holds it
SMALL_RING = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 256 << 10}


@dataclass(frozen=True)
class Run:
    """One training of a row."""

    folder: Path
    seed: int
    knobs: dict[str, Any] | None  # of lazyckpt; None: training without it
    resumed: Path | None = None  # the checkpoint to go on from


Train = Callable[[Run], Any]  # returns the state in the end, as the objects that hold it


@dataclass(frozen=True)
class Row:
    """A library or a way to use it."""

    name: str
    packages: tuple[str, ...]  # distributions; their versions are in the table
    train: Train
    eager: float = 0.03  # the largest part of a checkpoint that save() may copy itself
    exact: bool = True  # resumed, training ends in the same bits
    exact_alone: bool | None = None  # the same without lazyckpt, if that is otherwise
    refused: str | None = None  # what the error at the first save says; training without lazyckpt goes on
    note: str = ""


class Recipe(NamedTuple):
    """A plain loop. ``step`` takes the number of the step, from 1 on. Resumed, it goes on with ``after_save``."""

    tracked: dict[str, Any]
    step: Callable[[int], Any]
    after_save: Callable[[int], Any] = lambda step: None
    before_save: Callable[[int], Any] = lambda step: None


@dataclass
class Outcome:
    """What became of a row."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    lazy_share: float | None = None
    exact: bool | None = None
    refused: str | None = None
    note: str = ""
    failures: list[str] = field(default_factory=list)


# A plain loop


def loop(build: Callable[[], Recipe]) -> Train:
    """Trains what ``build`` makes. Without lazyckpt, torch.save writes the checkpoints."""

    def train(run: Run) -> Any:
        seed_all(run.seed)
        if run.knobs is None:
            return _with_torch(run, build())
        with lazyckpt.Checkpointer(run.folder, **run.knobs) as ckpt:
            recipe = build()
            ckpt.track(**recipe.tracked)
            begin = 0
            if run.resumed is not None:
                begin = _restored(ckpt, run.resumed)
                recipe.after_save(begin)
            for step in range(begin + 1, STEPS + 1):
                recipe.step(step)
                if step % EVERY == 0:
                    recipe.before_save(step)
                    ckpt.save(step)
                    recipe.after_save(step)
        return recipe.tracked

    return train


def _restored(ckpt: lazyckpt.Checkpointer, path: Path) -> int:
    step = ckpt.restore(path=path)
    assert step is not None
    return step


def _with_torch(run: Run, recipe: Recipe) -> Any:
    run.folder.mkdir(parents=True, exist_ok=True)
    begin = 0
    if run.resumed is not None:
        begin = int(run.resumed.name.removeprefix("step-"))
        saved = torch.load(run.resumed / "state.pt", weights_only=False)
        for name, obj in recipe.tracked.items():
            obj.load_state_dict(saved[name])
        _set_random(saved["random"])
        recipe.after_save(begin)
    for step in range(begin + 1, STEPS + 1):
        recipe.step(step)
        if step % EVERY == 0:
            recipe.before_save(step)
            path = run.folder / f"step-{step:08}"
            path.mkdir(parents=True)
            states = {name: obj.state_dict() for name, obj in recipe.tracked.items()}
            torch.save({**states, "random": _random()}, path / "state.pt")
            recipe.after_save(step)
    return recipe.tracked


def _random() -> Any:
    import numpy

    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _set_random(state: Any) -> None:
    import numpy

    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])


def seed_all(seed: int) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


# What must hold


def outcome(row: Row, folder: Path, describe: Callable[[Any], Any], witness: str = "auto") -> Outcome:
    """Trains a row four times and says what did not hold. ``describe`` tells the bits of a state."""
    found = Outcome(row.name, {name: importlib.metadata.version(name) for name in row.packages}, note=row.note)
    done: list[tuple[CheckpointMetrics, Exception | None]] = []
    knobs = {**SMALL_RING, "witness": witness, "on_done": lambda metrics, error: done.append((metrics, error))}
    ours, theirs = folder / "ours", folder / "theirs"

    def train(run: Run) -> Any:
        return describe(_states(row.train(run)))

    # lazyckpt goes first: what it does to a process must not be there already.
    with mock.patch.object(background.Background, "_persist", _late):
        if row.refused is not None:
            _must_refuse(row, Run(ours, 0, knobs), found)
            row.train(Run(theirs, 0, None))
            return found
        lazy = train(Run(ours, 0, knobs))
        saves = list(done)
        plain = train(Run(theirs, 0, None))
        expected = train(Run(folder / "theirs again", 1, None, _checkpoint(theirs)))
        resumed = train(Run(folder / "ours again", 1, knobs, _checkpoint(ours)))

    found.exact = resumed == plain
    found.failures += [f"the checkpoint of step {m.step} failed: {error}" for m, error in done if error is not None]
    if len(saves) != STEPS // EVERY:
        found.failures.append(f"{len(saves)} checkpoints instead of {STEPS // EVERY}")
    else:
        shares = _eager_shares([metrics for metrics, _ in saves], _checkpoint(ours))
        found.lazy_share = 1 - max(shares[EARLY:])
        if max(shares[EARLY:]) > row.eager:
            said = ", ".join(map("{:.1%}".format, shares))
            found.failures.append(f"eager shares of {said}; at most {row.eager:.0%} expected")
    if lazy != plain:
        found.failures.append("training with lazyckpt does not end in the same bits as without")
    alone = row.exact if row.exact_alone is None else row.exact_alone
    if (expected == plain) != alone:
        found.failures.append(f"without lazyckpt, resumption is {'not ' if alone else ''}exact")
    if row.exact_alone is not None:
        if found.exact != row.exact:
            found.failures.append(f"with lazyckpt, resumption is {'not ' if row.exact else ''}exact")
    elif resumed != expected:
        found.failures.append("resumption with lazyckpt does not end in the same bits as without")
    return found


def _eager_shares(saves: list[CheckpointMetrics], checkpoint: Path) -> list[float]:
    """Of every save, the part that it copied before it returned. What a trainer writes past lazyckpt is part of it."""
    files = [checkpoint] if checkpoint.is_file() else [path for path in checkpoint.rglob("*") if path.is_file()]
    past = max(0, sum(path.stat().st_size for path in files) - saves[RESUMED // EVERY - 1].bytes)
    return [(metrics.eager_bytes + past) / (metrics.bytes + past) for metrics in saves]


def _must_refuse(row: Row, run: Run, found: Outcome) -> None:
    try:
        row.train(run)
    except lazyckpt.LazyCkptError as error:
        found.refused = str(error)
        assert row.refused is not None
        if row.refused not in found.refused:
            found.failures.append(f"the first save says {found.refused!r}, not {row.refused!r}")
    else:
        found.failures.append("the first save is not refused")


def _checkpoint(folder: Path) -> Path:
    """That of step RESUMED, however a trainer spells its name."""
    spellings = [f"step-{RESUMED:08}", f"checkpoint-{RESUMED}", f"step-{RESUMED}", f"step-{RESUMED}.ckpt"]
    found = [folder / name for name in spellings if (folder / name).exists()]
    assert found, f"{sorted(os.listdir(folder))}: no checkpoint of step {RESUMED}"
    return found[0]


def _states(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {name: _states(part) for name, part in obj.items()}
    return obj.state_dict() if hasattr(obj, "state_dict") else obj


_persist = background.Background._persist


def _late(self: Any, flight: Any) -> None:
    time.sleep(LATE_S)
    _persist(self, flight)


# On disk, for the table


def write(found: Outcome, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=1))


def read(path: Path) -> Outcome:
    return Outcome(**json.loads(path.read_text()))


def quiet() -> None:
    """The libraries' own warnings are not the subject here; ours are."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module="lazyckpt")
