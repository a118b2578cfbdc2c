"""What a torn snapshot teaches: the next save commits, the storage is eager for good, and somebody hears of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_RING

import lazyckpt
from lazyckpt import _engine
from lazyckpt.capture import torn
from lazyckpt.metrics import ChunkEvent
from lazyckpt.pipeline.handle import give_up

pytestmark = [pytest.mark.timeout(60, method="thread"), pytest.mark.usefixtures("small_tensors_are_lazy")]

WITNESSES = ["versions"] if _engine.page_witness() else ["pages", "versions"]
FULL = 50_000  # bytes of eager state at most, while parameters are lazy


@pytest.fixture(params=WITNESSES)
def run(request: pytest.FixtureRequest, make_run: Any) -> Any:
    return make_run(lambda p: torch.optim.SGD(p, lr=1e-6), witness=request.param)


def tear(run: Any, disk: Any, step: int, *writes: torch.Tensor, wait: bool = True) -> lazyckpt.SaveHandle:
    """A save whose storages are written to before they are copied."""
    run.step()
    disk.hold()
    saved: lazyckpt.SaveHandle = run.ckpt.save(step)
    while not is_ring_full(saved):
        pass  # a copy in the middle of the writes would end the save before the others come
    with torch.no_grad():
        for tensor in writes:
            tensor.add_(1)
    disk.release()
    saved.wait_captured()
    while wait and not saved.done():
        pass
    return saved


def is_ring_full(saved: lazyckpt.SaveHandle) -> bool:
    """Whether no further chunk fits into a ring of two."""
    assert saved._snapshot is not None
    events = [ChunkEvent(*event) for event in saved._snapshot.job.timeline()]
    return sum(event.nbytes for event in events if event.copy_end_s > 0) > TINY_RING["chunk_bytes"]


def save(run: Any, step: int) -> int:
    """Steps and saves. Asserts that the checkpoint holds the state of that moment; returns the eager bytes."""
    run.step()
    before = run.state()["model"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = run.ckpt.save(step)
    run.step()
    file = torch.load(saved.result(timeout=20) / "state.pt")["model"]
    assert all(torch.equal(file[name].view(torch.int32), before[name].view(torch.int32)) for name in before)
    return int(saved.metrics.eager_bytes)


def test_the_next_save_copies_all_and_later_ones_what_was_torn(run: Any, disk: Any) -> None:
    lazy = save(run, 1)
    assert lazy < FULL
    weight = run.model[1].weight
    assert isinstance(tear(run, disk, 2, weight).exception(), lazyckpt.TornSnapshotError)
    everything = sum(p.nbytes for p in run.model.parameters())
    assert save(run, 3) >= everything
    for step in (4, 5):
        assert save(run, step) - lazy == weight.nbytes


def test_the_save_after_a_torn_one_commits_whoever_else_writes(run: Any, disk: Any) -> None:
    tear(run, disk, 1, run.model[1].weight)
    run.step()
    with pytest.warns(UserWarning, match="step 1"):
        saved = run.ckpt.save(2)
    with torch.no_grad():
        for layer in run.model:
            layer.weight.add_(1)
    assert saved.exception(timeout=20) is None


@pytest.mark.parametrize("witness", WITNESSES)
def test_after_three_torn_snapshots_nothing_is_lazy(witness: str, make_run: Any, disk: Any) -> None:
    """The ring holds two and a half of the three, so the last one copied is torn."""
    run = make_run(lambda p: torch.optim.SGD(p, lr=1e-6), witness=witness, host_buffer_bytes=640 << 10)
    everything = sum(p.nbytes for p in run.model.parameters())
    for number in (2, 1, 0):
        assert save(run, 10 * number + 1) < everything
        saved = tear(run, disk, 10 * number + 2, run.model[number].weight)
        assert isinstance(saved.exception(), lazyckpt.TornSnapshotError)
        save(run, 10 * number + 3)
    run.model.append(torch.nn.Linear(256, 256))
    run.optimizer.add_param_group({"params": run.model[3].parameters()})
    run.step()
    for step in (50, 51):
        assert save(run, step) >= everything + run.model[3].weight.nbytes


def test_another_saver_of_the_process_knows(run: Any, disk: Any, tmp_path: Path) -> None:
    weight = run.model[1].weight
    tear(run, disk, 1, weight).exception()
    with lazyckpt.Saver(witness=run.ckpt._saver.config.witness) as saver:
        run.step()
        saved = saver.save({"model": run.model.state_dict()}, tmp_path / "a.pt", blocking=True)
        assert weight.nbytes <= saved.metrics.eager_bytes < weight.nbytes + FULL


def test_the_error_names_the_tensors_and_the_cure(run: Any, disk: Any) -> None:
    error = tear(run, disk, 7, run.model[1].weight).exception()
    text = str(error)
    assert isinstance(error, lazyckpt.TornSnapshotError)
    assert error.__context__ is None and error.__traceback__ is None  # no frames of the background
    assert "step 7" in text and "model.1.weight was written to" in text
    assert 'lazyckpt.guard(object, "method")' in text and "lazyckpt.wait_captured()" in text
    assert "inside save() from now on" in text
    assert "model.0.weight" not in text and "more" not in text.partition("was written")[0]


def test_the_error_names_five_tensors_and_counts_the_rest(make_run: Any, disk: Any) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    for witness in WITNESSES:
        run = make_run(lambda p: torch.optim.SGD(p, lr=1e-6), model, witness=witness)
        text = str(tear(run, disk, 1, *(layer.weight for layer in model)).exception())
        names = text.partition(" were written")[0]
        assert names.count(".weight") == 5 and 1 <= int(names.split(" and ")[1].split(" more")[0]) <= 3
        if witness == "versions":
            assert names.endswith("and 3 more")
        torn._torn.clear()  # the model is the same


def test_it_is_a_warning_at_the_next_save(run: Any, disk: Any) -> None:
    tear(run, disk, 1, run.model[1].weight)
    run.step()
    with pytest.warns(UserWarning, match=r"step 1.*model\.1\.weight was written to"):
        saved = run.ckpt.save(2)
    assert saved.result(timeout=20)
    run.ckpt._saver.wait()  # it was told


@pytest.mark.parametrize("call", ["wait", "close", "check", "result"])
def test_it_is_an_exception_where_no_save_follows(call: str, run: Any, disk: Any) -> None:
    saved = tear(run, disk, 1, run.model[1].weight)
    tell = {
        "wait": run.ckpt._saver.wait,
        "close": run.ckpt.close,
        "check": run.ckpt._saver.check,
        "result": saved.result,
    }
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"step 1.*model\.1\.weight"):
        tell[call]()
    run.ckpt._saver.check()  # once


def test_a_failure_of_another_kind_still_stops_the_next_save(run: Any, disk: Any, monkeypatch: Any) -> None:
    run.step()
    disk.hold()
    saved = run.ckpt.save(1)
    give_up(saved, "tried")
    disk.release()
    while not saved.done():
        pass
    run.step()
    with pytest.raises(lazyckpt.SaveError, match="step 1"):
        run.ckpt.save(2)


@pytest.mark.parametrize("witness", WITNESSES)
def test_with_on_error_warn_it_is_a_warning_and_the_handle_has_it(witness: str, make_run: Any, disk: Any) -> None:
    run = make_run(lambda p: torch.optim.SGD(p, lr=1e-6), witness=witness, on_error="warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        saved = tear(run, disk, 1, run.model[1].weight)
        run.ckpt._saver.wait()
    assert any("model.1.weight was written to" in str(w.message) for w in said)
    assert isinstance(saved.exception(), lazyckpt.TornSnapshotError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step()
        assert run.ckpt.save(2).result(timeout=20)


@pytest.mark.parametrize("witness", WITNESSES)
def test_with_before_step_a_torn_snapshot_lets_the_step_go(witness: str, make_run: Any, disk: Any) -> None:
    run = make_run(lambda p: torch.optim.SGD(p, lr=1e-6), witness=witness, durability="before_step")
    run.backward()
    disk.hold()
    saved = run.ckpt.save(1)
    with torch.no_grad():
        run.model[1].weight.add_(1)
    disk.release(after_s=0.2)
    run.optimizer.step()
    assert isinstance(saved.exception(timeout=10), lazyckpt.TornSnapshotError)
    assert save(run, 2)


def test_another_storage_in_the_place_of_a_torn_one_is_lazy() -> None:
    storages = torn.TornStorages()
    places, were_torn = set(), set()
    for _ in range(3):
        torn_here = [torch.ones(5000) for _ in range(100)]
        storages.add(t.untyped_storage() for t in torn_here)
        identities = [t.untyped_storage()._cdata for t in torn_here]
        assert torn.TornStorages().without([1] * 100, identities) == [0] * 100
        places.update(t.data_ptr() for t in torn_here)
        were_torn.update(identities)
        del torn_here
        others = [torch.ones(5000) for _ in range(100)]
        assert places & {t.data_ptr() for t in others}, "none has the address of a torn one"
        identities = [t.untyped_storage()._cdata for t in others]
        assert torn.TornStorages().without([1] * 100, identities) == [1] * 100
        del others
    storages.add([])
    assert torn._torn.keys().isdisjoint(were_torn)
