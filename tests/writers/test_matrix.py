"""Every writer, under every witness that works here: once held back, once in a race, once in a loop."""

from __future__ import annotations

import pytest

from trials import TORTURE
from writers import registry
from writers.trial import HELD, Plan, Round, Trial, refused, witnesses

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint not saved")
BOTH = [(witness, name) for witness in witnesses() for name in registry.names(witness, slow=TORTURE)]


@pytest.mark.parametrize("witness", ["pages", "versions"])
def test_what_is_not_tried_here_is_skipped_with_its_reason(witness: str) -> None:
    if reason := refused(witness):
        assert witness != "versions", reason
        pytest.skip(reason)


@pytest.mark.long(first=13)
@pytest.mark.parametrize(("witness", "name"), BOTH, ids=[f"{w}-{n}" for w, n in BOTH])
def test_each_writer(witness: str, name: str, quick_trial: Trial) -> None:
    """Twice: save by save with the copies held back, in a race and, under one witness, in the middle of the copies; and
    in a loop, in another container and size."""
    writer = registry.REGISTRY[name]
    if reason := writer.unavailable():
        pytest.skip(reason)
    number = list(registry.REGISTRY).index(name)
    able = [w for w in witnesses() if name in registry.names(w, slow=True)]
    during = TORTURE or able[number % len(able)] == witness
    quick_trial.run(Plan(name, witness, rounds=(Round(1, HELD), Round(1, "at once"), *[Round(1, "during")] * during)))
    way = sorted(writer.ways)[number % len(writer.ways)]
    sizes = [size for size in writer.sizes if size != "large"]  # which test_sequences and test_regressions take
    size = sizes[number % len(sizes)]
    quick_trial.run(
        Plan(name, witness, way, size, (Round(1, HELD), Round(0, "last chunk")), seed=number, patient=False)
    )
