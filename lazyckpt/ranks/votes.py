"""The commit of one checkpoint by many ranks: two phases through a store, decided by one rename.

    begin     rank 0 names the staged folder and says which save this is; the others compare that with theirs
    write     each rank makes its files durable in the staged folder
    vote      a rank votes once its files are durable and every rank below it in the tree has voted
    receipts  rank 0 has all votes. It describes the checkpoint in the staged folder
    decide    rank 0 renames the staged folder to its final name, syncs the folder above, and tells the outcome
    settle    every rank gives the same answer; the last one deletes the keys

Rank 0 needs every vote. So a rank that has not voted can abort by saying so, and rank 0 always can. A rank that has
voted can abort in one way only: it renames the staged folder to trash. That rename and the one of ``decide`` have the
same source, so exactly one of them happens, and the folder shows which. A rank 0 that sleeps through its
decision finds the folder gone. A rank that votes has settled all earlier saves, so no later save replaces or removes a
checkpoint that some rank has yet to look for.

This module knows neither torch nor files nor clocks. tests/ranks/explore.py runs it through every order of events.
DataStates-LLM, section V, has the hierarchical asynchronous two-phase commit; the rename is ours.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

from lazyckpt.errors import RankError
from lazyckpt.ranks.rounds import Aborted, Point, RankLost, Round, Seat, StoreLost, decode, pack

COMMITTED = json.dumps({"committed": True}).encode()


class Folder(Protocol):
    """The staged folder of one save. Every call is one step, before and after which a process may die or sleep.

    Raises OSError."""

    def taken_by(self) -> str | None:
        """None if the run's folder still belongs to this job, else a phrase for the job that has taken it."""

    def to_final(self) -> Literal["done", "gone", "occupied"]:
        """Renames the staged folder to its final name, unless a checkpoint has that.

        "gone": it has another name; on NFS, which may repeat a call, perhaps the final one."""

    def to_trash(self) -> bool:
        """Whether this call renamed the staged folder to trash."""

    def set_aside(self) -> None:
        """Renames the checkpoint that has the final name to a name from which recovery takes it back."""

    def put_back(self) -> None:
        """Gives the checkpoint that ``set_aside`` moved its name back, if that is free."""

    def is_published(self) -> bool:
        """Whether the folder with the final name is the one that was staged."""

    def sync(self) -> None:
        """Syncs the folder above, so that the final name survives a power cut, and names it the latest."""

    def await_decision(self) -> None:
        """Returns when the staged folder has another name, or after the timeout of the job."""

    def remove_trash(self) -> None:
        """Removes the folder that ``to_trash`` renamed."""


class Ballot:
    """One save, as one rank takes part in it.

    Rank 0 calls ``begin``, ``vote``, ``receipts`` and ``decide``; the others call ``staged_name``, ``vote`` and
    ``outcome``. Each raises RankError once the save is aborted, on every rank. A rank that fails calls ``refuse``
    instead of the next call. One thread at a time; ``aborted`` may be called from any.
    """

    def __init__(
        self,
        seat: Seat,
        ordinal: int,
        step: int | None,
        layout: str,
        *,
        target: Path,
        folder: Callable[[str], Folder],
        previous: Ballot | None = None,
    ) -> None:
        self._seat = seat
        self._round = Round(seat, Point("save", ordinal))
        self._begin: dict[str, object] = {"ordinal": ordinal, "step": step, "layout": layout}
        self._step = step
        self._target = target
        self._open = folder
        self._folder: Folder | None = None
        self._previous = previous
        self._own: bytes | None = None  # rank 0's receipt
        self._bound = False  # can no longer refuse: the vote is out, or rank 0 has begun to rename
        self._answer: Aborted | bool | None = None  # True: committed
        self.step_of_rank_0: int | None = None  # under this number, if it is another one than here

    # begin, write, vote

    def begin(self, name: str, note: str = "") -> None:
        """Rank 0: tells the others the name of the staged folder, and ``note``."""
        self._folder = self._open(name)
        record = json.dumps({**self._begin, "name": name, "note": note}).encode()
        with self._certain_abort():
            told = self._seat.store.claim(self._round.key("begin"), record)
            if (aborted := decode(told)) is not None:
                raise RankLost(aborted.rank, aborted.why)

    def staged_name(self) -> tuple[str, str]:
        """Returns the name of the staged folder and the note, once rank 0 has begun. Refuses another ordinal, step or
        layout."""
        with self._certain_abort():
            told = self._seat.store.wait(self._round.key("begin"), rank=0, at=self._round.at)
            assert told is not None
            if (aborted := decode(told)) is not None:
                raise RankLost(aborted.rank, aborted.why)
            record = json.loads(told)
            name, note = record.pop("name"), record.pop("note")
            if record != self._begin:
                if record["step"] != self._step:
                    self.step_of_rank_0 = record["step"]
                raise RankLost(self._seat.rank, _difference(self._begin, record))
        self._folder = self._open(name)
        return name, note

    def begun(self) -> tuple[bool, int | None]:
        """Other ranks: whether rank 0 has begun, or a rank has aborted, and which step rank 0 saves. One message."""
        told = self._seat.store.look(self._round.key("begin"))
        if told is None or decode(told) is not None:
            return told is not None, None
        return True, json.loads(told)["step"]

    def vote(self, receipt: bytes) -> None:
        """Votes yes: this rank's files are durable. Waits for the ranks below. ``receipt`` is for rank 0."""
        assert self._previous is None or self._previous.settled, "a rank that votes has settled all earlier saves"
        if self._seat.rank == 0:
            self._own = receipt
            return
        with self._certain_abort():
            votes = self._gather(receipt)
            self._bound = True  # also if the store fails: the vote may have arrived
            with contextlib.suppress(StoreLost):  # ``outcome`` notices
                self._seat.store.claim(self._round.key(self._seat.rank), pack(votes))

    def refuse(self, why: str) -> RankError | None:
        """Aborts the save for all ranks, since this one failed. Returns the error to report.

        A rank that has voted cannot take that back. It waits for the outcome. Returns None if that is a commit."""
        failed = Aborted(self._seat.rank, f"failed: {why}")
        if self._answer is None and not self._bound:
            self._abort(failed)
        elif self._answer is None and self._seat.rank == 0:
            self._settle_by_folder(failed)
        elif self._answer is None:
            with contextlib.suppress(RankError):
                self.outcome()
        return self._error()

    def aborted(self) -> RankError | None:
        """Returns the error of a save that some rank has aborted, so that the others can stop early. One message."""
        if self._answer is None:
            with contextlib.suppress(StoreLost):
                told = self._seat.store.look(self._round.outcome)
                if told is not None and (aborted := decode(told)) is not None:
                    return self._error(aborted)
        return self._error()

    @property
    def settled(self) -> bool:
        """Whether this rank has its answer."""
        return self._answer is not None

    def forgotten(self) -> bool:
        """Whether all ranks have settled this save, so that its keys are gone. Raises StoreLost."""
        return self._seat.store.look(self._round.settled) is None

    # receipts, decide, settle

    def receipts(self) -> list[bytes]:
        """Rank 0: returns the receipts of all ranks, by rank."""
        assert self._own is not None, "rank 0 votes before it asks for the receipts"
        with self._certain_abort():
            votes = self._gather(self._own)
        return [votes[rank] for rank in range(self._seat.world_size)]

    def decide(self) -> None:
        """Rank 0: publishes the checkpoint."""
        folder = self._folder
        assert folder is not None and self._seat.rank == 0
        try:
            if (taken_by := folder.taken_by()) is not None:
                self._abort(Aborted(0, f"finds that {self._seat.directory} belongs to {taken_by} now"))
            else:
                self._bound = True
                late = Aborted(0, "did not decide in time, and another rank aborted")
                self._settle(_synced(folder) if _published(folder) else late)
        except OSError as error:
            self.refuse(_told(error))
        self._raise_aborted()

    def outcome(self) -> None:
        """Other ranks: returns once the checkpoint is committed."""
        if self._answer is None:
            try:
                told = self._seat.store.wait(self._round.outcome, rank=0, at=self._round.at)
                assert told is not None
                self._answered(decode(told) or True)
            except RankLost as lost:
                self._settle_by_folder(Aborted(lost.rank, lost.why))
            except StoreLost as error:
                assert self._folder is not None
                self._folder.await_decision()
                self._settle_by_folder(self._seat.without_store(error))
        self._raise_aborted()

    def _gather(self, own: bytes) -> dict[int, bytes]:
        votes = self._round.gather(own)
        if votes is None:
            told = self._seat.store.look(self._round.outcome)
            aborted = decode(told) if told is not None else None
            assert aborted is not None, "nothing is committed without this rank's vote"
            raise RankLost(aborted.rank, aborted.why)
        return votes

    @contextlib.contextmanager
    def _certain_abort(self) -> Iterator[None]:
        """Aborts if a rank or the store is lost before this rank has voted, or as rank 0 before it decides."""
        try:
            yield
        except RankLost as lost:
            self._abort(Aborted(lost.rank, lost.why))
        except StoreLost as error:
            self._abort(self._seat.without_store(error))
        self._raise_aborted()

    def _abort(self, aborted: Aborted) -> None:
        """Aborts for all: rank 0 has not tried to publish, or waits for the vote of this rank."""
        folder = self._folder
        self._settle(aborted)
        if self._seat.rank == 0 and folder is not None:
            with contextlib.suppress(OSError):  # the next sweep removes it
                if folder.to_trash():
                    folder.remove_trash()

    def _settle_by_folder(self, aborted: Aborted) -> None:
        """Aborts by a rename, or finds that the save is decided."""
        folder = self._folder
        assert folder is not None
        renamed = False
        answer: Aborted | bool
        answer = aborted = self._blame(aborted)  # before the rename: a rank that finds the folder gone asks why
        try:
            renamed = folder.to_trash()
            if renamed:
                folder.put_back()
            elif folder.is_published():
                answer = _synced(folder)
        except OSError as error:
            answer = Aborted(aborted.rank, f"{aborted.why}; then {_told(error)}, so the checkpoint may yet appear")
        self._settle(answer)
        if renamed:
            with contextlib.suppress(OSError):  # the next sweep removes it
                folder.remove_trash()

    def _settle(self, answer: Aborted | bool) -> None:
        """Tells the others this rank's answer, or takes theirs: the first one stands."""
        if isinstance(answer, Aborted):
            answer = self._blame(answer)
        with contextlib.suppress(StoreLost):
            record = answer.encode() if isinstance(answer, Aborted) else COMMITTED
            told = self._seat.store.claim(self._round.outcome, record)
            answer = decode(told) or True
            if isinstance(answer, Aborted):
                self._seat.store.claim(self._round.key("begin"), told)  # wakes the ranks that wait for it
        self._answered(answer)

    def _blame(self, aborted: Aborted) -> Aborted:
        """Returns the cause that the first rank saw, if that was not this one."""
        with contextlib.suppress(StoreLost):
            told = self._seat.store.claim(self._round.cause, aborted.encode())
            return decode(told) or aborted
        return aborted

    def _answered(self, answer: Aborted | bool) -> None:
        self._answer = answer
        self._previous = self._folder = None
        self._round.finish()

    def _error(self, aborted: Aborted | None = None) -> RankError | None:
        found = aborted or self._answer
        if not isinstance(found, Aborted):
            return None
        return RankError(found.why, rank=found.rank, path=self._target, step=self._step)

    def _raise_aborted(self) -> None:
        if (error := self._error()) is not None:
            raise error


def _published(folder: Folder) -> bool:
    """Renames the staged folder to its final name, unless another rank was faster."""
    while (renamed := folder.to_final()) == "occupied":
        folder.set_aside()
    if renamed == "done" or folder.is_published():
        return True
    folder.put_back()
    return False


def _synced(folder: Folder) -> Aborted | bool:
    """Makes the final name durable, and that of the latest. A failed sync is never retried."""
    try:
        folder.sync()
        return True
    except OSError as error:
        what = "once the checkpoint had its name; it may or may not survive a power cut"
        return Aborted(0, f"{_told(error)} {what}")


def _difference(mine: dict[str, object], of_rank_0: dict[str, object]) -> str:
    if mine["step"] == of_rank_0["step"]:
        return (
            f"saves step {mine['step']} with layout {mine['layout']}; rank 0 saves it with layout {of_rank_0['layout']}"
        )
    return (
        f"saves step {mine['step']}; rank 0 saves step {of_rank_0['step']} (number {mine['ordinal']} of the saves of "
        "each); the ranks save together again at the next step that all of them save"
    )


def _told(error: OSError) -> str:
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
