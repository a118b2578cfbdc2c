from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from writers.judge import Copies
from writers.trial import Trial


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Holds copies back."""
    copies = Copies(monkeypatch)
    yield copies
    copies.cancel()
    copies.release()


@pytest.fixture
def trial(copies: Copies, tmp_path: Path) -> Trial:
    """Runs plans on a disk."""
    return Trial(copies, tmp_path)


@pytest.fixture
def quick_trial(copies: Copies, shm: Path) -> Trial:
    """Runs plans on tmpfs."""
    return Trial(copies, shm)
