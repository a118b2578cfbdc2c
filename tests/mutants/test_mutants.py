"""Takes out every safety in turn: a test that is meant for it must notice. ``make mutants`` runs all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mutants import Copy, Mutant, located
from mutants.anchors import ROOT
from mutants.table import MUTANTS
from trials import Trials

IN_MAKE_TEST = ("a step does not wait", "the manifest is not synced", "a record's checksum is not compared")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    base = tmp_path_factory.getbasetemp()
    of_the_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    copy = Copy(tmp_path_factory.mktemp("mutants"), of_the_run / "objects")
    yield copy
    copy.close()


@pytest.mark.long
def test_each_mutant_finds_its_anchor_and_its_tests() -> None:
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert (ROOT / mutant.promise.document).exists(), mutant.promise
        file, changed = mutant.edit.apply()
        assert changed != (ROOT / file).read_text(), f"{mutant.what}: nothing changes in {file}"
    for test in (*BY_TRIALS.values(), *(test for mutant in MUTANTS for test in mutant.tests.split())):
        file, _, name = located(test).partition("[")[0].partition("::")
        assert not name or f"def {name}(" in (ROOT / "tests" / file).read_text(), f"there is no {test}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_fails_as_it_is(copy: Copy) -> None:
    tests = dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests.split())
    assert copy.run(" ".join(tests), limit_s=3500).caught_by is None, copy.output.read_text(errors="replace")[-5000:]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.what, marks=() if m.what in IN_MAKE_TEST else pytest.mark.slow) for m in MUTANTS],
)
def test_a_mutant_is_noticed(mutant: Mutant, copy: Copy, record_property: Callable[[str, object], None]) -> None:
    outcome = copy.run(mutant.tests, mutant)
    assert outcome.caught_by is not None, f"{mutant.what} ({mutant.edit.anchor}), and {mutant.tests} pass"
    for name, value in {"mutant": mutant.what, **outcome._asdict()}.items():
        record_property(name, value)


# Trials are random. Even a short run of them must notice, nine times out of ten.
BY_TRIALS = {
    "a record's checksum is not compared": "crash/test_damage.py::test_damage_anywhere",
    "a failed write or sync is ignored": "test_faults.py::test_every_operation_of_a_save_fails",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", BY_TRIALS)
def test_trials_notice_nearly_always(what: str, copy: Copy, trials: Trials, tmp_path: Path) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.what == what)
    tests = BY_TRIALS[what]
    assert copy.run(tests).caught_by is None
    times = 10
    noticed = sum(copy.run(tests, mutant).caught_by is not None for _ in range(times))
    assert noticed >= 0.9 * times, f"{noticed} of {times}"
    trials.report(f"runs of {tests.split('::')[1]} that notice: {what}", times, tmp_path, noticed=noticed)
