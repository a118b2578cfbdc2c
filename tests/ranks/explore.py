"""Runs the protocol of votes.py through every order of events, with a store and a file system of our own.

Each rank is a greenlet. It gives way before every call of the store and of the folder, so those calls are the steps of
the exploration. At each of them the explorer may let any rank take its step, kill one, let one suspect another that it
waits for, lose the store, or let a rename report ENOENT although it happened, as NFS may. A rank that others suspect
falsely is one that sleeps; whatever it does later it does when it has woken up. The explorer replays the ranks for
every path, and skips states that it has seen: what the store and the folder hold, and what each rank has been told.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from greenlet import GreenletExit, getcurrent, greenlet

from lazyckpt.errors import RankError
from lazyckpt.ranks.rounds import NO_RANKS, Point, RankLost, Seat, StoreLost
from lazyckpt.ranks.votes import Ballot

FINAL = "final"


class Tree(NamedTuple):
    """A folder: the name under which it was staged, and the files in it."""

    name: str
    files: frozenset[str]


class Choice(NamedTuple):
    """What happens next. ``actor`` takes outcome ``variant`` of its step, is killed, or loses the store."""

    what: str
    actor: int = -1
    variant: int = 0


@dataclass
class Budget:
    """How often each misfortune may happen on one path."""

    kills: int = 0
    suspicions: int = 0  # of a rank that is alive
    losses: int = 0  # of the store
    lies: int = 0  # renames that report ENOENT although they happened


class Violation(AssertionError):
    """A promise of the protocol is broken. The message tells the path."""


@dataclass
class Actor:
    """A process: a rank, or somebody else who works in the folder."""

    number: int
    greenlet: Any = None
    outcomes: Callable[[], list[Callable[[], Any]]] | None = None  # of its next step; none while it waits
    heard: list[Hashable] = field(default_factory=list)
    answer: Any = None
    done: bool = False
    dead: bool = False


class World:
    """What all actors share, on one path."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.keys: dict[str, bytes] = {}
        self.tree: dict[str, Tree] = {}
        self.owner = 1  # the generation to which the folder belongs
        self.lost = False  # the store
        self.notes: list[tuple[Any, ...]] = []  # what the actors want to be known
        self.actors: list[Actor] = []
        self.over = False
        self.explorer = getcurrent()

    def step(self, name: str, outcomes: Callable[[], list[Callable[[], Any]]]) -> Any:
        """Gives way, then takes the outcome that the explorer has chosen. Waits while there is none."""
        if self.over:
            raise GreenletExit
        (actor,) = (a for a in self.actors if a.greenlet is getcurrent())
        actor.outcomes = outcomes
        outcome = self.explorer.switch()
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
        shared = (frozenset(self.keys.items()), frozenset(self.tree.items()), self.owner, self.lost)
        return shared, actors, budget, frozenset(self.notes)

    @property
    def live(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.dead]


class FakeStore:
    """The ``Store`` of one rank."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _call(self, name: str, act: Callable[[], Any]) -> Any:
        return self._world.step(name, lambda: [_lost if self._world.lost else act])

    def claim(self, key: str, value: bytes) -> bytes:
        return self._call(f"claim {key}", lambda: self._world.keys.setdefault(key, value))  # type: ignore[no-any-return]

    def look(self, key: str) -> bytes | None:
        return self._call(f"look {key}", lambda: self._world.keys.get(key))  # type: ignore[no-any-return]

    def count(self, key: str) -> int:
        def act() -> int:
            number = int(self._world.keys.get(key, b"0")) + 1
            self._world.keys[key] = b"%d" % number
            return number

        return self._call(f"count {key}", act)  # type: ignore[no-any-return]

    def delete(self, key: str) -> None:
        self._call(f"delete {key}", lambda: self._world.keys.pop(key, None) and None)

    release = delete

    def wait(
        self, key: str, *, rank: int, at: Point, unless: str | None = None, others: Mapping[int, str] = NO_RANKS
    ) -> bytes | None:
        world = self._world

        def dead() -> list[int]:
            missing = [other for other, its in others.items() if its not in world.keys]
            return [other for other in (rank, *missing) if world.actors[other].dead]

        def gone() -> None:
            raise RankLost(next(iter(dead()), rank), "has given no sign of life")

        def suspect() -> None:
            world.budget.suspicions -= 1
            gone()

        def outcomes() -> list[Callable[[], Any]]:
            if world.lost:
                return [_lost]
            if unless is not None and unless in world.keys:
                return [lambda: None]
            if key in world.keys:
                return [lambda: world.keys[key]]
            if dead():
                return [gone]
            return [suspect] if world.budget.suspicions > 0 else []

        return world.step(f"wait {key}", outcomes)  # type: ignore[no-any-return]


def _lost() -> None:
    raise StoreLost("connection reset")


class FakeFolder:
    """The ``Folder`` of one save, as one rank sees it."""

    def __init__(self, world: World, name: str, generation: int) -> None:
        self._world, self._name, self._generation = world, name, generation
        self._trash, self._aside = f"trash {name}", f"aside {name}"

    def _do(self, name: str, act: Callable[[], Any]) -> Any:
        return self._world.step(name, lambda: [act])

    def _race(self, name: str, act: Callable[[], Any], to: str, gone: Any) -> Any:
        """A rename of the staged folder, which may happen and report that the folder was gone."""

        def lie() -> Any:
            self._world.budget.lies -= 1
            act()
            return gone

        def outcomes() -> list[Callable[[], Any]]:
            happens = self._name in self._world.tree and to not in self._world.tree
            return [act, lie] if happens and self._world.budget.lies > 0 else [act]

        return self._world.step(name, outcomes)

    def _rename(self, old: str, new: str) -> bool:
        if old not in self._world.tree:
            return False
        assert new not in self._world.tree, f"{old} replaces {new}"
        self._world.tree[new] = self._world.tree.pop(old)
        return True

    def create(self) -> None:
        """Makes this folder."""
        self._do("create", lambda: self._world.tree.update({self._name: Tree(self._name, frozenset())}))

    def write(self, file: str) -> None:
        """Makes a file in this folder durable."""

        def act() -> None:
            if self._name not in self._world.tree:
                raise FileNotFoundError(2, "No such file or directory", self._name)
            tree = self._world.tree[self._name]
            self._world.tree[self._name] = Tree(tree.name, tree.files | {file})

        self._do(f"write {file}", act)

    def taken_by(self) -> str | None:
        return self._do("owner", lambda: None if self._world.owner == self._generation else "another job")  # type: ignore[no-any-return]

    def to_final(self) -> str:
        def act() -> str:
            if FINAL in self._world.tree and self._name in self._world.tree:
                return "occupied"
            return "done" if self._rename(self._name, FINAL) else "gone"

        return self._race("to_final", act, FINAL, "gone")  # type: ignore[no-any-return]

    def to_trash(self) -> bool:
        return self._race("to_trash", lambda: self._rename(self._name, self._trash), self._trash, False)  # type: ignore[no-any-return]

    def set_aside(self) -> None:
        self._do("set_aside", lambda: self._rename(FINAL, self._aside) and None)

    def put_back(self) -> None:
        self._do("put_back", lambda: None if FINAL in self._world.tree else self._rename(self._aside, FINAL) and None)

    def is_published(self) -> bool:
        def act() -> bool:
            found = self._world.tree.get(FINAL)
            return found is not None and found.name == self._name

        return self._do("is_published", act)  # type: ignore[no-any-return]

    def sync(self) -> None:
        self._do("sync", lambda: self._world.notes.append(("synced", self._name)))

    def await_decision(self) -> None:
        self._do("await_decision", lambda: None)

    def remove_aside(self) -> None:
        """Removes what ``set_aside`` moved, after the commit."""
        self._do("remove_aside", lambda: self._world.tree.pop(self._aside, None) and None)

    def remove_trash(self) -> None:
        self._do("remove_trash", lambda: self._world.tree.pop(self._trash, None) and None)


# The explorer

Program = Callable[[World, int], Any]
Check = Callable[[World, bool], None]


@dataclass
class Explored:
    """What an exploration has seen: states, and what the actors answered at the ends of all paths."""

    states: int = 0
    answers: set[Any] = field(default_factory=set)


def explore(
    programs: list[Program],
    check: Check,
    budget: Budget | None = None,
    prepare: Callable[[World], None] = lambda world: None,
) -> Explored:
    """Runs an actor for each program through every order of events. Calls ``check`` in every state, with True where no
    actor can take a step any more. Raises Violation."""
    explored = Explored()
    seen: set[int] = set()
    paths: list[list[Choice]] = [[]]
    while paths:
        path = paths.pop()
        world = _start(programs, budget or Budget(), prepare)
        try:
            for choice in path:
                _take(world, choice)
            while (state := hash(world.state())) not in seen:
                seen.add(state)
                explored.states += 1
                choices = _choices(world)
                check(world, not any(choice.what == "step" for choice in choices))
                if not choices:
                    explored.answers.add(tuple(actor.answer for actor in world.actors))
                    break
                paths += [[*path, choice] for choice in choices[1:]]
                path = [*path, choices[0]]
                _take(world, choices[0])
        except AssertionError as error:
            raise Violation(_report(error, path, world)) from error
        finally:
            _stop(world)
    return explored


def follow(
    programs: list[Program],
    check: Check,
    pick: Callable[[int], int],
    budget: Budget,
    prepare: Callable[[World], None] = lambda world: None,
) -> World:
    """Runs one path, on which ``pick(n)`` selects one of n choices. Raises Violation."""
    world = _start(programs, budget, prepare)
    path: list[Choice] = []
    try:
        while choices := _choices(world):
            check(world, not any(choice.what == "step" for choice in choices))
            path.append(choices[pick(len(choices))])
            _take(world, path[-1])
        check(world, True)
    except AssertionError as error:
        raise Violation(_report(error, path, world)) from error
    finally:
        _stop(world)
    return world


def _start(programs: list[Program], budget: Budget, prepare: Callable[[World], None]) -> World:
    world = World(Budget(**vars(budget)))
    prepare(world)
    for number, program in enumerate(programs):
        actor = Actor(number)
        actor.greenlet = greenlet(_run)
        world.actors.append(actor)
        actor.greenlet.switch(world, program, actor)
    return world


def _run(world: World, program: Program, actor: Actor) -> None:
    actor.answer = program(world, actor.number)
    actor.done = True


def _choices(world: World) -> list[Choice]:
    """What may happen now. Steps come first, misfortunes last."""
    steps: list[Choice] = []
    rare: list[Choice] = []
    active = [actor for actor in world.live if not actor.done]
    for actor in active:
        assert actor.outcomes is not None
        for variant, outcome in enumerate(actor.outcomes()):
            if outcome.__name__ in ("suspect", "lie"):
                rare.append(Choice(outcome.__name__, actor.number, variant))
            else:
                steps.append(Choice("step", actor.number, variant))
        if world.budget.kills > 0:
            rare.append(Choice("kill", actor.number))
    if world.budget.losses > 0 and not world.lost and active:
        rare.append(Choice("lose"))
    return steps + rare


def _take(world: World, choice: Choice) -> None:
    if choice.what == "kill":
        world.budget.kills -= 1
        world.actors[choice.actor].dead = True
    elif choice.what == "lose":
        world.budget.losses -= 1
        world.lost = True
    else:
        actor = world.actors[choice.actor]
        assert actor.outcomes is not None
        actor.greenlet.switch(actor.outcomes()[choice.variant])


def _stop(world: World) -> None:
    world.over = True
    for actor in world.actors:
        actor.greenlet.throw(GreenletExit)


def _report(error: AssertionError, path: list[Choice], world: World) -> str:
    actors = [f"  actor {a.number}{' (dead)' if a.dead else ''}: {a.answer}, heard {a.heard}" for a in world.actors]
    happened = [f"  {' '.join(map(str, choice))}" for choice in path]
    return "\n".join([str(error), *happened, *actors, f"  {world.tree}", f"  {world.keys}", f"  {world.notes}"])


# Ranks, as the pipeline drives them


@dataclass(frozen=True)
class Saves:
    """A rank that saves checkpoints one after the other. Its answers are pairs: "committed" or "aborted", and the rank
    that the error names."""

    ordinals: tuple[int, ...] = (1,)
    world_size: int = 2
    fan_in: int = 8
    generation: int = 1
    rank: int | None = None  # its actor's number, if not given
    fails: frozenset[tuple[int, int]] = frozenset()  # rank and ordinal: cannot write
    disagrees: frozenset[tuple[int, int]] = frozenset()  # saves something else
    raises: frozenset[tuple[int, int]] = frozenset()  # fails inside save()

    def __call__(self, world: World, number: int) -> tuple[Any, ...]:
        rank = number if self.rank is None else self.rank
        seat = Seat("run", self.generation, rank, self.world_size, FakeStore(world), Path("runs/a"), self.fan_in)
        previous = None
        answers = []
        for ordinal in self.ordinals:
            ballot = Ballot(
                seat,
                ordinal,
                100 + ordinal,
                "another layout" if (rank, ordinal) in self.disagrees else "layout",
                target=Path(FINAL),
                folder=lambda name: FakeFolder(world, name, self.generation),
                previous=previous,
            )
            try:
                self._save(world, ballot, rank, ordinal)
                answer = ("committed", None)
            except RankError as error:
                answer = ("aborted", error.rank)
                world.notes.append(("error", ordinal, rank, str(error)))
            assert ballot.settled
            world.notes.append(("answer", ordinal, *answer))
            answers.append(answer)
            previous = ballot
        return tuple(answers)

    def _save(self, world: World, ballot: Ballot, rank: int, ordinal: int) -> None:
        try:
            if (rank, ordinal) in self.raises:
                raise OSError(12, "Cannot allocate memory")
            if rank == 0:
                name = f"staged {self.generation}.{ordinal}"
                FakeFolder(world, name, self.generation).create()
                ballot.begin(name)
            else:
                name, _ = ballot.staged_name()
            folder = FakeFolder(world, name, self.generation)
            if (rank, ordinal) in self.fails:
                raise OSError(28, "No space left on device")
            folder.write(f"{rank} of {self.generation}")
            ballot.vote(b"%d" % rank)
            world.notes.append(("voted", ordinal, rank))
            if rank > 0:
                ballot.outcome()
            else:
                assert ballot.receipts() == [b"%d" % other for other in range(self.world_size)]
                folder.write("manifest")
                ballot.decide()
                folder.remove_aside()
        except OSError as error:
            if (refused := ballot.refuse(str(error))) is not None:
                raise refused from None

    def whole(self) -> frozenset[str]:
        """The files of a committed checkpoint."""
        return frozenset(["manifest", *(f"{rank} of {self.generation}" for rank in range(self.world_size))])


def pairs(*found: tuple[int, int]) -> frozenset[tuple[int, int]]:
    return frozenset(found)


def answers_of(world: World, ordinal: int) -> set[str]:
    """What the ranks that have answered say of a save."""
    return {note[2] for note in world.notes if note[:2] == ("answer", ordinal)}


def standing(world: World) -> Tree | None:
    """The checkpoint that a restart finds: the one with the final name, or the one that recovery gives it."""
    asides = [tree for name, tree in world.tree.items() if name.startswith("aside")]
    return world.tree.get(FINAL, asides[0] if asides else None)
