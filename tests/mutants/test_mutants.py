"""Every safety, taken out in turn: a test that is meant for it must notice. ``make mutants`` runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mutants import ROOT, Copy, Mutant, can_build
from mutants.table import MUTANTS

IN_MAKE_TEST = ("a step does not wait", "the manifest is not synced", "a record's checksum is not compared")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    copy = Copy(tmp_path_factory.mktemp("mutants"))
    yield copy
    copy.close()


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
    assert copy.run(" ".join(tests)).caught_by is None, copy.output.read_text(errors="replace")[-5000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.what, marks=() if m.what in IN_MAKE_TEST else pytest.mark.slow) for m in MUTANTS],
)
def test_it_is_noticed(mutant: Mutant, copy: Copy, record_property: Callable[[str, object], None]) -> None:
    if mutant.is_native and not can_build():
        pytest.skip("no C++ compiler or no pybind11")
    outcome = copy.run(mutant.tests, mutant)
    assert outcome.caught_by is not None, f"{mutant.file}: {mutant.what}, and {mutant.tests} pass"
    for name, value in {"mutant": mutant.what, **outcome._asdict()}.items():
        record_property(name, value)
