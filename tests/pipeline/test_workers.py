"""Data loaders start processes whenever they like: under a save that is not even copied, and from any thread of it."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lazyckpt
from lazyckpt.pipeline.handle import in_flight

SIZE = 24
QUARTER = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 512 << 10}  # of the state of a Run


class Squares(Dataset[torch.Tensor]):
    """Counts what the process that fetches is and is not."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        assert os.getpid() != self.parent
        return torch.tensor(index) ** 2


class Saving(Squares):
    """Does in a worker what only the parent may."""

    def __init__(self, parent: int, ckpt: lazyckpt.Checkpointer) -> None:
        super().__init__(parent)
        self.ckpt = ckpt

    def __getitem__(self, index: int) -> torch.Tensor:
        lazyckpt.wait_captured()  # nothing is copied here, so nothing waits
        self.ckpt.save(index)
        raise AssertionError("it was saved")


def loader_of(data: Any, **knobs: Any) -> DataLoader[Any]:
    settings = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork", "timeout": 60}
    return DataLoader(data, **{**settings, **knobs})


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_start_under_a_save(persistent: bool, make_run: Any, disk: Any, pending: Any, graph: Any) -> None:
    run = make_run(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), **QUARTER)
    loader = loader_of(Squares(os.getpid()), persistent_workers=persistent)
    for epoch in (1, 2):
        run.backward()
        before = run.state()
        disk.hold()
        handle = run.ckpt.save(epoch)
        batches = iter(loader)
        first = next(batches)
        assert pending(handle) > 0
        disk.release(after_s=0.05)
        run.optimizer.step()
        workers = list(batches._workers)  # type: ignore[attr-defined]
        rest = list(batches)
        assert torch.equal(torch.cat([first, *rest]), torch.arange(SIZE) ** 2)
        saved = torch.load(handle.result(timeout=30) / "state.pt")
        assert graph({k: saved[k] for k in before}) == graph(before)
    if persistent:
        batches._shutdown_workers()  # type: ignore[attr-defined]
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sorted(p.name for p in run.ckpt.directory.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_worker_that_saves_hears_whose_checkpointer_it_is(make_run: Any, disk: Any, pending: Any) -> None:
    run = make_run(**QUARTER)
    disk.hold()
    handle = run.ckpt.save(1)
    batches = iter(loader_of(Saving(os.getpid(), run.ckpt)))
    workers = list(batches._workers)  # type: ignore[attr-defined]
    with pytest.raises(lazyckpt.ClosedError, match="belongs to the parent"):
        next(batches)
    assert pending(handle) > 0
    batches._shutdown_workers()  # type: ignore[attr-defined]
    assert [worker.exitcode for worker in workers] == [0, 0]
    disk.release()
    handle.result(timeout=30)
    assert [p.name for p in run.ckpt.directory.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_workers_under_a_save_of_a_saver_that_nobody_holds(context: str, tmp_path: Path, disk: Any) -> None:
    model = torch.nn.Linear(256, 256)
    saver = lazyckpt.Saver(chunk_bytes=16 << 10, host_buffer_bytes=64 << 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    disk.hold()
    saver.save(model.state_dict(), tmp_path / "a.pt")
    del saver
    gc.collect()
    batches = iter(loader_of(TensorDataset(torch.arange(SIZE)), num_workers=1, multiprocessing_context=context))
    first = next(batches)
    assert in_flight()
    disk.release()
    optimizer.step()
    workers = list(batches._workers)  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([batch for (batch,) in [first, *batches]]), torch.arange(SIZE))
    assert [worker.exitcode for worker in workers] == [0]
    while in_flight():
        time.sleep(0.001)
    saved = lazyckpt.load(tmp_path / "a.pt")
    assert saved.keys() == before.keys() and all(torch.equal(saved[k], v) for k, v in before.items())
    assert os.listdir(tmp_path) == ["a.pt"]
