"""Nearly valid files: hundreds in `make test`, a hundred thousand in `make torture`."""

from __future__ import annotations

import os
import random
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from attacks.judge import judge
from attacks.mutate import EDGES, mutate, seeds
from attacks.runner import in_child
from lazyckpt import _engine
from lazyckpt.reading.ranges import process_engine
from memory import reset_peak, status_bytes
from trials import TORTURE, Trials

_BATCH = 500  # trials in one child
_MAX_BYTES = 128 << 20  # memory beyond torch's; the files have a few KB


def batch(folder: Path, seed: int, first: int, count: int) -> dict[str, Any]:
    """Runs some trials, in a child. Seed and number identify a case."""
    valid = seeds()
    before = reset_peak()
    found: dict[str, Any] = {"refused": 0, "accepted": 0, "violations": []}
    for number in range(first, first + count):
        rng = random.Random(f"{seed}-{number}")
        name = rng.choice(list(valid))
        path = folder / name
        path.write_bytes(mutate(valid[name], rng))
        print(f"case {seed}-{number}", file=sys.stderr, flush=True)  # the last words of a child that dies
        try:
            found[judge(path)] += 1
        except Exception as error:
            found["violations"].append(f"case {seed}-{number}: {type(error).__name__}: {str(error)[:300]}")
        path.unlink()
    if (grown := status_bytes("VmHWM") - before) > _MAX_BYTES:
        found["violations"].append(f"took {grown >> 20} MiB")
    return found


@pytest.mark.timeout(14_400 if TORTURE else 300)
def test_whatever_is_nearly_right_is_refused_or_read_as_its_own_library_reads_it(
    tmp_path: Path, trials: Trials
) -> None:
    total = {"refused": 0, "accepted": 0}
    count = trials.count(400, 100_000)
    for first in range(0, count, _BATCH):
        number = min(_BATCH, count - first)
        found = in_child(lambda first=first, number=number: batch(tmp_path, trials.seed, first, number), 250)
        assert isinstance(found, dict), f"seed {trials.seed}, case {first} to {first + number}: {found}"
        assert found["violations"] == []
        for verdict in total:
            total[verdict] += found[verdict]
    assert all(total.values()), total
    trials.report("parser fuzzing", count, tmp_path, **total)


def test_the_engine_reads_inside_the_file_or_not_at_all(tmp_path: Path, trials: Trials) -> None:
    """The engine parses nothing. The parsers give it ranges of a file."""
    path = tmp_path / "x"
    content = random.Random(1).randbytes(300_000)
    path.write_bytes(content)
    engine = process_engine()
    verdicts = {"refused": 0, "read": 0}
    count = trials.count(200, 20_000)
    for _ in range(count):
        rng = trials.random
        ranges = []
        for _ in range(rng.randint(0, 4)):
            begin = rng.randrange(len(content)) if rng.random() < 0.9 else rng.choice(EDGES)
            size = rng.choice((0, 1, rng.randrange(5000), len(content) - begin, rng.choice(EDGES)))
            ranges.append((begin, max(0, size) % 2**64))
        inside = all(begin + size <= len(content) for begin, size in ranges)
        places = [bytearray(size) if inside else bytearray(1) for _, size in ranges]
        views = [(array("B", place), place) for place in places]
        offsets, sizes = array("Q", [b for b, _ in ranges]), array("Q", [s for _, s in ranges])
        pointers = [view.buffer_info()[0] if view else 0 for view, _ in views]
        try:
            _engine.RangeReader(engine, os.fspath(path), offsets, sizes).read_into(array("Q", pointers))
        except OSError:
            assert not inside
            verdicts["refused"] += 1
            continue
        assert inside
        for (begin, size), (view, _) in zip(ranges, views, strict=True):
            assert view.tobytes() == content[begin : begin + size]
        verdicts["read"] += 1
    assert all(verdicts.values())
    trials.report("ranges of a file, told to the engine", count, tmp_path, **verdicts)
