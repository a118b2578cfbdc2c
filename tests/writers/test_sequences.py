"""Any writer, at any instant, in any container, under every witness that works here: random sequences of saves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from trials import TORTURE, Trials
from writers import registry
from writers.trial import HELD, INSTANTS, PENDING, Plan, Round, Trial, witnesses

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint not saved")
WITNESSES = witnesses()


@st.composite
def plans(draw: Any, witness: str) -> Plan:
    name = draw(st.sampled_from([n for n in registry.names(witness, slow=TORTURE) if _is_available(n)]))
    writer = registry.REGISTRY[name]
    rounds = st.builds(Round, st.integers(0, 2), st.sampled_from([HELD, HELD, *INSTANTS, None]))
    return Plan(
        name,
        witness,
        draw(st.sampled_from(sorted(writer.ways))),
        draw(st.sampled_from(writer.sizes)),
        tuple(draw(st.lists(rounds, min_size=2, max_size=4))),
        seed=draw(st.integers(0, 2**32)),
        patient=draw(st.booleans()),
        evaluates=draw(st.booleans()),
        ring_chunks=draw(st.sampled_from([2, 4, 1000])),
        copy_threads=draw(st.integers(1, 2)),
    )


def _is_available(name: str) -> bool:
    return not registry.REGISTRY[name].unavailable()


@pytest.mark.timeout(7200)  # with all trials
@pytest.mark.parametrize("witness", WITNESSES)
def test_any_sequence(witness: str, trial: Trial, trials: Trials) -> None:
    """The instant of save(), or an error by name and then a save that commits."""
    count = trials.count(10, 1500)
    common = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not TORTURE,
        phases=[Phase.generate],  # a race does not shrink
        suppress_health_check=list(HealthCheck),
    )

    @common
    @given(plans(witness))
    def run(plan: Plan) -> None:
        trial.run(plan)

    (seed(trials.seed)(run) if TORTURE else run)()
    in_time = sum(found for name, found in trial.outcomes.items() if name.startswith(PENDING))
    assert in_time > count / 10, "hardly a write came in time to tear anything"
    trials.report(
        f"writers in every window, witness={witness}",
        count,
        trial._folder,
        **{name.replace(" ", "_"): found for name, found in sorted(trial.outcomes.items())},
    )
