"""The ranks of a benchmark agree, and end together."""

from __future__ import annotations

import os

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from benchmarks.paired import ArmFailed
from benchmarks.ranks.member import Member, run_ranks

pytestmark = pytest.mark.usefixtures("spawned_is_forked")


def _fail_on_the_last(member: Member, task: str) -> list[str]:
    try:
        member.together(lambda: 1 // (member.size - 1 - member.rank))
    except ArmFailed as failed:
        return member.gather(str(failed))
    return []


def _die_on_the_last(member: Member, task: str) -> None:
    if member.rank == member.size - 1:
        os._exit(3)
    member.barrier()


def test_an_arm_that_fails_on_one_rank_fails_on_all() -> None:
    reasons = run_ranks(_fail_on_the_last, 2, "", print)
    assert len(reasons) == 2 and len(set(reasons)) == 1
    assert "ZeroDivisionError" in reasons[0] and reasons[0].endswith("(rank 1)")


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(ProcessExitedException, match="exit code 3"):
        run_ranks(_die_on_the_last, 2, "", print)
