"""Compares the saves that a log acknowledges (actor.py) with the disk."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import lazyckpt
from crash.actor import value_of
from lazyckpt.storage import folders, in_place
from lazyckpt.storage.catalog import Catalog

STEP = re.compile(r"step-\d{8}")


class Violation(AssertionError):
    """A promise is broken."""


class History:
    """For each name the values that it may have; None: it may be missing."""

    def __init__(self) -> None:
        self.allowed: dict[str, set[int | None]] = defaultdict(lambda: {None})
        self.let: set[str] = set()  # what retention may remove
        self.theirs: set[str] = set()  # folders that hold a file of others

    def note(self, words: list[str]) -> None:
        match words:
            case ["saving", name, value]:
                self.allowed[name].add(int(value))
            case ["durable", name, value]:
                # The permission may have been noted before it was durable.
                kept = {v for v in self.allowed[name] if v is not None and v >= int(value)}
                self.allowed[name] = kept | ({None} if name in self.let else set())
            case ["letting", name] if name in self.allowed:
                self.let.add(name)
                self.allowed[name].add(None)
            case ["theirs", name]:
                self.theirs.add(name)

    def read(self, log: Path) -> None:
        for line in log.read_text().splitlines():
            self.note(line.split())

    def check(self, root: Path) -> dict[str, int]:
        """Raises Violation; returns what was found."""
        found = contents(root)
        self.compare(found)
        for name in self.theirs & found.keys():
            if not (root / name / "theirs").exists():
                raise Violation(f"what others put into {name} is lost")
        return found

    def compare(self, found: dict[str, int]) -> None:
        for name in self.allowed.keys() | found.keys():
            if found.get(name) not in self.allowed[name]:
                raise Violation(f"{name}: found {found.get(name)}, expected one of {self.allowed[name]}")

    def settle(self, found: dict[str, int]) -> None:
        """What was found after a crash stays."""
        self.allowed.clear()
        self.let.clear()
        self.allowed.update({name: {value} for name, value in found.items()})


def contents(root: Path) -> dict[str, int]:
    """The value of everything that has a final name. Raises Violation if something there is not whole, or if the newest
    checkpoint is not the last one saved."""
    found = {}
    for run in filter(Path.is_dir, (root / "run", root / "mirror")):
        catalog = Catalog(run)
        checkpoints = catalog.scan()
        names = [name for name in os.listdir(run) if STEP.fullmatch(name)]
        if catalog.broken or len(checkpoints) != len(names):
            raise Violation(f"something half has a final name: {names}, {catalog.broken}")
        for checkpoint in checkpoints:
            found[f"{run.name}/{checkpoint.path.name}"] = _load(checkpoint.path, "x")
        values = [found[f"{run.name}/{c.path.name}"] for c in checkpoints]
        if values != sorted(values, reverse=True):
            raise Violation(f"the newest is not the last one saved: {values}")
    if (root / "lone.pt").exists():
        found["lone.pt"] = _load(root / "lone.pt")
    if (root / "staged").exists():
        found["staged"] = _load(root / "staged" / "state.pt")
    if (root / "filled").exists():
        found.update(_filled(root / "filled"))
    return found


def _filled(folder: Path) -> dict[str, int]:
    """Whole if there is a marker, and after it was finished."""
    found: dict[str, int] = {}
    for _ in range(2):
        if (folder / "state.pt").exists():
            found["filled"] = _load(folder / "state.pt")
            if (folder / "value").read_text() != str(found["filled"]):
                raise Violation("the files of two checkpoints are mixed")
        in_place.finish(folder)
    return found


def _load(path: Path, key: str | None = None) -> int:
    try:
        tree = lazyckpt.load(path)
        return value_of(tree if key is None else tree[key])
    except (lazyckpt.LoadError, AssertionError) as error:
        raise Violation(f"{path}: {error}") from error


def staged_in(root: Path) -> list[Path]:
    """What has a temporary name: a save or a removal was under way."""
    unfinished = (folders.TEMPORARY, folders.TRASH)
    return [
        p
        for f in (root, root / "run", root / "mirror")
        if f.is_dir()
        for p in f.iterdir()
        if p.name.startswith(unfinished)
    ]
