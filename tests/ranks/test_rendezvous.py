"""A rank that waits for others to join says after seconds who is missing, and stops if it waits in vain."""

from __future__ import annotations

import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from lazyckpt import waits
from lazyckpt.errors import ConfigError, LazyCkptError, RankError
from lazyckpt.ranks.group import join
from lazyckpt.ranks.rendezvous import Rendezvous


def waited(missing: dict[float, list[int]], until_s: int, *, world: int = 20) -> dict[int, str]:
    """What a wait of so many seconds warned of, and when. ``missing``: the ranks, from a time on."""
    now = 0.0
    watch = Rendezvous(Path("/runs/a"), world, 600, lambda: None, "All ranks come", clock=lambda: now)
    watch.missing = lambda: missing[max(begin for begin in missing if begin <= now)]
    told = {}
    while now < until_s:
        now += 0.5
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.look()
        for warning in caught:
            told[round(now)] = str(warning.message)
    return told


def test_the_missing_ranks_are_named_again_and_again_at_growing_intervals() -> None:
    told = waited({0: [1, 3], 60: [3]}, 600)
    assert list(told) == [5, 20, 80, 320]
    assert "/runs/a: ranks 1, 3 of 20 not there after 5 s. All ranks come." in told[5] and "up to 600 s" in told[5]
    assert "rank 3 of 20" in told[80]


def test_few_of_many_are_named_and_nobody_if_all_are_there() -> None:
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more of 101 not" in waited({0: list(range(1, 101))}, 6, world=101)[5]
    assert waited({0: []}, 100) == {}


def refused() -> None:
    raise ConfigError("in vain")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lone_rank_says_so_and_stops_if_it_waits_in_vain(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it waited for ten minutes, in silence."""
    monkeypatch.setattr(waits, "FIRST_REMINDER_S", 0.1)
    looks = iter([None, None, refused])

    def waiting() -> None:
        if (act := next(looks)) is not None:
            act()

    with (
        pytest.warns(UserWarning, match=rf"rank {1 - rank} of 2 not there"),
        pytest.raises(ConfigError, match="in vain"),
    ):
        join(HashStore(), rank, 2, tmp_path, 60, waiting)


def test_rank_0_names_the_missing_ones_wherever_they_sit_in_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "FIRST_REMINDER_S", 0.3)
    store = HashStore()

    def call(rank: int) -> Any:
        try:
            return join(store, rank, 12, tmp_path, 0.3)
        except LazyCkptError as error:
            return error

    with ThreadPoolExecutor(12) as pool, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = list(pool.map(call, [rank for rank in range(12) if rank not in (9, 11)]))
    assert all(isinstance(error, RankError) and error.rank in (9, 11) for error in found)
    told = [str(warning.message) for warning in caught]
    assert any(re.search("ranks 9, 11 of 12 not there", text) for text in told), told
