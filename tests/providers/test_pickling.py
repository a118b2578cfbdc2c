"""Copies and pickles of our objects, and of tracked objects of the user.

Those of the user are as without lazyckpt. Ours keep the settings, and no pending save.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from duplicates import DUPLICATES
from torch.utils.data import DataLoader

import lazyckpt
from lazyckpt import errors, exporters
from lazyckpt.providers.data_loader import TrackedLoader
from lazyckpt.providers.sharded import ShardedTensorError

RING = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 128 << 10}
Duplicate = Callable[[Any], Any]


# Errors


def every_error() -> list[lazyckpt.LazyCkptError]:
    made: list[lazyckpt.LazyCkptError] = [ShardedTensorError("a shard", "model.weight")]
    for kind in (getattr(errors, name) for name in lazyckpt.__all__ if name.endswith("Error")):
        if issubclass(kind, lazyckpt.RankError):
            made.append(kind("died", rank=3, path="runs/a", step=7))
        elif issubclass(kind, lazyckpt.SaveError):
            made.append(kind("why", path="runs/a", step=7))
        elif issubclass(kind, lazyckpt.ReadError):
            made.append(kind("why", path="runs/a", errno=5))
        elif issubclass(kind, lazyckpt.MirrorError):
            made.append(kind("why", mirror="s3://bucket/a", step=7))
        elif issubclass(kind, lazyckpt.LoadError):
            made.append(kind("why", path="runs/a"))
        else:
            made.append(kind("why"))
    return made


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_an_error_comes_back_with_all_that_it_says(error: lazyckpt.LazyCkptError, duplicate: Duplicate) -> None:
    error.__notes__ = ["rank 3"]  # add_note() of Python 3.11
    again = duplicate(error)
    assert type(again) is type(error) and str(again) == str(error) and again.args == error.args
    assert vars(again) == vars(error)


# What cannot be copied


@pytest.fixture
def live(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Made by name, and ended behind the test."""
    if request.param == "Checkpointer":
        obj: Any = lazyckpt.Checkpointer(tmp_path / "run")
    elif request.param == "CommitOnSignal":
        obj = lazyckpt.commit_on(12)
    else:
        obj = lazyckpt.Saver()
    if request.param == "StagedFolder":
        with obj, obj.stage(tmp_path / "staged") as staged:
            yield staged
    elif request.param == "SaveHandle":
        with obj:
            yield obj.save(torch.ones(3), tmp_path / "a.pt", blocking=True)
    else:
        with obj:
            yield obj


@pytest.mark.parametrize(
    ("live", "instead"),
    [
        ("Checkpointer", r"Checkpointer of .*run cannot be copied or pickled.*make one where the training runs"),
        ("Saver", "Saver cannot be copied or pickled.*make another Saver with the same settings"),
        ("SaveHandle", r"SaveHandle of .*a\.pt cannot be copied or pickled.*its path or its metrics"),
        ("StagedFolder", "staged folder .* cannot be copied or pickled.*save it here"),
        ("CommitOnSignal", "commit_on returns cannot be copied or pickled.*call lazyckpt.commit_on in the other"),
    ],
    indirect=["live"],
)
@pytest.mark.parametrize("how", [*DUPLICATES, "copy"])
def test_what_belongs_to_this_process_says_what_to_do_instead(live: Any, instead: str, how: str) -> None:
    with pytest.raises(TypeError, match=instead):
        copy.copy(live) if how == "copy" else DUPLICATES[how]({"of a user": live})


def test_what_a_handle_tells_can_be_pickled(tmp_path: Path, duplicate: Duplicate) -> None:
    with lazyckpt.Saver() as saver:
        handle = saver.save(torch.ones(30_000), tmp_path / "a.pt", step=3)
        assert duplicate(handle.result()) == tmp_path / "a.pt"
        saver.wait()
        metrics = duplicate(handle.metrics)
    assert metrics == handle.metrics and metrics.timeline and metrics.step == 3
    assert duplicate(saver.config) == saver.config


# Objects of the user


TRAIN = """
import hashlib, os, pickle, pickletools, sys, torch

def train(folder):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 40))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.ones(8, 40), 2)
    if folder:
        import lazyckpt
        ckpt = lazyckpt.Checkpointer(folder)
        ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler, average=average)
        ckpt.track_loader(loader)
        lazyckpt.Saver().watch(model)
    for step in range(3):
        model(torch.randn(8, 40)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        if folder:
            ckpt.save(step, blocking=True)
    for obj in (model, optimizer, scheduler, average, loader):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            # A long argument is a storage, in which torch writes its address.
            said = [(op.name, str(arg)[:60]) for op, arg, _ in pickletools.genops(pickle.dumps(obj, protocol))]
            print(type(obj).__name__, protocol, len(said), hashlib.sha256(repr(said).encode()).hexdigest())

for folder in ("", sys.argv[1]):
    if (child := os.fork()) == 0:
        train(folder)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.long
def test_objects_that_are_tracked_are_pickled_as_without_us(tmp_path: Path) -> None:
    """One process forks twice: only the second child imports lazyckpt."""
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "run")]
    pickles = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    count = 5 * (pickle.HIGHEST_PROTOCOL + 1)
    assert len(pickles) == 2 * count and pickles[:count] == pickles[count:]


def test_a_tracked_model_loads_with_weights_only(make_run: Any, tmp_path: Path) -> None:
    """Regression: functions in the place of our hooks were in the pickle, and torch refuses what it does not know."""
    run = make_run(model=torch.nn.Sequential(torch.nn.Linear(40, 40)))
    torch.save(run.model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear]):
        model = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(model[0].weight, run.model[0].weight)


def copies_of_both(run: Any, duplicate: Duplicate) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = duplicate((run.model, run.optimizer))
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    return model, optimizer


def test_a_copy_does_not_wait_for_the_copying_of_the_original(
    make_run: Any, disk: Any, pending: Any, duplicate: Duplicate
) -> None:
    run = make_run()
    model, optimizer = copies_of_both(run, duplicate)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()  # so that it is no stranger, for which the gate waits in any case
    run.backward()
    disk.hold()
    handle = run.ckpt.save(1)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    model(run.batch()).square().sum().backward()
    optimizer.step()
    assert pending(handle) > 0, "no thread has waited"
    disk.release()
    handle.result(timeout=30)


def test_a_copy_is_saved_lazily_as_the_original_is(
    make_run: Any, disk: Any, pending: Any, duplicate: Duplicate, tmp_path: Path
) -> None:
    run = make_run()
    run.ckpt.save(0, blocking=True)
    other = make_run(model=run.model, warm=False)
    other.model, other.optimizer = copies_of_both(run, duplicate)
    with lazyckpt.Checkpointer(tmp_path / "copy", **RING) as ckpt:
        ckpt.track(model=other.model, optimizer=other.optimizer)
        other.step()
        before = other.state()["model"]
        disk.hold()
        handle = ckpt.save(1)
        assert pending(handle) > 0, "it is lazy"
        disk.release(after_s=0.1)
        other.model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in before.items()})
        assert handle.metrics.gate_blocked_s > 0.05, "and loading waits"
        saved = torch.load(handle.result(timeout=30) / "state.pt")["model"]
    assert all(torch.equal(saved[name], before[name]) for name in before)


class Batches:
    """A loader with a way of its own to be copied and pickled."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(torch.arange(self.count).float())

    def __len__(self) -> int:
        return self.count

    def __getstate__(self) -> Any:
        return {"count": self.count}

    def __setstate__(self, state: Any) -> None:
        self.count = state["count"]

    def __deepcopy__(self, memo: Any) -> Batches:
        return Batches(self.count)


@pytest.mark.parametrize("make", [Batches, lambda count: DataLoader(torch.arange(count), shuffle=True)])
def test_a_copy_of_a_tracked_loader_has_its_position(make: Any, duplicate: Duplicate) -> None:
    tracked = TrackedLoader(make(10))
    batches = iter(tracked)
    for _ in range(3):
        next(batches)
    other = duplicate(tracked)
    assert type(other) is TrackedLoader and len(other) == 10
    state = other.state_dict()
    assert state["yielded"] == 3
    rest = [float(batch) for batch in batches]
    other.load_state_dict(state)
    assert [float(batch) for batch in other] == rest and len(rest) == 7


class Own(lazyckpt.StateProvider):
    def __init__(self) -> None:
        super().__init__()
        self.value = torch.arange(50_000.0)

    def state(self) -> Any:
        return {"value": self.value}

    def load_state(self, state: Any) -> None:
        self.value = state["value"]


def test_a_copy_of_a_provider_knows_nothing_of_addresses_in_this_process(tmp_path: Path, duplicate: Duplicate) -> None:
    """Regression: it took what the engine had seen of the original's tensors along, raw pointers among it."""
    own = Own()
    with lazyckpt.Checkpointer(tmp_path / "a") as ckpt:
        ckpt.track(own=own)
        ckpt.save(1, blocking=True)
    (kept,) = own._skeletons.values()
    other = duplicate(own)
    assert kept._plain is not None and [skeleton._plain for skeleton in other._skeletons.values()] == [None]
    other.value += 1
    with lazyckpt.Checkpointer(tmp_path / "b") as ckpt:
        ckpt.track(own=other)
        path = ckpt.save(1, blocking=True).result()
    assert torch.equal(torch.load(path / "state.pt")["own"]["value"], own.value + 1)


def test_a_copy_of_an_exporter_adds_to_the_same_series(duplicate: Duplicate, monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    exporter = exporters.Prometheus(run="a")
    for each in (exporter, duplicate(exporter)):
        each(lazyckpt.CheckpointMetrics(3), None)
    assert registry.get_sample_value("lazyckpt_checkpoints_total", {"run": "a", "result": "durable"}) == 2


def test_an_exporter_with_a_registry_of_its_own_is_copied_but_not_pickled() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    exporter = exporters.Prometheus(prometheus_client.CollectorRegistry())
    assert copy.deepcopy(exporter) is exporter
    with pytest.raises(TypeError, match="registry of its own cannot be pickled"):
        pickle.dumps(exporter)
