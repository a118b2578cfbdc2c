"""No order of events breaks the promises of the commit by many ranks (votes.py)."""

from __future__ import annotations

import pytest

from ranks.explore import FINAL, Budget, Explored, Tree, World, explore, saves, whole

OLD = Tree("old", frozenset(["old"]))


def promises(world_size: int, before: Tree | None = None):
    """A check of every state. ``before``: the checkpoint that has the final name, which this save replaces."""

    def check(world: World, end: bool) -> None:
        ours = world.tree.get(FINAL)
        published = ours is not None and ours.name.startswith("temporary")
        assert not published or ours.files == whole(world_size), "a mixture is committed"
        answers = {(ordinal, answer) for _, ordinal, answer in world.notes}
        for ordinal in {o for o, _ in answers}:
            assert len({a for o, a in answers if o == ordinal}) == 1, "the ranks answer differently"
        if (1, "committed") in answers:
            assert published, "committed, and not there"
        if (1, "aborted") in answers:
            assert not published, "aborted, and there"
        aside = [t for name, t in world.tree.items() if name.startswith("aside")]
        if before is not None and not published:
            assert ours == before or aside == [before], "the previous checkpoint is lost"
        if end:
            live = [a for a in world.actors if not a.dead]
            assert all(a.done for a in live), f"somebody hangs: {[a.number for a in live if not a.done]}"
            if before is not None and len(live) == len(world.actors) and not published:
                assert ours == before, "an abort leaves the previous checkpoint under another name"
            if len(live) == len(world.actors) and not world.lost:
                assert not world.keys, f"keys are left: {world.keys}"

    return check


def tried(ranks: int, before: Tree | None = None, fan_in: int = 8, **budget: int) -> Explored:
    def prepare(world: World) -> None:
        if before is not None:
            world.tree[FINAL] = before

    program = saves(1, world_size=ranks, fan_in=fan_in)
    found = explore([program] * ranks, promises(ranks, before), budget=lambda: Budget(**budget), prepare=prepare)
    print(ranks, budget, found.states, found.ends, found.answers)
    return found


@pytest.mark.parametrize("before", [None, OLD])
def test_two(before):
    import time

    for budget in (
        {},
        {"kills": 1},
        {"suspicions": 2},
        {"losses": 1},
        {"lies": 1},
        {"kills": 1, "suspicions": 1},
        {"kills": 2, "suspicions": 3, "losses": 1, "lies": 1},
    ):
        t = time.time()
        tried(2, before, **budget)
        print(time.time() - t)


def test_three():
    import time

    for budget in ({}, {"kills": 1}, {"suspicions": 1}, {"losses": 1}):
        t = time.time()
        tried(3, OLD, **budget)
        print(time.time() - t)
