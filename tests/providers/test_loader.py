"""TrackedLoader: the same batches, and the same random numbers after them, as if nothing had happened."""

from __future__ import annotations

import io
import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from lazyckpt.errors import ConfigError, RestoreError
from lazyckpt.providers.data_loader import TrackedLoader, track_loader
from lazyckpt.providers.rng import capture_rng, restore_rng

SIZE = 23
DATA = torch.arange(SIZE)


class Noisy(Dataset[torch.Tensor]):
    """Every fetch draws from the global generators of its process, as augmentations do."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random()], dtype=torch.float64)


class Stream(IterableDataset[int]):
    """Shuffled by a generator of its own, split over the workers."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(5)).tolist()
        return iter(order[worker.id :: worker.num_workers] if worker else order)


class CountingSampler(SequentialSampler):
    """Counts its epochs by itself and has no set_epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def per_batch(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
QUICK: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "augmented in the process": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, generator=seeded()),
    "own generator, whole batches": lambda: DataLoader(DATA[:20], batch_size=4, shuffle=True, generator=seeded()),
    "two generators": lambda: DataLoader(
        DATA, batch_size=4, sampler=RandomSampler(DATA, generator=seeded(1)), generator=seeded(2)
    ),
    "batch sampler": lambda: per_batch(RandomSampler(DATA, generator=seeded())),
    "more than once": lambda: per_batch(RandomSampler(DATA, num_samples=60, generator=seeded())),
    "counting sampler": lambda: per_batch(CountingSampler(DATA)),
    "one by one": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
}
SLOW: dict[str, Callable[[], DataLoader[Any]]] = {
    "two workers": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, **WORKERS),
    "two workers, own generator": lambda: DataLoader(
        Noisy(), batch_size=4, shuffle=True, generator=seeded(), prefetch_factor=1, **WORKERS
    ),
    "two workers, iterable": lambda: DataLoader(Stream(), batch_size=4, **WORKERS),
    "persistent workers": lambda: DataLoader(DATA, batch_size=4, shuffle=True, persistent_workers=True, **WORKERS),
}


def seed_all() -> None:
    torch.manual_seed(11), random.seed(11)


def train(loader: Any, epochs: int, after: Callable[[int], None] = lambda step: None) -> list[Any]:
    """Batches, and what a model with dropout would draw between them.

    `after` is called behind every batch with the length n of the log; what it saves continues as log[n:].
    """
    log: list[Any] = []
    for _ in range(epochs):
        for batch in loader:
            log.append((batch.tolist(), torch.rand(2).tolist(), random.random()))
            after(len(log))
        log.append("end")
    return log


def save(loader: TrackedLoader) -> bytes:
    file = io.BytesIO()
    torch.save({"loader": loader.state_dict(), "rng": capture_rng()}, file)
    return file.getvalue()


def restored(loader: Any, saved: bytes) -> TrackedLoader:
    """A new process is simulated by other seeds; the order of the two restores must not matter."""
    torch.manual_seed(99), random.seed(99)
    state = torch.load(io.BytesIO(saved), weights_only=True)
    tracked = track_loader(loader)
    tracked.load_state_dict(state["loader"])
    restore_rng(state["rng"])
    return tracked


def resume_everywhere(build: Callable[[], DataLoader[Any]], every: int = 1) -> None:
    seed_all()
    loader, saves = track_loader(build()), {}
    whole = train(loader, 3, lambda at: saves.update({at: save(loader)}))
    for at, saved in list(saves.items())[::every]:
        behind = whole[at:]
        assert train(restored(build(), saved), behind.count("end")) == behind, f"resumed at {at}"


@pytest.mark.parametrize("build", QUICK.values(), ids=QUICK.keys())
def test_resumed_at_any_step_it_is_the_uninterrupted_run(build: Callable[[], DataLoader[Any]]) -> None:
    resume_everywhere(build)


@pytest.mark.long(first=2)
@pytest.mark.parametrize("build", SLOW.values(), ids=SLOW.keys())
def test_resumed_with_workers_it_is_the_uninterrupted_run(build: Callable[[], DataLoader[Any]]) -> None:
    resume_everywhere(build, every=4)


@pytest.mark.parametrize("build", [QUICK["own generator"], SLOW["two workers"]], ids=["0", "2"])
def test_tracking_changes_nothing(build: Callable[[], DataLoader[Any]]) -> None:
    seed_all()
    expected = train(build(), 2)
    seed_all()
    assert train(track_loader(build()), 2) == expected


def in_a_child(mode: str, path: Path) -> tuple[int, list[str]]:
    """Trains for 30 steps in a forked child and saves every other one; with "die" it is killed at step 16."""
    log = path.with_name(mode)
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1], log.read_text().splitlines()
    try:
        torch.manual_seed(mode == "resume")
        data = TensorDataset(torch.arange(40))
        loader: Any = track_loader(DataLoader(data, batch_size=4, shuffle=True, **WORKERS))
        step = 0
        if mode == "resume":
            state = torch.load(path, weights_only=True)
            loader.load_state_dict(state["loader"])
            restore_rng(state["rng"])
            step = state["step"]
        with log.open("w", buffering=1) as lines:
            while step < 30:
                for (batch,) in loader:
                    step += 1
                    print(step, batch.tolist(), torch.rand(1).item().hex(), file=lines)
                    if step == 16 and mode == "die":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if step % 2 == 0:
                        torch.save({"loader": loader.state_dict(), "rng": capture_rng(), "step": step}, path)
        os._exit(0)
    finally:
        os._exit(1)


def test_sigkill_in_the_second_epoch(tmp_path: Path) -> None:
    code, whole = in_a_child("whole", tmp_path / "state.pt")
    assert code == 0 and len(whole) == 30
    code, killed = in_a_child("die", tmp_path / "state.pt")
    assert code == signal.SIGKILL and killed == whole[:16]
    code, resumed = in_a_child("resume", tmp_path / "state.pt")
    assert code == 0 and resumed == whole[14:]


def test_saved_between_epochs() -> None:
    for build in (QUICK["own generator"], QUICK["shuffled"], QUICK["counting sampler"]):
        seed_all()
        loader = track_loader(build())
        train(loader, 1)
        assert loader.state_dict()["start"] is None and loader.state_dict()["yielded"] == 0
        saved = save(loader)
        expected = train(loader, 2)
        assert train(restored(build(), saved), 2) == expected


def test_saved_behind_the_last_batch_only_the_end_is_left() -> None:
    seed_all()
    loader = track_loader(QUICK["shuffled"]())
    for _ in loader:
        saved = save(loader)
    expected = train(loader, 1)
    again = restored(QUICK["shuffled"](), saved)
    assert list(again) == [] and train(again, 1) == expected


def test_restored_but_not_yet_iterated_it_saves_the_same_position() -> None:
    loader = track_loader(QUICK["own generator"]())
    next(iter(loader))
    saved = save(loader)
    once = restored(QUICK["own generator"](), saved)
    saved_again = save(once)
    expected = train(once, 1)
    assert train(restored(QUICK["own generator"](), saved_again), 1) == expected


def test_break_and_iter_begins_a_new_epoch() -> None:
    seed_all()
    loader = track_loader(QUICK["shuffled"]())
    for _ in loader:
        break
    assert loader.state_dict()["yielded"] == 1, "break, save, exit: resumes behind the break"
    batches = iter(loader)
    assert (loader.state_dict()["yielded"], loader.state_dict()["start"], loader.epoch) == (0, None, 1)
    next(batches), next(batches)
    saved = save(loader)
    expected = train(batches, 1)
    assert train(restored(QUICK["shuffled"](), saved), 1) == expected

    again = restored(QUICK["shuffled"](), saved)
    next(iter(again))
    assert again.state_dict()["yielded"] == 3
    next(iter(again))
    assert again.state_dict()["yielded"] == 1, "only the first iter() behind a restore continues"


def test_a_generator_that_the_user_draws_from_too() -> None:
    loader = track_loader(QUICK["own generator"]())
    batches = iter(loader)
    next(batches), torch.rand(2, generator=loader.generator)
    saved = save(loader)
    expected = train(batches, 1), torch.rand(2, generator=loader.generator).tolist()
    again = restored(QUICK["own generator"](), saved)
    assert (train(again, 1), torch.rand(2, generator=again.generator).tolist()) == expected


def test_only_the_newest_iterator_counts() -> None:
    loader = track_loader(QUICK["shuffled"]())
    old, new = iter(loader), iter(loader)
    next(new), next(old), next(old)
    assert loader.state_dict()["yielded"] == 1
    list(old)
    assert loader.state_dict()["yielded"] == 1


@pytest.mark.parametrize("build", [QUICK["own generator"], SLOW["persistent workers"]], ids=["0", "2"])
@pytest.mark.parametrize("at", [8])
def test_rollback_in_the_same_process(build: Callable[[], DataLoader[Any]], at: int) -> None:
    seed_all()
    loader, saves = track_loader(build()), {}
    behind = train(loader, 2, lambda length: saves.update({length: save(loader)}))[at:]
    state = torch.load(io.BytesIO(saves[at]), weights_only=True)
    restore_rng(state["rng"])
    loader.load_state_dict(state["loader"])
    assert train(loader, behind.count("end")) == behind


def test_between_epochs_persistent_workers_draw_no_seed_again() -> None:
    """Regression: the resumed process drew the workers' seed from the restored generator, and all later numbers were
    others."""
    seed_all()
    loader = track_loader(SLOW["persistent workers"]())
    train(loader, 1)
    saved = save(loader)
    behind = train(loader, 1)
    assert train(restored(SLOW["persistent workers"](), saved), 1) == behind


def test_numbers_that_others_draw_before_the_first_batch_do_not_get_into_the_epoch() -> None:
    def log(batches: Iterator[Any]) -> list[Any]:
        return [(batch.tolist(), torch.rand(1).item()) for batch in batches]

    build = QUICK["augmented in the process"]
    seed_all()
    plain = iter(build())
    torch.rand(5)
    expected = log(plain)
    seed_all()
    loader = track_loader(build())
    batches = loader.begin()
    torch.rand(5)
    begun = log(islice(batches, 3))
    saved = save(loader)
    assert begun + log(batches) == expected
    assert log(restored(build(), saved).begin()) == expected[3:]


def test_distributed_sampler() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, num_replicas=2, rank=1))

    def epochs(loader: Any, first: int) -> list[Any]:
        log = []
        for epoch in range(first, 4):
            loader.sampler.set_epoch(epoch)
            log += train(loader, 1)
        return log

    seed_all()
    loader = track_loader(build())
    loader.sampler.set_epoch(2)
    batches = iter(loader)
    next(batches)
    saved = save(loader)
    behind = train(batches, 1) + epochs(loader, 3)

    assert epochs(restored(build(), saved), 2) == behind
    again = restored(build(), saved)
    assert again.sampler.epoch == 2
    assert train(again, 1) == behind[: behind.index("end") + 1], "also if the script does not set the epoch"


def test_len_and_attributes_are_the_loaders() -> None:
    loader = DataLoader(DATA, batch_size=4)
    tracked = track_loader(loader)
    assert len(tracked) == 6 and tracked.dataset is DATA and tracked.batch_sampler is loader.batch_sampler
    with pytest.raises(AttributeError, match="nonsense"):
        _ = tracked.nonsense


def test_a_stateful_loader_is_left_alone() -> None:
    class Stateful(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loader = Stateful(DATA)  # type: ignore[arg-type]
    assert track_loader(loader) is loader
    tracked = track_loader(DataLoader(DATA))
    assert isinstance(tracked, TrackedLoader) and track_loader(tracked) is tracked


@pytest.mark.parametrize("wrong", [iter([1]), 5, None])
def test_what_cannot_begin_again_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="needs a DataLoader"):
        track_loader(wrong)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"yielded": 0, "start": {}, "now": {"generators": [], "epochs": []}},
        {"yielded": "x", "start": None},
    ],
)
def test_malformed_state(state: dict[str, Any]) -> None:
    with pytest.raises(RestoreError, match="does not fit this DataLoader"):
        track_loader(QUICK["shuffled"]()).load_state_dict(state)


def test_another_loader_or_less_data_is_an_error() -> None:
    loader = track_loader(QUICK["own generator"]())
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    saved = save(loader)
    with pytest.raises(RestoreError, match="same samplers and generators"):
        restored(QUICK["shuffled"](), saved)
    with pytest.raises(RestoreError, match="batches of an epoch: 6 then, 2 now"):
        restored(DataLoader(DATA[:8], batch_size=4, shuffle=True, generator=seeded()), saved)
    for damage in ({"yielded": -1}, {"start": {**loader.state_dict()["start"], "rng": {}}}):
        with pytest.raises(RestoreError, match="does not fit this DataLoader"):
            loader.load_state_dict({**loader.state_dict(), **damage})


def test_the_state_of_an_older_version_is_read() -> None:
    loader = track_loader(QUICK["own generator"]())
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    saved = loader.state_dict()
    del saved["epoch"], saved["built"]
    following = next(batches)
    again = track_loader(QUICK["own generator"]())
    again.load_state_dict(saved)
    assert torch.equal(next(iter(again))[:, 0], following[:, 0]) and again.epoch == 0
    small = track_loader(DataLoader(DATA[:8], batch_size=4, shuffle=True, generator=seeded()))
    with pytest.raises(RestoreError, match="4 batches of the epoch had been consumed, this loader has only 2"):
        small.load_state_dict(saved)


# epochs


def epochs_of(loader: Any, count: int, save_at: tuple[int, int] | None = None) -> tuple[list[Any], Any]:
    """What training sees from the loader's epoch on, and what it saved after a batch (-1: after the epoch)."""
    seen, saved = [], None
    for epoch in range(loader.epoch, count):
        loader.set_epoch(epoch)
        for batch in loader:
            seen.append((epoch, loader.epoch, loader.batch, batch.tolist()))
            if save_at == (epoch, loader.batch):
                saved, seen = save(loader), []
        if save_at == (epoch, -1):
            saved, seen = save(loader), []
    return seen, saved


@pytest.mark.parametrize("at", [(0, 1), (1, 3), (1, 6), (1, -1), (2, -1)])
@pytest.mark.parametrize("name", ["shuffled", "own generator", "distributed"])
def test_a_loop_over_epochs_goes_on_where_it_was(name: str, at: tuple[int, int]) -> None:
    def build() -> DataLoader[Any]:
        if name != "distributed":
            return QUICK[name]()
        return DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, 2, 0))  # type: ignore[arg-type]

    seed_all()
    expected, saved = epochs_of(track_loader(build()), 3, at)
    again = restored(build(), saved)
    assert (again.epoch, again.batch) == (at if at[1] > 0 else (at[0] + 1, 0))
    assert epochs_of(again, 3)[0] == expected


def test_at_the_end_of_an_epoch_nothing_is_fetched_again() -> None:
    class Counted(Noisy):
        fetched = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            Counted.fetched += 1
            return super().__getitem__(index)

    loader = track_loader(DataLoader(Counted(), batch_size=4))
    for _ in loader:
        saved = save(loader)
    again = restored(DataLoader(Counted(), batch_size=4), saved)
    Counted.fetched = 0
    assert list(again) == [] and Counted.fetched == 0 and again.epoch == 1


def test_an_epoch_that_is_given_up_counts() -> None:
    loader = track_loader(QUICK["in order"]())
    iter(loader)
    assert (loader.epoch, loader.batch) == (0, 0), "not begun"
    next(iter(loader))
    assert (loader.epoch, loader.batch) == (0, 1)
    next(iter(loader))
    assert (loader.epoch, loader.batch) == (1, 1)


def test_set_epoch_behind_iter_keeps_the_position() -> None:
    loader = track_loader(QUICK["in order"]())
    batches = iter(loader)
    loader.set_epoch(2)
    next(batches)
    assert (loader.epoch, loader.batch) == (2, 1)
    assert torch.equal(next(iter(restored(QUICK["in order"](), save(loader)))), next(batches))


def test_set_epoch_elsewhere_gives_up_the_restored_position_with_a_word() -> None:
    loader = track_loader(QUICK["in order"]())
    next(iter(loader))
    again = restored(QUICK["in order"](), save(loader))
    with pytest.warns(UserWarning, match=r"set_epoch\(3\) gives up the restored position, batch 1 of epoch 0"):
        again.set_epoch(3)
    assert len(list(again)) == 6 and again.epoch == 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch_size": 5}, "batch size: 4 then, 5 now, batches of an epoch: 6 then, 5 now"),
        ({"shuffle": True}, "sampler: SequentialSampler then, RandomSampler now"),
        ({"drop_last": True}, "batches of an epoch: 6 then, 5 now"),
    ],
)
def test_a_loader_that_was_built_otherwise_is_told(change: dict[str, Any], message: str) -> None:
    loader = track_loader(QUICK["in order"]())
    batches = iter(loader)
    next(batches)
    other = {"batch_size": 4, **change}
    with pytest.raises(RestoreError, match=message) as caught:
        restored(DataLoader(DATA, **other), save(loader))
    assert "restore(loader=False)" in str(caught.value)
    list(batches)
    with pytest.warns(UserWarning, match=message):
        assert restored(DataLoader(DATA, **other), save(loader)).epoch == 1


def test_a_length_that_may_be_an_estimate_is_not_trusted() -> None:
    class Estimating(SequentialSampler):
        def __len__(self) -> int:
            return 1

    loader = track_loader(per_batch(Estimating(DATA)))
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    saved = save(loader)
    following = next(iter(restored(per_batch(Estimating(DATA)), saved)))
    assert torch.equal(following[:, 0], next(batches)[:, 0])
    small = restored(per_batch(Estimating(DATA[:8])), saved)
    before = capture_rng()["torch"]
    with pytest.raises(RestoreError, match=r"4 batches .* only 2"):
        next(iter(small))
    assert torch.equal(capture_rng()["torch"], before)
