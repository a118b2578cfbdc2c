"""Ranks join a job, exchange values and leave (ranks/group.py). The ranks are threads here."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from lazyckpt.errors import ConfigError, LazyCkptError, RankError, SaveError
from lazyckpt.ranks import rounds
from lazyckpt.ranks.group import RankGroup, join
from lazyckpt.ranks.team import GroupTeam
from lazyckpt.storage import claim, folders, locks, removal
from lazyckpt.storage.claim import CLAIM, FolderClaim
from lazyckpt.storage.manifest import folder_name
from ranks import actor

Run = Callable[[RankGroup], Any]


def run(world_size: int, rank: Callable[[int], Any]) -> list[Any]:
    """Calls a function for every rank, each on a thread of its own. Returns results and errors."""

    def call(number: int) -> Any:
        try:
            return rank(number)
        except LazyCkptError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, range(world_size)))


def joined(store: Any, world_size: int, folder: Path, timeout_s: float = 20) -> list[RankGroup]:
    found = run(world_size, lambda rank: join(store, rank, world_size, folder, timeout_s))
    assert all(isinstance(group, RankGroup) for group in found), found
    return found


def test_all_ranks_join_one_generation_and_leave_no_key(tmp_path: Path) -> None:
    store = HashStore()
    for generation in (1, 2):
        found = joined(store, 9, tmp_path / "run")
        assert [group.rank for group in found] == list(range(9))
        assert {(group.generation, group.world_size) for group in found} == {(generation, 9)}
        assert os.listdir(tmp_path / "run") == [CLAIM]
        run(9, lambda rank, found=found: found[rank].close())
        assert os.listdir(tmp_path / "run") == []
    for key in ("lazyckpt/run", "lazyckpt/generation", *(f"lazyckpt/joined/{rank}" for rank in range(9))):
        assert store.delete_key(key)
    assert store.num_keys() == 0


def test_every_rank_gets_the_values_of_all(tmp_path: Path) -> None:
    store = HashStore()
    found = joined(store, 9, tmp_path)
    keys = store.num_keys()
    for turn in range(20):
        values = run(9, lambda rank, turn=turn: found[rank].exchange("layout", b"%d %d" % (rank, turn)))
        assert values == [[b"%d %d" % (rank, turn) for rank in range(9)]] * 9
    assert store.num_keys() == keys


def test_no_key_is_left_of_many_saves_committed_or_not(tmp_path: Path) -> None:
    store = HashStore()
    found = joined(store, 3, tmp_path)
    keys = store.num_keys()

    def save(rank: int) -> list[str]:
        answers = []
        for ordinal in range(1, 61):
            if rank == ordinal % 7:
                ballot = found[rank].ballot(ordinal, ordinal % 2, "layout", tmp_path / folder_name(ordinal % 2))
                ballot.refuse("no memory")
                answers.append("aborted")
                continue
            try:
                actor.save(found[rank], ordinal, ordinal % 2)
                answers.append("committed")
            except RankError as error:
                assert error.rank == ordinal % 7 and "failed: no memory" in str(error)
                answers.append("aborted")
        return answers

    answers = run(3, save)
    assert answers == [["aborted" if ordinal % 7 < 3 else "committed" for ordinal in range(1, 61)]] * 3
    assert store.num_keys() == keys
    assert sorted(os.listdir(tmp_path)) == [CLAIM, "step-00000000", "step-00000001"]


def test_an_exchange_names_the_rank_that_has_left(tmp_path: Path) -> None:
    found = joined(HashStore(), 3, tmp_path, timeout_s=0.4)
    found[2].close()
    errors = run(2, lambda rank: found[rank].exchange("the layout", b""))
    for error in errors:
        assert isinstance(error, RankError) and error.rank == 2
        why = "rank 2 has closed its Checkpointer or Saver"
        assert str(error) == f"{tmp_path}: the ranks do not agree on the layout: {why}"


def test_a_dead_rank_is_named_although_a_hanging_one_stands_before_it(tmp_path: Path) -> None:
    """Rank 1 hangs in a collective because rank 2 is dead; rank 0 asked for the vote of rank 1 alone."""
    found = joined(HashStore(), 3, tmp_path, timeout_s=0.8)
    found[2]._pulse._stop.set()  # no more signs of life, and no good-bye
    with pytest.raises(RankError, match="rank 2 has given no sign of life"):
        found[0].exchange("layout", b"")
    for group in found[:2]:
        group.close()


def test_a_rank_that_has_given_its_value_may_die(tmp_path: Path) -> None:
    found = joined(HashStore(), 3, tmp_path, timeout_s=0.8)

    def exchange(rank: int) -> Any:
        if rank == 1:
            time.sleep(1.5)  # longer than the timeout
        if rank == 2:
            found[2]._pulse._stop.set()
        return found[rank].exchange("layout", b"%d" % rank)

    assert run(3, exchange) == [[b"0", b"1", b"2"]] * 3
    for group in found:
        group.close()


def caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except KeyboardInterrupt as interrupt:
        return interrupt


@pytest.mark.parametrize("victims", [[0], [1], [1, 2], [0, 1, 2]])
def test_ranks_that_are_interrupted_in_an_exchange_fail_it_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: list[int]
) -> None:
    """They live on, and leave their Checkpointers open."""
    store = HashStore()
    found = joined(store, 3, tmp_path)
    keys = store.num_keys()
    with monkeypatch.context() as patch:
        gather = rounds.Round.gather
        patch.setattr(
            rounds.Round, "gather", lambda self, own: stop() if self.seat.rank in victims else gather(self, own)
        )
        errors = run(3, lambda rank: caught(lambda: found[rank].exchange("layout", b"")))
    for rank, error in enumerate(errors):
        if rank in victims:
            assert isinstance(error, KeyboardInterrupt)
        else:
            assert isinstance(error, RankError) and any(
                f"rank {victim} failed: KeyboardInterrupt" in str(error) for victim in victims
            )
    for _ in range(2):
        assert run(3, lambda rank: found[rank].exchange("layout", b"%d" % rank)) == [[b"0", b"1", b"2"]] * 3
    assert store.num_keys() == keys
    for group in found:
        group.close()


@pytest.mark.parametrize("how", ["agree", "gather", "follow"])
def test_a_rank_that_is_interrupted_between_exchanges_fails_the_next_one_for_all(tmp_path: Path, how: str) -> None:
    store = HashStore()
    found = joined(store, 3, tmp_path)
    keys = store.num_keys()
    teams = [GroupTeam(group) for group in found]
    errors = run(3, lambda rank: caught(lambda: getattr(teams[rank], how)(stop if rank == 0 else int)))
    for _ in range(2):
        assert run(3, lambda rank: GroupTeam(found[rank]).gather(lambda: rank)) == [[0, 1, 2]] * 3
    assert store.num_keys() == keys
    assert isinstance(errors[0], KeyboardInterrupt)
    for error in errors[1:]:
        assert isinstance(error, RankError) and "rank 0 failed: KeyboardInterrupt" in str(error)
    for group in found:
        group.close()


def stop() -> Any:
    raise KeyboardInterrupt


def test_an_exchange_of_different_things_is_told_to_all(tmp_path: Path) -> None:
    found = joined(HashStore(), 3, tmp_path)
    errors = run(3, lambda rank: found[rank].exchange("restore" if rank == 1 else "layout", b""))
    assert [str(error).partition(": ")[2] for error in errors] == [
        "the ranks do not agree on layout: rank 1 is at 'restore'",
        "the ranks do not agree on restore: rank 0 is at 'layout'",
        "the ranks do not agree on layout: rank 1 is at 'restore'",
    ]


def test_a_folder_that_only_one_node_sees_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    store = HashStore()
    errors = run(2, lambda rank: join(store, rank, 2, tmp_path / "ab"[rank], 20))
    for error in errors:
        assert isinstance(error, ConfigError)
        assert f"rank 1 ({tmp_path}/b on " in str(error) and f"rank 0 ({tmp_path}/a)" in str(error)
        assert "on a file system that all nodes share" in str(error)
    assert os.listdir(tmp_path / "a") == []


def test_a_folder_that_rank_0_cannot_make_is_told_to_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = HashStore()
    errors = run(2, lambda rank: join(store, rank, 2, tmp_path / "file", 20))
    assert all(isinstance(error, SaveError) and "not a folder" in str(error) for error in errors), errors


def test_a_rank_0_that_never_comes_is_missed(tmp_path: Path) -> None:
    (error,) = run(1, lambda _: join(HashStore(), 1, 2, tmp_path, 0.05))
    assert isinstance(error, ConfigError) and f"{tmp_path}: rank 0 not there after 0.25 s. All ranks" in str(error)


def test_a_network_file_system_may_show_the_folder_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "is_local", lambda _: False)
    looks: list[Path] = []
    found = claim.other_claim

    def late(directory: Path, mine: FolderClaim) -> str | None:
        looks.append(directory)
        return found(directory, mine) if len(looks) > 4 else "no job"

    monkeypatch.setattr(claim, "other_claim", late)
    joined(HashStore(), 2, tmp_path)
    assert len(looks) >= 4


def test_join_needs_torch_distributed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        RankGroup.join(tmp_path, timeout_s=10)


def test_a_start_of_the_job_takes_the_folder_from_the_one_before(tmp_path: Path) -> None:
    """Under torchrun the workers of a new attempt see the store of the agent under another prefix."""
    store = HashStore()
    old = joined(PrefixStore("attempt-0", store), 2, tmp_path)
    staging = old[0].stage(tmp_path / "step-00000001")
    old[0].check_claim()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the remains of an earlier start are no other job
        new = joined(PrefixStore("attempt-1", store), 1, tmp_path)
    assert (new[0].generation, new[0]._claim.run) == (2, old[0]._claim.run)
    assert not staging.path.exists() and [n for n in os.listdir(tmp_path) if n.startswith(folders.TRASH)] == []
    with pytest.raises(SaveError, match=r"the folder belongs to the job \w+ \(start 2, rank 0 on "):
        old[0].check_claim()
    run(2, lambda rank: old[rank].close())
    assert claim.other_claim(tmp_path, new[0]._claim) is None


def test_a_start_that_died_before_it_took_the_folder_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that only slept fails when it wakes up: it would take the folder from a newer start."""
    rename = os.replace

    def sleeps(old: Path, new: Path) -> None:
        monkeypatch.setattr(os, "replace", rename)
        claim.take(tmp_path, FolderClaim("a", 2, "here"))
        rename(old, new)

    monkeypatch.setattr(os, "replace", sleeps)
    with pytest.raises(FileNotFoundError):
        claim.take(tmp_path, FolderClaim("a", 1, "here"))
    assert os.listdir(tmp_path) == [CLAIM]
    assert claim.other_claim(tmp_path, FolderClaim("a", 2, "here")) is None


def test_a_start_that_slept_before_it_took_the_folder_leaves_it_to_a_newer_one(tmp_path: Path) -> None:
    """Regression: rank 0 was stopped while it joined. When it woke up, saves of the newer start failed."""
    newer = FolderClaim("a", 2, "here")
    lock = claim.take(tmp_path, newer)
    with pytest.raises(OSError, match="newer than this one"):
        claim.take(tmp_path, FolderClaim("a", 1, "here"))
    assert claim.live_claim(tmp_path) == newer and os.listdir(tmp_path) == [CLAIM]
    claim.let_go(tmp_path, newer, lock)


def test_another_job_takes_the_folder_but_not_what_a_live_one_stages(tmp_path: Path) -> None:
    old = joined(HashStore(), 1, tmp_path)
    staging = old[0].stage(tmp_path / "step-00000001")
    with pytest.warns(UserWarning, match=rf"belonged to the job {old[0]._claim.run} .* which still runs"):
        joined(HashStore(), 1, tmp_path)
    assert staging.path.exists()
    with pytest.raises(SaveError, match="the folder belongs to"):
        old[0].check_claim()
    staging.discard()


def test_a_claim_lives_as_long_as_its_process_and_not_as_its_children(tmp_path: Path) -> None:
    assert claim.live_claim(tmp_path) is None
    lock = claim.take(tmp_path, FolderClaim("a", 1, "here"))
    assert claim.live_claim(tmp_path) == FolderClaim("a", 1, "here")
    forked, end = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.write(forked[1], b"x")
        os.close(end[1])
        os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(forked[0], 1)
        locks.drop(lock)
        assert claim.live_claim(tmp_path) is None
    finally:
        for fd in (*forked, *end):
            os.close(fd)
        os.waitpid(child, 0)


def test_a_start_that_fails_lives_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        assert claim.live_claim(tmp_path) is not None
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(removal, "sweep", full)
    with pytest.raises(SaveError, match="No space left"):
        join(HashStore(), 0, 1, tmp_path, 20)
    assert claim.live_claim(tmp_path) is None


def test_the_claim_on_a_folder_is_told(tmp_path: Path) -> None:
    assert claim.other_claim(tmp_path, FolderClaim("a", 1, "here")) == "no job"
    claim.take(tmp_path, FolderClaim("a", 1, "here"))
    assert claim.other_claim(tmp_path, FolderClaim("a", 1, "here")) is None
    assert claim.other_claim(tmp_path, FolderClaim("a", 2, "here")) == "the job a (start 1, rank 0 on here)"
    (tmp_path / CLAIM).write_text('{"run": 1')
    assert claim.other_claim(tmp_path, FolderClaim("a", 1, "here")) == "no job"
