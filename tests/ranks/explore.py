"""Runs the protocol of votes.py through every order of events, with a store and a file system of our own.

Each rank is a greenlet. It gives way before every call of the store and of the folder, so those calls are the steps of
the exploration. At each of them the explorer may let any rank take its step, kill one, let one suspect another that it
waits for (a rank that others suspect falsely is one that sleeps, and wakes up later), lose the store, or let a rename
report ENOENT although it happened, as NFS does. The explorer replays the program for every path and skips the states
that it has seen: what the store and the folder hold, and what each rank has been told so far.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from greenlet import GreenletExit, getcurrent, greenlet

from lazyckpt.errors import RankError
from lazyckpt.ranks.rounds import RankLost, Seat, StoreLost
from lazyckpt.ranks.votes import Ballot

TEMPORARY, FINAL, TRASH, ASIDE = "temporary", "final", "trash", "aside"


class Tree(NamedTuple):
    """A folder: what it is, and the files in it."""

    name: str
    files: frozenset[str]


class Choice(NamedTuple):
    """What the explorer lets happen next."""

    what: str  # step, kill, suspect, lose
    actor: int = -1
    variant: int = 0


@dataclass
class Budget:
    """How often each misfortune may happen on one path."""

    kills: int = 0
    suspicions: int = 0
    losses: int = 0
    lies: int = 0  # renames that report ENOENT although they happened


class Violation(AssertionError):
    """A promise of the protocol is broken; ``path`` leads there."""


@dataclass
class Actor:
    """A process: one rank, or somebody else who works in the folder."""

    number: int
    glet: Any = None
    ready: Callable[[], list[Any]] | None = None  # the outcomes that its next step may have
    heard: list[Hashable] = field(default_factory=list)
    answer: Any = None
    done: bool = False
    dead: bool = False


class World:
    """What all actors share, on one path."""

    def __init__(self, budget: Budget) -> None:
        self.keys: dict[str, bytes] = {}
        self.tree: dict[str, Tree] = {}
        self.owner = 1  # the generation to which the folder belongs
        self.lost = False
        self.notes: list[Hashable] = []
        self.actors: list[Actor] = []
        self.budget = budget
        self.over = False
        self.hub = getcurrent()

    def step(self, name: str, outcomes: Callable[[], list[Any]]) -> Any:
        """Gives way; then takes one of the outcomes: values to return, or functions to call. Without any, waits."""
        if self.over:
            raise GreenletExit
        actor = next(a for a in self.actors if a.glet is getcurrent())
        actor.ready = outcomes
        outcome = self.hub.switch()
        if self.over:
            raise GreenletExit
        try:
            result = outcome()
        except Exception as error:
            actor.heard.append((name, repr(error)))
            raise
        actor.heard.append((name, result))
        return result

    def state(self) -> Hashable:
        actors = tuple((tuple(a.heard), a.dead) for a in self.actors)
        budget = (self.budget.kills, self.budget.suspicions, self.budget.losses, self.budget.lies)
        keys = frozenset(self.keys.items())
        return keys, frozenset(self.tree.items()), self.owner, self.lost, tuple(self.notes), actors, budget


class FakeStore:
    """The ``Store`` of one rank."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _call(self, name: str, act: Callable[[], Any]) -> Any:
        def do() -> Any:
            if self._world.lost:
                raise StoreLost("connection reset")
            return act()

        return self._world.step(name, lambda: [do])

    def set(self, key: str, value: bytes) -> None:
        self._call(f"set {key}", lambda: self._world.keys.__setitem__(key, value))

    def claim(self, key: str, value: bytes) -> bytes:
        return self._call(f"claim {key}", lambda: self._world.keys.setdefault(key, value))  # type: ignore[no-any-return]

    def look(self, key: str) -> bytes | None:
        return self._call(f"look {key}", lambda: self._world.keys.get(key))  # type: ignore[no-any-return]

    def count(self, key: str) -> int:
        def add() -> int:
            self._world.keys[key] = b"%d" % (int(self._world.keys.get(key, b"0")) + 1)
            return int(self._world.keys[key])

        return self._call(f"count {key}", add)  # type: ignore[no-any-return]

    def delete(self, key: str) -> None:
        self._call(f"delete {key}", lambda: self._world.keys.pop(key, None) and None)

    def release(self, key: str) -> None:
        self._call(f"release {key}", lambda: self._world.keys.pop(key, None) and None)

    def wait(self, key: str, *, rank: int, save: float, unless: str | None = None) -> bytes | None:
        world = self._world

        def lost() -> None:
            raise StoreLost("connection reset")

        def dead() -> None:
            raise RankLost(rank, "gives no sign of life")

        def suspect() -> None:
            world.budget.suspicions -= 1
            dead()

        def outcomes() -> list[Any]:
            if world.lost:
                return [lost]
            if unless is not None and unless in world.keys:
                return [lambda: None]
            if key in world.keys:
                return [lambda: world.keys[key]]
            if world.actors[rank].dead or world.actors[rank].done:
                return [dead]
            return [suspect] if world.budget.suspicions > 0 else []

        return world.step(f"wait {key}", outcomes)  # type: ignore[no-any-return]


class FakeFolder:
    """The ``Folder`` of one save, as one rank sees it."""

    def __init__(self, world: World, name: str, generation: int = 1) -> None:
        self._world, self._name, self._generation = world, name, generation

    def _rename(self, old: str, new: str) -> bool:
        tree = self._world.tree
        if old not in tree:
            return False
        assert new not in tree, f"{old} replaces {new}"
        tree[new] = tree.pop(old)
        return True

    def _raced(self, name: str, new: str, happened: Any, gone: Any) -> Any:
        """Two outcomes: the truth, and ENOENT for a rename that happened."""

        def act() -> Any:
            return happened if self._rename(self._name, new) else gone

        def lie() -> Any:
            self._world.budget.lies -= 1
            self._rename(self._name, new)
            return gone

        def outcomes() -> list[Any]:
            return [act, lie] if self._world.budget.lies > 0 and self._name in self._world.tree else [act]

        return self._world.step(name, outcomes)

    def create(self, name: str) -> None:
        """Creates this staged folder."""

        def act() -> None:
            self._world.tree[self._name] = Tree(self._name, frozenset())

        self._world.step(f"create {name}", lambda: [act])

    def write(self, file: str) -> None:
        """Makes a file in the staged folder durable."""

        def act() -> None:
            tree = self._world.tree
            if self._name not in tree:
                raise FileNotFoundError(2, "No such file or directory", self._name)
            tree[self._name] = Tree(self._name, tree[self._name].files | {file})

        self._world.step(f"write {file}", lambda: [act])

    def owner(self) -> str | None:
        def act() -> str | None:
            return None if self._world.owner == self._generation else "another job"

        return self._world.step("owner", lambda: [act])  # type: ignore[no-any-return]

    def to_final(self) -> str:
        def act() -> str:
            if FINAL in self._world.tree and self._name in self._world.tree:
                return "occupied"
            return "done" if self._rename(self._name, FINAL) else "gone"

        def lie() -> str:
            self._world.budget.lies -= 1
            act()
            return "gone"

        def outcomes() -> list[Any]:
            happens = self._name in self._world.tree and FINAL not in self._world.tree
            return [act, lie] if self._world.budget.lies > 0 and happens else [act]

        return self._world.step("to_final", outcomes)  # type: ignore[no-any-return]

    def to_trash(self) -> bool:
        return self._raced("to_trash", f"{TRASH} {self._name}", True, False)  # type: ignore[no-any-return]

    def set_aside(self) -> None:
        self._world.step("set_aside", lambda: [lambda: self._rename(FINAL, f"{ASIDE} {self._name}") and None])

    def put_back(self) -> None:
        def act() -> None:
            if FINAL not in self._world.tree:
                self._rename(f"{ASIDE} {self._name}", FINAL)

        self._world.step("put_back", lambda: [act])

    def is_published(self) -> bool:
        def act() -> bool:
            found = self._world.tree.get(FINAL)
            return found is not None and found.name == self._name

        return self._world.step("is_published", lambda: [act])  # type: ignore[no-any-return]

    def sync(self) -> None:
        self._world.step("sync", lambda: [lambda: None])

    def await_decision(self) -> None:
        self._world.step("await_decision", lambda: [lambda: None])

    def remove_trash(self) -> None:
        self._world.step("remove_trash", lambda: [lambda: self._world.tree.pop(f"{TRASH} {self._name}", None) and None])


Program = Callable[[World, int], Any]
Check = Callable[[World, bool], None]


@dataclass
class Explored:
    """What an exploration has seen."""

    states: int = 0
    ends: int = 0
    answers: set[Any] = field(default_factory=set)


def explore(
    programs: list[Program],
    check: Check,
    *,
    budget: Callable[[], Budget] = Budget,
    prepare: Callable[[World], None] = lambda world: None,
    limit: int = 10_000_000,
) -> Explored:
    """Runs one actor for each program through all orders of events. Calls ``check`` in every state, and with True where
    nothing can happen any more. Raises Violation."""
    explored = Explored()
    seen: set[int] = set()
    paths: list[list[Choice]] = [[]]
    while paths and explored.states < limit:
        path = paths.pop()
        world = _start(programs, budget(), prepare)
        try:
            for choice in path:
                _take(world, choice)
            while True:
                if (state := hash(world.state())) in seen:
                    break
                seen.add(state)
                explored.states += 1
                choices = _choices(world)
                end = not any(choice.what == "step" for choice in choices)
                check(world, end)
                if end and not choices:
                    explored.ends += 1
                    explored.answers.add(tuple(actor.answer for actor in world.actors))
                    break
                if not choices:
                    break
                paths += [[*path, choice] for choice in choices[1:]]
                path = [*path, choices[0]]
                _take(world, choices[0])
        except AssertionError as error:
            told = "\n".join(f"  {a.number}: {a.answer} {'dead' if a.dead else ''} {a.heard}" for a in world.actors)
            raise Violation(f"{error}\nafter {path}\n{told}\n{world.tree}\n{world.keys}") from error
        finally:
            _stop(world)
    return explored


def follow(
    programs: list[Program],
    check: Check,
    pick: Callable[[int], int],
    *,
    budget: Budget,
    prepare: Callable[[World], None] = lambda world: None,
) -> World:
    """Runs one path: ``pick(n)`` selects one of n choices."""
    world = _start(programs, budget, prepare)
    try:
        while choices := _choices(world):
            check(world, not any(choice.what == "step" for choice in choices))
            _take(world, choices[pick(len(choices))])
        check(world, True)
    finally:
        _stop(world)
    return world


def _start(programs: list[Program], budget: Budget, prepare: Callable[[World], None]) -> World:
    world = World(budget)
    prepare(world)
    for number, program in enumerate(programs):
        actor = Actor(number)
        world.actors.append(actor)
        actor.glet = greenlet(lambda program=program, actor=actor: _run(world, program, actor))
    for actor in world.actors:
        actor.glet.switch()
    return world


def _run(world: World, program: Program, actor: Actor) -> None:
    actor.answer = program(world, actor.number)
    actor.done = True


def _choices(world: World) -> list[Choice]:
    choices: list[Choice] = []
    rare: list[Choice] = []
    for actor in world.actors:
        if actor.dead or actor.done:
            continue
        assert actor.ready is not None
        outcomes = actor.ready()
        for variant, outcome in enumerate(outcomes):
            what = "step" if outcome.__name__ not in ("suspect", "lie") else outcome.__name__
            (choices if what == "step" else rare).append(Choice(what, actor.number, variant))
        if world.budget.kills > 0:
            rare.append(Choice("kill", actor.number))
    if world.budget.losses > 0 and not world.lost and any(not a.done and not a.dead for a in world.actors):
        rare.append(Choice("lose"))
    return choices + rare


def _take(world: World, choice: Choice) -> None:
    if choice.what == "kill":
        world.budget.kills -= 1
        world.actors[choice.actor].dead = True
    elif choice.what == "lose":
        world.budget.losses -= 1
        world.lost = True
    else:
        actor = world.actors[choice.actor]
        assert actor.ready is not None
        actor.glet.switch(actor.ready()[choice.variant])


def _stop(world: World) -> None:
    world.over = True
    for actor in world.actors:
        if not actor.glet.dead:
            actor.glet.throw(GreenletExit)


# Ranks, as the pipeline drives them


def seat(world: World, rank: int, world_size: int, fan_in: int = 8, generation: int = 1) -> Seat:
    return Seat("run", generation, rank, world_size, FakeStore(world), Path("runs/a"), fan_in)


def saves(
    *ordinals: int,
    world_size: int,
    fan_in: int = 8,
    generation: int = 1,
    fails: Iterable[tuple[int, int]] = (),
    disagrees: Iterable[tuple[int, int]] = (),
) -> Program:
    """A rank that saves checkpoints, one after the other. Answers with what each came to.

    ``fails``: the ranks, by ordinal, that fail before they have voted; ``disagrees``: those with another layout."""

    def program(world: World, rank: int) -> Any:
        own = seat(world, rank, world_size, fan_in, generation)
        answers = []
        previous = None
        for ordinal in ordinals:
            layout = "other" if (rank, ordinal) in set(disagrees) else "layout"
            ballot = Ballot(
                own,
                ordinal,
                100 + ordinal,
                layout,
                target=Path(FINAL),
                folder=lambda name: FakeFolder(world, name, generation),
                previous=previous,
            )
            fail = (rank, ordinal) in set(fails)
            answers.append(_save(world, ballot, rank, f"{TEMPORARY} {generation}.{ordinal}", generation, fail))
            world.notes.append((rank, ordinal, answers[-1]))
            previous = ballot
        return tuple(answers)

    return program


def _save(world: World, ballot: Ballot, rank: int, name: str, generation: int, fails: bool) -> str:
    try:
        try:
            if rank == 0:
                FakeFolder(world, name, generation).create(name)
                ballot.begin(name)
            else:
                name, _ = ballot.staged_name()
            folder = FakeFolder(world, name, generation)
            if fails:
                raise OSError(28, "No space left on device")
            folder.write(f"rank {rank}")
            ballot.vote(b"%d" % rank)
            if rank == 0:
                told = ballot.receipts()
                assert told == [b"%d" % r for r in range(len(told))]
                folder.write("manifest")
                ballot.decide()
            else:
                ballot.outcome()
        except OSError as error:
            if (refused := ballot.refuse(str(error))) is not None:
                raise refused from None
    except RankError as error:
        assert error.rank >= 0 and error.what
        assert ballot.settled
        return "aborted"
    assert ballot.settled
    return "committed"


def whole(world_size: int) -> frozenset[str]:
    return frozenset([f"rank {rank}" for rank in range(world_size)] + ["manifest"])
