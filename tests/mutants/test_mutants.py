"""Every safety, taken out in turn: a test that is meant for it must notice. ``make mutants`` runs all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mutants import ROOT, Copy, Mutant, Outcome, can_build
from mutants.table import MUTANTS
from trials import Trials

IN_MAKE_TEST = ("a step does not wait", "the manifest is not synced", "a record's checksum is not compared")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    copy = Copy(tmp_path_factory.mktemp("mutants"))
    yield copy
    copy.close()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {}


def test_all_fit_the_sources_and_the_tests() -> None:
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        source = ROOT / mutant.file.replace("lazyckpt/integrations", "integrations")
        assert source.read_text().count(mutant.old) == 1, f"{mutant.file} has changed: {mutant.what}"
        for test in mutant.tests.split():
            file, _, name = test.partition("[")[0].partition("::")
            path = ROOT / "tests" / file
            assert path.exists() and (not name or f"def {name}(" in path.read_text()), f"{mutant.what}: no {test}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_fails_as_it_is(copy: Copy) -> None:
    tests = dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests.split())
    assert copy.run(" ".join(tests)).caught_by is None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.what, marks=() if m.what in IN_MAKE_TEST else pytest.mark.slow) for m in MUTANTS],
)
def test_it_is_noticed(mutant: Mutant, copy: Copy, outcomes: dict[str, Outcome]) -> None:
    if mutant.is_native and not can_build():
        pytest.skip("no C++ compiler or no pybind11")
    outcomes[mutant.what] = outcome = copy.run(mutant.tests, mutant)
    assert outcome.caught_by is not None, f"{mutant.file}: {mutant.what}, and {mutant.tests} pass"


@pytest.mark.slow
def test_all_are_noticed(
    outcomes: dict[str, Outcome], trials: Trials, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Last: the table of what was noticed by whom."""
    assert outcomes.keys() == {mutant.what for mutant in MUTANTS}
    rows = [(m.file, m.what, o.caught_by, f"{o.seconds:.0f}") for m in MUTANTS if (o := outcomes[m.what])]
    with capsys.disabled():
        print("\n| file | mutant | caught by | seconds |\n|---|---|---|--:|")
        print("\n".join(f"| {' | '.join(map(str, row))} |" for row in rows))
    by_language = {"in_C++": sum(m.is_native for m in MUTANTS), "in_Python": sum(not m.is_native for m in MUTANTS)}
    trials.report(
        "mutants (a sync, a rename, a wait, a check removed), each noticed", len(MUTANTS), tmp_path, **by_language
    )
