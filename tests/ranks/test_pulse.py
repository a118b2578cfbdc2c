"""Signs of life (ranks/pulse.py), on a clock of our own."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from lazyckpt.ranks.pulse import Pulse, Watch
from lazyckpt.ranks.rounds import Point, RankLost
from lazyckpt.ranks.store import PollingClient
from lazyckpt.waits import ABSENT_TIMEOUTS, PULSES_PER_TIMEOUT

TIMEOUT_S = 80.0
PERIOD_S = TIMEOUT_S / PULSES_PER_TIMEOUT
SAVE = Point("save", 0)


class Machine:
    """Two ranks on one clock. Rank 1 watches rank 0."""

    def __init__(self) -> None:
        self.now = 1000.0
        client = PollingClient(HashStore())
        self.rank_0, self.rank_1 = (Pulse(client, "job", rank, TIMEOUT_S, lambda: self.now) for rank in range(2))
        self.rank_0.beat()
        self.rank_1.complete = True

    def watch(self, seconds: float, watch: Watch, *, beats: bool) -> None:
        for _ in range(round(seconds / PERIOD_S)):
            self.now += PERIOD_S
            if beats:
                self.rank_0.beat()
            watch.check()


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_rank_that_beats_may_take_as_long_as_it_needs(machine: Machine) -> None:
    machine.rank_0.reached["save"] = 3
    machine.watch(100 * TIMEOUT_S, Watch(machine.rank_1, 0, SAVE._replace(number=3)), beats=True)


def test_a_rank_without_a_beat_is_lost_after_the_timeout(machine: Machine) -> None:
    watch = Watch(machine.rank_1, 0, SAVE._replace(number=0))
    machine.watch(TIMEOUT_S, watch, beats=False)
    with pytest.raises(RankLost, match="rank 0 has given no sign of life for 80 s"):
        machine.watch(2 * PERIOD_S, watch, beats=False)


def test_one_beat_is_enough_to_be_alive(machine: Machine) -> None:
    watch = Watch(machine.rank_1, 0, SAVE._replace(number=0))
    for _ in range(5):
        machine.watch(TIMEOUT_S, watch, beats=False)
        machine.rank_0.beat()


def test_a_rank_that_lives_and_does_not_save_is_lost_later(machine: Machine) -> None:
    """One that forgot to call save() would keep the others for ever."""
    machine.rank_0.reached["save"] = 2
    watch = Watch(machine.rank_1, 0, SAVE._replace(number=3))
    machine.watch(ABSENT_TIMEOUTS * TIMEOUT_S, watch, beats=True)
    with pytest.raises(RankLost, match="rank 0 lives, but has not reached save number 3 for 400 s"):
        machine.watch(2 * PERIOD_S, watch, beats=True)


def test_a_rank_that_waits_in_the_same_exchange_is_not_blamed(machine: Machine) -> None:
    """It waits for another one, and will blame that."""
    machine.rank_0.reached["exchange"] = 1
    machine.watch(10 * ABSENT_TIMEOUTS * TIMEOUT_S, Watch(machine.rank_1, 0, Point("exchange", 1)), beats=True)
    with pytest.raises(RankLost, match="rank 0 lives, but takes no part for 400 s"):
        machine.watch(2 * ABSENT_TIMEOUTS * TIMEOUT_S, Watch(machine.rank_1, 0, Point("exchange", 2)), beats=True)


def test_a_rank_that_has_closed_is_lost_at_once(machine: Machine) -> None:
    machine.rank_0.stop()
    with pytest.raises(RankLost, match="rank 0 has closed its Checkpointer or Saver"):
        Watch(machine.rank_1, 0, SAVE._replace(number=1)).check()


def test_a_rank_that_has_not_joined_yet_is_not_taken_for_one_that_has_closed(machine: Machine) -> None:
    machine.rank_1.complete = False
    machine.rank_0.stop()
    watch = Watch(machine.rank_1, 0, SAVE._replace(number=1))
    machine.watch(ABSENT_TIMEOUTS * TIMEOUT_S, watch, beats=False)
    with pytest.raises(RankLost, match="rank 0 has ended, or has opened no Checkpointer or Saver for 400 s"):
        machine.watch(2 * PERIOD_S, watch, beats=False)


def test_a_watcher_that_slept_blames_nobody(machine: Machine) -> None:
    """A stopped job, or a process that a debugger held, wakes up before the others have beaten again."""
    watch = Watch(machine.rank_1, 0, SAVE._replace(number=1))
    for _ in range(3):
        machine.now += 1e6
        watch.check()
