"""Builds and reads every state in which a power cut may leave the disk, from the record of a save (images.py).

The cut comes after each line of the record. For a small state the test builds an image for every subset of the changes
not yet synced; for one of many blocks it draws a seeded sample. What was acknowledged before the cut must be there, and
everything with a final name must be whole.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.actor import FEW_WORDS, WORDS, Server, Task
from crash.history import History, Violation, contents
from crash.images import Image, Record, is_name, subsets
from lazyckpt.storage import removal
from trials import Trials

SCENARIOS = (
    *("first", "second", "again", "retention", "reopened", "lone", "lone_over", "saver_file", "staged", "filled"),
    *(MIRRORED := ("mirrored", "mirrored_again", "mirrored_retention")),
)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on tmpfs, since each image is read once."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm")
    folder = shm / f"lazyckpt-images-{random.SystemRandom().getrandbits(64):x}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def record(server: Server, folder: Path, scenario: str, **options: object) -> tuple[Path, Record]:
    root, log = folder / "root", folder / "log"
    root.mkdir(parents=True)
    task = Task(str(root), str(log), scenario, record=True, **options)  # type: ignore[arg-type]
    server.run(task)
    return log, Record(log, root)


class Images:
    """The images of one record. Each is read once, since many subsets of changes make the same image."""

    def __init__(self, record: Record, folder: Path) -> None:
        self.record, self.folder = record, folder
        self.images: dict[frozenset[int], Image] = {}
        self.read: dict[Image, dict[str, int] | Violation] = {}
        self.index = {id(change): number for number, change in enumerate(record.changes)}
        self.cuts = self.exhaustive = self.legal = 0

    def contents(self, applied: frozenset[int]) -> dict[str, int]:
        if applied not in self.images:
            self.images[applied] = self.record.image(applied)
        image = self.images[applied]
        if image not in self.read:
            self.read[image] = self._contents(image)
        result = self.read[image]
        if isinstance(result, Violation):
            raise result
        return result

    def _contents(self, image: Image) -> dict[str, int] | Violation:
        path = self.folder / "image"
        image.write(path)
        try:
            found = contents(path)
            for folder in (path, path / "run", path / "mirror"):
                if folder.is_dir():
                    removal.sweep(folder)
            if contents(path) != found:
                raise Violation("sweeping took something away")
            return found
        except Violation as violation:
            return violation
        finally:
            shutil.rmtree(path)

    def check(self, most: int, chance: random.Random) -> int:
        """Reads up to ``most`` images at each cut. Returns how many of these violate a promise."""
        history = History()
        violations = 0
        for cut, words in enumerate(self.record.lines):
            history.note(words)
            if cut not in self.record.cuts():
                continue
            certain, possible = ([self.index[id(change)] for change in changes] for changes in self.record.at(cut))
            self.cuts += 1
            self.legal += 1 << len(possible)
            self.exhaustive += 1 << len(possible) <= most
            for some in subsets(possible, lambda c: is_name(self.record.changes[c]), most, chance):
                try:
                    history.compare(self.contents(frozenset({*certain, *some})))
                except Violation as violation:
                    violations += 1
                    self.last = f"cut after {words}: {violation}"
        return violations


def check_all(server: Server, folder: Path, memory: Path, trials: Trials, figure: str, words: int, most: int) -> None:
    """Reads all images at each cut of every scenario, or up to ``most``."""
    counts: Counter[str] = Counter()
    for scenario in SCENARIOS:
        _, recorded = record(server, folder / scenario, scenario, words=words)
        images = Images(recorded, memory)
        assert images.check(most, trials.random) == 0, f"{scenario}: {images.last}"
        if words == FEW_WORDS and scenario not in MIRRORED:  # two threads change files: at a few cuts many are pending
            assert images.exhaustive == images.cuts, scenario
        for name in ("cuts", "exhaustive", "legal"):
            counts[name] += getattr(images, name)
        counts["tried"] += len(images.images)
        counts["different"] += len(images.read)
    trials.report(
        figure,
        counts["tried"],
        folder,
        different_images=counts["different"],
        of_legal=f"{counts['legal']:.1e}",
        cuts=counts["cuts"],
        all_of_them_at=counts["exhaustive"],
        saves=len(SCENARIOS),
    )


@pytest.mark.long
def test_every_crash_image(server: Server, tmp_path: Path, memory: Path, trials: Trials) -> None:
    check_all(server, tmp_path, memory, trials, "every crash image of a small save", FEW_WORDS, most=1 << 16)


@pytest.mark.timeout(60 * 60)
def test_crash_images_of_many_blocks(server: Server, tmp_path: Path, memory: Path, trials: Trials) -> None:
    most = trials.count(4, 1024)
    check_all(server, tmp_path, memory, trials, "crash images of a save of many blocks", WORDS, most)


MUTANTS = {
    "the parent is not synced": ("second", {"drop": "fsync run"}),
    "the folder is not synced": ("second", {"drop": "fsync .tmp-step-00000002"}),
    "the manifest is not synced": ("second", {"drop": "fsync manifest.json"}),
    "the manifest is synced too early": ("second", {"mutant": "sync_early"}),
    "the file is not synced": ("second", {"fault": "sync:2:lost"}),
    "the file is not synced, one step replaces another": ("again", {"fault": "sync:3:lost"}),
    "written under the final name": ("second", {"mutant": "in_place"}),
    "renamed before it is described": ("second", {"mutant": "rename_first"}),
    "acknowledged before it is published": ("second", {"mutant": "acknowledge_early"}),
    "the old one goes first": ("retention", {"mutant": "retain_early"}),
    "an exchange is not synced": ("again", {"drop": "fsync run"}),
    "a lone file is not synced": ("lone", {"fault": "sync:1:lost"}),
    "the folder of a lone file is not synced": ("lone_over", {"drop": "fsync root"}),
    "a copy in a mirror is not synced": ("mirrored", {"drop": "fsync state.pt"}),
    "its folder is not synced": ("mirrored", {"drop": "fsync .tmp-step-00000001"}),
    "the mirror is not synced": ("mirrored", {"drop": "fsync mirror"}),
    "a copy that replaces another is not synced": ("mirrored_again", {"drop": "fsync state.pt"}),
}


@pytest.mark.long(first=10)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_images_find_mutants(server: Server, tmp_path: Path, memory: Path, trials: Trials, mutant: str) -> None:
    """A protocol without a sync, or with a misplaced step, fails nine times out of ten, even with few images."""
    scenario, options = MUTANTS[mutant]
    _, recorded = record(server, tmp_path, scenario, **options)
    times = trials.count(1, 20)
    caught = sum(Images(recorded, memory).check(6, trials.random) > 0 for _ in range(times))
    assert caught >= 0.9 * times, f"{caught} of {times}"
