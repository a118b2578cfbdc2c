"""No order of events breaks a promise of the commit by many ranks (ranks/votes.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyckpt.errors import RankError
from lazyckpt.ranks.rounds import Seat, children_of, exchange
from ranks.explore import (
    FINAL,
    Budget,
    Check,
    Explored,
    FakeStore,
    Saves,
    Tree,
    World,
    answers_of,
    explore,
    follow,
    standing,
)
from trials import Trials

OLD = Tree("old", frozenset(["old"]))  # the checkpoint that the save replaces


def old_checkpoint(world: World) -> None:
    world.tree[FINAL] = OLD


def promises(saves: Saves, *, sleeps: bool = False) -> Check:
    """Returns a check of what must hold in every state. ``sleeps``: a rank that is taken for dead may wake up and die
    later, at an instant when only a restart can put the previous checkpoint back."""

    def check(world: World, end: bool) -> None:
        found = standing(world)
        assert found is not None, "the previous checkpoint is lost"
        assert found == OLD or found.files == saves.whole(), f"a mixture is committed: {found}"
        for ordinal in saves.ordinals:
            name = f"staged {saves.generation}.{ordinal}"
            answers = answers_of(world, ordinal)
            assert len(answers) < 2, "the ranks answer differently"
            if answers == {"committed"}:
                later = [f"staged {saves.generation}.{later}" for later in saves.ordinals if later >= ordinal]
                assert found.name in later, "committed, and not there"
                assert ("synced", name) in world.notes, "committed, and not durable"
            if answers == {"aborted"}:
                assert found.name != name, "aborted, and there"
        if end:
            waiting = [actor.number for actor in world.live if not actor.done]
            assert not waiting, f"actors hang: {waiting}"
            died = [actor.number for actor in world.actors if actor.dead]
            if not died or (died == [0] and not world.lost and not sleeps):
                assert FINAL in world.tree, "an abort leaves the previous checkpoint under another name"
            if not died:
                assert world.lost or not world.keys, f"keys are left: {list(world.keys)}"

    return check


def tried(saves: Saves, budget: Budget | None = None) -> Explored:
    sleeps = budget is not None and budget.suspicions + budget.lies > 0
    return explore([saves] * saves.world_size, promises(saves, sleeps=sleeps), budget, old_checkpoint)


# All orders of events


@pytest.mark.long(first=6)
@pytest.mark.parametrize(
    "budget",
    [
        Budget(),
        Budget(kills=2),
        Budget(suspicions=3),
        Budget(losses=1),
        Budget(kills=1, suspicions=1, lies=1),
        Budget(kills=1, losses=1, lies=1),
        Budget(suspicions=1, losses=1),
        pytest.param(Budget(kills=2, suspicions=4, losses=1, lies=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_keep_every_promise_in_every_order_of_events(budget: Budget) -> None:
    found = tried(Saves(world_size=2), budget)
    assert found.states > 30


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    "budget",
    [
        Budget(kills=1),
        Budget(suspicions=1),
        pytest.param(Budget(losses=1, lies=1), marks=pytest.mark.slow),
        pytest.param(Budget(kills=1, suspicions=1, lies=1), marks=pytest.mark.slow),
        pytest.param(Budget(kills=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.timeout(3600)
def test_three_ranks_keep_every_promise_in_every_order_of_events(budget: Budget) -> None:
    tried(Saves(world_size=3), budget)


@pytest.mark.parametrize("fan_in", [2, 3])
def test_many_ranks_on_several_nodes_keep_every_promise(fan_in: int, trials: Trials) -> None:
    """Random orders: several saves, ranks that cannot write, leaders that die."""

    @trials.examples(100, 20_000)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        world_size = data.draw(st.integers(3, 9))
        saves_of = st.sets(st.tuples(st.integers(0, world_size - 1), st.integers(1, 3)), max_size=1)
        saves = Saves((1, 2, 3), world_size, fan_in, fails=frozenset(data.draw(saves_of)))
        budget = Budget(*(data.draw(st.integers(0, most)) for most in (2, 2, 1, 1)))
        random = data.draw(st.randoms(use_true_random=False))

        def pick(choices: int) -> int:
            return random.randrange(choices)

        follow([saves] * world_size, promises(saves, sleeps=True), pick, budget, old_checkpoint)

    run()


def test_the_tree_reaches_every_rank_once_with_few_children() -> None:
    for world_size in (1, 2, 8, 9, 100, 1000):
        for fan_in in (2, 3, 8):
            below = [child for rank in range(world_size) for child in children_of(rank, world_size, fan_in)]
            assert sorted(below) == list(range(1, world_size))
    assert len(children_of(0, 16_384)) == 7 * 4 + 3
    assert children_of(8, 16_384) == [9, 10, 11, 12, 13, 14, 15]


# The faults of docs/durability.md


def voted(world: World, rank: int) -> bool:
    """Whether the vote of a rank has reached the store."""
    return any(name == f"claim run/1/save-1/{rank}" for name, _ in world.actors[rank].heard)


def test_a_rank_that_dies_before_its_vote_aborts_the_save_and_one_that_dies_later_does_not() -> None:
    saves = Saves(world_size=3)
    seen = set()

    def check(world: World, end: bool) -> None:
        promises(saves)(world, end)
        dead = [actor.number for actor in world.actors if actor.dead]
        if end and dead and dead != [0]:
            seen.add(voted(world, dead[0]))
            answer = ("committed", None) if voted(world, dead[0]) else ("aborted", dead[0])
            assert all(actor.answer == (answer,) for actor in world.live)
            assert (world.tree[FINAL] == OLD) == (not voted(world, dead[0]))

    explore([saves] * 3, check, Budget(kills=1), old_checkpoint)
    assert seen == {False, True}


def test_a_rank_0_that_dies_before_the_rename_aborts_the_save_and_one_that_dies_later_does_not() -> None:
    saves = Saves(world_size=3)
    seen = set()

    def check(world: World, end: bool) -> None:
        promises(saves)(world, end)
        if end and world.actors[0].dead:
            renamed = ("to_final", "done") in world.actors[0].heard
            seen.add(renamed)
            answer = ("committed", None) if renamed else ("aborted", 0)
            assert all(actor.answer == (answer,) for actor in world.live)
            assert (world.tree[FINAL] == OLD) == (not renamed)

    explore([saves] * 3, check, Budget(kills=1), old_checkpoint)
    assert seen == {False, True}


def test_a_rank_0_that_sleeps_through_its_decision_finds_the_folder_gone_and_answers_as_the_others() -> None:
    saves = Saves(world_size=2)
    seen = set()

    def check(world: World, end: bool) -> None:
        promises(saves)(world, end)
        if end and world.live == world.actors and ("to_final", "gone") in world.actors[0].heard:
            seen.add(world.actors[0].answer)
            assert world.tree[FINAL] == OLD

    explore([saves] * 2, check, Budget(suspicions=1), old_checkpoint)
    assert seen == {(("aborted", 0),)}


def test_ranks_that_lose_the_store_settle_by_the_folder() -> None:
    """The process of rank 0 may serve the store, and exit first."""
    found = tried(Saves(world_size=2), Budget(losses=1))
    verdicts = {tuple(answer[0][0] for answer in answers) for answers in found.answers}
    assert verdicts == {("aborted", "aborted"), ("committed", "committed")}


def test_a_rank_that_cannot_write_aborts_the_save_of_all_and_is_named() -> None:
    for rank in range(3):
        found = tried(Saves(world_size=3, fails=frozenset({(rank, 1)})))
        assert found.answers == {((("aborted", rank),),) * 3}


def test_a_rank_whose_save_raises_aborts_the_save_of_all_and_is_named() -> None:
    for rank in range(3):
        found = tried(Saves(world_size=3, raises=frozenset({(rank, 1)})), Budget(suspicions=1) if rank == 1 else None)
        assert ((("aborted", rank),),) * 3 in found.answers


def test_ranks_that_save_different_things_are_both_named() -> None:
    saves = Saves(world_size=2, disagrees=frozenset({(1, 1)}))
    told = set()

    def check(world: World, end: bool) -> None:
        promises(saves)(world, end)
        told.update(note[3] for note in world.notes if note[0] == "error")

    explore([saves] * 2, check, prepare=old_checkpoint)
    assert told == {
        "checkpoint not saved (step 101: final): rank 1 saves step 101 with layout another layout; rank 0 saves it "
        "with layout layout"
    }


def test_the_next_save_after_an_aborted_one_commits() -> None:
    found = tried(Saves((1, 2), world_size=2, fails=frozenset({(1, 1)})))
    assert found.answers == {((("aborted", 1), ("committed", None)),) * 2}


def test_a_stale_rank_of_an_older_generation_has_no_vote() -> None:
    new, stale = Saves(world_size=2, generation=2), Saves(world_size=2, generation=1, rank=1)

    def check(world: World, end: bool) -> None:
        found = standing(world)
        assert found is not None and (found == OLD or found.files == new.whole()), f"a mixture is committed: {found}"

    def prepare(world: World) -> None:
        old_checkpoint(world)
        world.owner = 2

    found = explore([new, new, stale], check, prepare=prepare)
    assert {answers[:2] for answers in found.answers} == {((("committed", None),),) * 2}


def test_an_older_generation_publishes_nothing_once_a_new_one_has_read_the_folder() -> None:
    saves = Saves(world_size=2)

    def restart(world: World, _: int) -> None:
        """A new generation, before its first save: job.py and storage/removal.py."""

        def own() -> None:
            world.owner = 2

        def sweep() -> None:
            for name in [name for name in world.tree if name.startswith("staged")]:
                world.tree[f"trash by the new one of {name}"] = world.tree.pop(name)

        def recover() -> None:
            for name in [name for name in world.tree if name.startswith("aside")]:
                if FINAL not in world.tree:
                    world.tree[FINAL] = world.tree.pop(name)

        for name, act in (("own", own), ("recover", recover), ("sweep", sweep)):
            world.step(name, lambda act=act: [act])
        world.step("open", lambda: [lambda: world.notes.append(("opened", standing(world)))])

    def check(world: World, end: bool) -> None:
        opened = [note[1] for note in world.notes if note[0] == "opened"]
        assert not opened or opened == [standing(world)], "the folder changes under the new generation"
        if end and len(world.live) == len(world.actors):
            assert FINAL in world.tree

    found = explore([saves, saves, restart], check, Budget(kills=1), old_checkpoint)
    assert found.states > 1000


# Exchanges


@pytest.mark.parametrize("budget", [Budget(), Budget(kills=1), Budget(suspicions=1)], ids=str)
def test_an_exchange_gives_all_values_to_all_ranks_or_names_the_lost_one_to_all(budget: Budget) -> None:
    def program(world: World, rank: int) -> Any:
        seat = Seat("run", 1, rank, 3, FakeStore(world), Path("runs/a"), fan_in=2)
        try:
            return tuple(exchange(seat, 1, "a topic", b"%d" % rank))
        except RankError as error:
            assert "the ranks do not agree on a topic" in str(error)
            return error.rank

    values = (b"0", b"1", b"2")

    def check(world: World, end: bool) -> None:
        answers = [actor.answer for actor in world.actors if actor.done]
        assert all(answer == answers[0] for answer in answers), "the ranks answer differently"
        assert budget.kills or budget.suspicions or all(answer == values for answer in answers)
        if end:
            assert all(actor.done for actor in world.live), "an actor hangs"
            assert len(world.live) < 3 or not world.keys

    assert explore([program] * 3, check, budget).states > 50
