"""Makes every decision that a save keeps anew, and compares."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from held_files import Files

from lazyckpt.capture.decision import Decision, Decisions


def contents(decision: Decision) -> dict[str, Any]:
    """What a decision says, to compare two of them."""
    return vars(decision) | {
        "files": [(*file.columns(), file.offsets) for file in decision.files],
        "owners": list(decision.owners),
        "places": vars(decision.places),
        "by_owner": {id(owner): found for owner, found in decision.by_owner.items()},
    }


@pytest.fixture
def kept_decisions() -> list[Decision]:
    """The decisions that saves of this test have kept from the save before."""
    return []


@pytest.fixture(autouse=True)
def kept_decisions_are_those_that_would_be_made(
    monkeypatch: pytest.MonkeyPatch, kept_decisions: list[Decision]
) -> Iterator[None]:
    decide, again = Decisions.decide, Decisions._again
    kept = []

    def noted(*args: Any) -> Any:
        kept[:] = [again(*args)]
        return kept[0]

    def checked(self: Decisions, *facts: Any) -> Any:
        kept[:] = [None]
        decision, frozen = decide(self, *facts)
        if kept[0] is not None:
            kept_decisions.append(decision)
            anew = copy.copy(self)._decide(*facts[:3], frozen)
            assert contents(decision) == contents(anew)
        return decision, frozen

    monkeypatch.setattr(Decisions, "_again", noted)
    monkeypatch.setattr(Decisions, "decide", checked)
    yield


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    files = Files(monkeypatch)
    yield files
    files.release()
