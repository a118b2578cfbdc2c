"""Every writer, at every instant, in every container, under every witness that works here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from trials import TORTURE, Trials
from writers import registry
from writers.trial import HELD, INSTANTS, Plan, Round, Trial, witnesses

WITNESSES = witnesses()
IDS = [w or "no knob" for w in WITNESSES]
BOTH = [(witness, name) for witness in WITNESSES for name in registry.names(witness, slow=TORTURE)]


@pytest.mark.parametrize(("witness", "name"), BOTH, ids=[f"{w or 'no knob'}-{n}" for w, n in BOTH])
def test_each_writer(witness: str | None, name: str, trial: Trial) -> None:
    """Once with the copies held back, once in a race, twice in a row."""
    if reason := registry.REGISTRY[name].unavailable():
        pytest.skip(reason)
    rounds = (Round(1, HELD), Round(1, "at once"), Round(1, "during"))
    trial.run(Plan(name, witness, rounds=rounds))


@st.composite
def plans(draw: Any, witness: str | None) -> Plan:
    name = draw(st.sampled_from([n for n in registry.names(witness, slow=TORTURE) if _is_available(n)]))
    writer = registry.REGISTRY[name]
    rounds = st.builds(Round, st.integers(0, 2), st.sampled_from([*INSTANTS, None]))
    return Plan(
        name,
        witness,
        draw(st.sampled_from(sorted(writer.ways))),
        draw(st.sampled_from(writer.sizes)),
        tuple(draw(st.lists(rounds, min_size=1, max_size=4))),
        draw(st.integers(0, 2**32)),
    )


def _is_available(name: str) -> bool:
    return not registry.REGISTRY[name].unavailable()


@pytest.mark.timeout(7200)  # with all trials
@pytest.mark.parametrize("witness", WITNESSES, ids=IDS)
def test_any_sequence(witness: str | None, trial: Trial, trials: Trials) -> None:
    """The instant of save(), or an error by name and then a save that commits; with copy-on-write, never an error."""
    count = trials.count(40, 1500)
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
    trials.report(
        f"writers in every window, {'no knob' if witness is None else f'witness={witness}'}",
        count,
        trial._folder,
        **{
            f"saves_that_{'committed' if k == 'committed' else 'named_the_tensor'}": n
            for k, n in trial.outcomes.items()
        },
    )
