"""Which storages are copied lazily, and how a checkpoint fails whose state changed before the copy."""

from __future__ import annotations

import gc
import inspect
import threading
import time
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy.random  # noqa: F401  # its state is saved once it is imported, by whomever
import pytest
import torch

import lazyckpt
from lazyckpt import devices
from lazyckpt.capture.frozen import frozen_parameters
from lazyckpt.capture.laziness import LAZY_MIN_BYTES
from lazyckpt.gate.gate import gate

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

FUSED = lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)  # noqa: E731
PLAIN = lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)  # noqa: E731


def saved(handle: lazyckpt.SaveHandle) -> Any:
    return torch.load(handle.result(timeout=30) / "state.pt")


def eager_bytes(run: Any, step: int) -> int:
    """Of a save after an optimizer step, without what the RNG takes."""
    run.step()
    handle = run.ckpt.save(step, blocking=True)
    return int(handle.metrics.eager_bytes)


@pytest.fixture
def rng_bytes(tmp_path: Any) -> int:
    with lazyckpt.Checkpointer(tmp_path / "rng", chunk_bytes=64 << 10, host_buffer_bytes=1 << 20) as ckpt:
        return int(ckpt.save(1, blocking=True).metrics.eager_bytes)


# lazy is earned


def test_only_what_an_optimizer_owns_and_stepped_on_is_lazy(make_run: Any, rng_bytes: int) -> None:
    run = make_run(PLAIN)
    small = sum(t.nbytes for t in run.model.parameters() if t.nbytes <= LAZY_MIN_BYTES)
    assert eager_bytes(run, 1) - rng_bytes == 2 * small  # with the momentum
    constant = torch.zeros(50_000)
    run.ckpt.track(constant=constant)
    assert eager_bytes(run, 2) - rng_bytes == 2 * small + constant.nbytes


def test_a_storage_of_exactly_4_kib_is_eager_and_one_more_element_is_lazy(make_run: Any, rng_bytes: int) -> None:
    assert LAZY_MIN_BYTES == 4096
    for numel, expected in ((1024, 4096), (1025, 0)):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(numel))])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = make_run(lambda p: torch.optim.SGD(p, lr=0.1), model, warm=False, witness="versions")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        run.optimizer.step()
        assert run.ckpt.save(1, blocking=True).metrics.eager_bytes - rng_bytes == expected
        del optimizer


def test_a_part_of_a_storage_is_eager_unless_the_parts_make_the_whole(make_run: Any, rng_bytes: int) -> None:
    """A flat buffer behind the parameters has no owner if the optimizer has only some of it."""
    for cuts, lazy in (
        ([(0, 4000)], False),
        ([(0, 4000), (4000, 10_000)], True),
        ([(0, 4000), (6000, 10_000)], False),
        ([(0, 6000), (0, 4000)], False),  # as many bytes as it has
    ):
        flat = torch.zeros(10_000)
        model = torch.nn.ParameterList([torch.nn.Parameter(flat[begin:end]) for begin, end in cuts])
        run = make_run(lambda p: torch.optim.SGD(p, lr=0.1), model, warm=False)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        run.optimizer.step()
        eager = run.ckpt.save(1, blocking=True).metrics.eager_bytes - rng_bytes
        assert eager == (0 if lazy else flat.nbytes)


def test_a_transposed_parameter_owns_its_storage(make_run: Any, rng_bytes: int) -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(50, 60).t())])
    run = make_run(lambda p: torch.optim.SGD(p, lr=0.1), model, warm=False)
    model[0].grad = torch.ones(60, 50)
    run.optimizer.step()
    assert run.ckpt.save(1, blocking=True).metrics.eager_bytes == rng_bytes


def test_there_may_be_more_owners_than_bits(tmp_path: Any) -> None:
    tensors = [torch.nn.Parameter(torch.rand(3000)) for _ in range(70)]
    optimizers = [torch.optim.SGD([tensor], 0.1) for tensor in tensors]
    with lazyckpt.Saver(chunk_bytes=64 << 10, host_buffer_bytes=1 << 20) as saver:
        for step in range(2):
            before = [tensor.detach().clone() for tensor in tensors]
            handle = saver.save(tensors, tmp_path / "a.pt", step=step)
            for tensor, optimizer in zip(tensors, optimizers, strict=True):
                tensor.grad = torch.ones_like(tensor)
                optimizer.step()
            assert all(map(torch.equal, torch.load(handle.result(timeout=30)), before))
    assert handle.metrics.eager_bytes == 0


def test_an_expanded_tensor_in_optimizer_state_does_not_own_its_storage(make_run: Any) -> None:
    run = make_run(PLAIN)
    parameter = next(run.model.parameters())
    flat = torch.zeros(2 * 65_536)
    run.optimizer.state[parameter]["view"] = flat[:65_536].expand(2, -1)  # as many elements, but half of them twice
    run.step()
    handle = run.ckpt.save(1)
    flat += 1  # the user may write to it, but the optimizer does not own it
    assert torch.equal(saved(handle)["optimizer"]["state"][0]["view"], torch.zeros(2, 65_536))


def test_the_state_of_lbfgs_is_lazy_also_inside_lists(make_run: Any) -> None:
    run = make_run(lambda p: torch.optim.LBFGS(p, lr=1e-4, max_iter=4, history_size=3), warm=False)
    for _ in range(3):
        run.optimizer.step(run.backward)
    handle = run.ckpt.save(1, blocking=True)
    assert len(saved(handle)["optimizer"]["state"][0]["old_dirs"]) >= 1
    assert handle.metrics.eager_bytes < handle.metrics.bytes / 10


class Gathering(torch.optim.SGD):
    """Stands for one that lets the next forward gather its parameters from other ranks."""

    __module__ = "apex.contrib.optimizers.distributed_fused_adam"


class Overlapping(torch.optim.SGD):
    """Stands for a ZeroRedundancyOptimizer(overlap_with_ddp=True), which steps in backward."""

    _overlap_with_ddp = True


class Derived(torch.optim.SGD):
    """Of a user's own."""

    _overlap_with_ddp = False


@pytest.mark.parametrize(("kind", "is_lazy"), [(Gathering, False), (Overlapping, False), (Derived, True)])
def test_an_optimizer_whose_parameters_change_outside_its_step_is_eager(
    kind: type[torch.optim.Optimizer], is_lazy: bool, make_run: Any
) -> None:
    run = make_run(lambda p: kind(p, lr=0.1))
    run.step()
    handle = run.ckpt.save(1, blocking=True)
    assert (handle.metrics.eager_bytes < handle.metrics.bytes / 10) == is_lazy


def test_the_overlapping_optimizer_of_torch_says_so() -> None:
    """Our stand-in above has the attribute that torch's own has."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    assert "self._overlap_with_ddp: bool = overlap_with_ddp" in inspect.getsource(ZeroRedundancyOptimizer.__init__)


def test_inference_tensors_are_eager(make_run: Any) -> None:
    run = make_run(PLAIN)
    with torch.inference_mode():
        table = torch.zeros(20_000)
        owned = torch.zeros(256, 256)
    run.ckpt.track(table={"t": table})
    run.optimizer.state[run.model[0].weight]["owned"] = owned
    run.step()
    handle = run.ckpt.save(1)
    with torch.inference_mode():
        table += 1
        owned += 1
    assert torch.equal(saved(handle)["table"]["t"], torch.zeros(20_000))
    assert torch.equal(saved(handle)["optimizer"]["state"][0]["owned"], torch.zeros(256, 256))


# torn snapshots


def write_in_place(run: Any) -> None:
    with torch.no_grad():
        run.model[1].weight.add_(1)


def write_optimizer_state(run: Any) -> None:
    run.optimizer.state[run.model[1].weight]["exp_avg"].zero_()


def init_anew(run: Any) -> None:
    torch.nn.init.zeros_(run.model[1].weight)


@pytest.mark.parametrize("write", [write_in_place, write_optimizer_state, init_anew])
def test_a_write_between_save_and_step_fails_the_checkpoint_and_names_the_tensor(
    write: Any, make_run: Any, disk: Any
) -> None:
    run = make_run(FUSED)
    good = run.ckpt.save(1).result()
    run.step()
    disk.hold()
    handle = run.ckpt.save(2)
    write(run)
    disk.release()
    name = r"optimizer\.state\.2\.exp_avg" if write is write_optimizer_state else r"model\.1\.weight"
    with pytest.raises(lazyckpt.TornSnapshotError, match=rf"step 2.*{name}"):
        handle.result(timeout=30)
    assert sorted(p.name for p in good.parent.iterdir()) == ["step-00000001"], "nothing is left, nothing is touched"
    run.step()
    run.ckpt.save(3).result()


def test_a_write_after_the_step_of_another_owner_is_found(
    tmp_path: Any, disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the optimizers of other tests: beyond 62 they wait for each other, and what one waited for is copied.
    monkeypatch.setattr(gate, "steps", weakref.WeakKeyDictionary())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    first, second = (torch.optim.SGD(layer.parameters(), 0.1) for layer in model)
    model(torch.ones(1, 64)).sum().backward()
    with lazyckpt.Checkpointer(tmp_path, witness="versions") as ckpt:
        ckpt.track(model=model, first=first, second=second)
        for optimizer in (first, second):
            optimizer.step()
        disk.hold()
        handle = ckpt.save(1)
        first.step()
        with torch.no_grad():
            model[1].weight.add_(1)
        second.step()
        disk.release()
        with pytest.raises(lazyckpt.TornSnapshotError, match=r"model\.1\.weight was written to"):
            handle.result(timeout=30)


def test_a_step_waits_while_the_background_verifies_its_storages(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background verifies a checkpoint that no step has verified; a step may come just then."""
    run = make_run(PLAIN, host_buffer_bytes=16 << 20)
    looks, data_ptr = threading.Event(), devices.data_ptr

    def slowly(storage: torch.UntypedStorage) -> int:
        if threading.current_thread() is not threading.main_thread() and not looks.is_set():
            looks.set()
            time.sleep(0.2)
        return data_ptr(storage)

    monkeypatch.setattr(devices, "data_ptr", slowly)
    run.backward()
    handle = run.ckpt.save(1)
    assert looks.wait(30)
    run.optimizer.step()
    for parameter in run.model.parameters():  # as sharded training does it
        storage = parameter.untyped_storage()
        torch._C.StorageBase.resize_(storage, 2 * storage.nbytes())
    handle.result(timeout=30)


def test_audit_finds_a_write_after_the_copy_and_before_the_step(make_run: Any, disk: Any) -> None:
    run = make_run(FUSED, audit=True, host_buffer_bytes=16 << 20)
    disk.hold()
    handle = run.ckpt.save(1)
    assert handle._snapshot.job.wait_captured((1 << 64) - 1)
    run.model[1].weight.data.add_(1)
    run.step()
    disk.release()
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"model\.1\.weight.*audit"):
        handle.result(timeout=30)


def test_audit_finds_a_write_that_was_undone_before_the_step(make_run: Any, disk: Any) -> None:
    run = make_run(FUSED, audit=True, witness="versions")
    disk.hold()
    handle = run.ckpt.save(1)
    run.model[1].weight.data.neg_()
    job = handle._snapshot.job
    disk.release()
    assert job.wait_captured((1 << 64) - 1)
    run.model[1].weight.data.neg_()
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"model\.1\.weight.*audit"):
        handle.result(timeout=30)


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.float64),
        lambda m: [p.__setattr__("data", torch.zeros_like(p)) for p in m.parameters()],
    ],
    ids=["half", "to", "data="],
)
def test_parameters_that_are_given_other_memory_leave_the_snapshot_whole(
    convert: Any, make_run: Any, disk: Any, graph: Any
) -> None:
    """The old storages are held until they are copied."""
    run = make_run(FUSED)
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    convert(run.model)
    garbage = [torch.full((256, 256), -1.0) for _ in range(20)]
    disk.release()
    assert graph(saved(handle)["model"]) == graph(before["model"])
    del garbage


def test_an_optimizer_whose_parameter_was_given_the_memory_of_another_waits(make_run: Any, disk: Any) -> None:
    """Its own storages are copied by then: the largest comes first, and fits into the ring."""
    first = torch.nn.Linear(25_600, 1, bias=False)
    small = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(11)))
    run = make_run(lambda p: torch.optim.SGD(p, lr=0.1), small, host_buffer_bytes=256 << 10)
    run.ckpt.track(first=first)
    mine = torch.optim.SGD(first.parameters(), lr=1.0, fused=True)
    first.weight.grad = torch.ones_like(first.weight)
    mine.step()
    run.step()
    before = small[9].weight.detach().clone()
    disk.hold()
    handle = run.ckpt.save(1)
    mine.step()  # returns although the disk is held
    first.weight.data = small[9].weight.data
    first.weight.grad = torch.ones_like(first.weight)
    disk.release(after_s=0.05)
    mine.step()
    assert handle.metrics.gate_blocked_s > 0.02
    assert torch.equal(saved(handle)["model"]["9.weight"], before)


@pytest.mark.parametrize("same_address", [False, True])
def test_a_parameter_whose_storage_is_resized_fails_the_checkpoint(
    same_address: bool, make_run: Any, disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sharded training does it. No version moves, and an allocator may give the same address again. The page witness
    may see first that the allocator writes to what was freed: it is off."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    run = make_run(FUSED, model, witness="versions")
    run.step()
    storage = run.model[1].weight.untyped_storage()
    disk.hold()
    handle = run.ckpt.save(1)
    if same_address:
        address, real = storage.data_ptr(), devices.data_ptr
        monkeypatch.setattr(devices, "data_ptr", lambda s: address if s._cdata == storage._cdata else real(s))
    torch._C.StorageBase.resize_(storage, 2 * storage.nbytes())  # past the gate, as C++ may
    disk.release()
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"model\.1\.weight was given other memory"):
        handle.result(timeout=30)


@pytest.mark.parametrize(
    "give_back",
    [
        lambda storage: storage.resize_(0),
        lambda storage: storage.share_memory_(),
        lambda storage: ForkingPickler.dumps(torch.empty(0).set_(storage)),
    ],
    ids=["resize", "share", "send"],
)
def test_a_storage_lets_go_of_its_memory_when_that_is_copied(
    give_back: Any, make_run: Any, disk: Any, pending: Any, graph: Any
) -> None:
    """Regression: what was freed was read, and where it was large the process ended."""
    run = make_run(FUSED)
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    give_back(torch.ones(9).untyped_storage())  # another's
    assert pending(handle) > 0
    disk.release(after_s=0.05)
    give_back(run.model[2].weight.untyped_storage())
    assert pending(handle) == 0
    assert graph(saved(handle)["model"]) == graph(before["model"])


def test_a_captured_snapshot_holds_no_tensor(make_run: Any) -> None:
    run = make_run(FUSED)
    table = torch.zeros(30_000)
    run.ckpt.track(x={"t": table})
    handle = run.ckpt.save(1)
    snapshot = handle._snapshot
    handle.result()
    run.ckpt._provider.parts["x"].load_state({})
    gone = weakref.ref(table.untyped_storage())
    del table
    gc.collect()
    assert gone() is None
    assert snapshot.sources.files == []


# frozen parameters


@pytest.fixture
def lora(make_run: Any) -> Any:
    """A frozen base and a trained adapter."""
    base = torch.nn.Linear(256, 256)
    model = torch.nn.Sequential(base.requires_grad_(False), torch.nn.Linear(256, 256))
    return make_run(lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=0.1, fused=True), model)


def test_a_frozen_parameter_becomes_lazy_after_two_equal_captures(lora: Any) -> None:
    base = lora.model[0].weight.nbytes
    sizes = [eager_bytes(lora, step) for step in range(4)]
    assert sizes[0] == sizes[1] and sizes[2] == sizes[3] == sizes[0] - base
    before = lora.model[0].weight.clone()
    assert torch.equal(saved(lora.ckpt.save(9))["model"]["0.weight"], before)


def test_a_frozen_parameter_that_moves_its_version_is_eager_again(lora: Any) -> None:
    base = lora.model[0].weight.nbytes
    sizes = [eager_bytes(lora, step) for step in range(3)]
    with torch.no_grad():
        lora.model[0].weight.mul_(2)
    changed = lora.model[0].weight.clone()
    assert eager_bytes(lora, 3) == sizes[2] + base
    assert torch.equal(saved(lora.ckpt.save(4))["model"]["0.weight"], changed)


def test_a_silent_change_of_a_lazy_frozen_parameter_fails_and_makes_it_eager_for_good(lora: Any) -> None:
    base = lora.model[0].weight.nbytes
    sizes = [eager_bytes(lora, step) for step in range(3)]
    lora.model[0].weight.data.mul_(2)
    lora.step()
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"model\.0\.weight.*frozen"):
        lora.ckpt.save(3).result(timeout=30)
    assert eager_bytes(lora, 4) > sizes[2] + base  # after a torn snapshot everything is copied at once
    assert [eager_bytes(lora, step) - sizes[2] for step in range(5, 9)] == [base] * 4
    assert torch.equal(saved(lora.ckpt.save(9))["model"]["0.weight"], lora.model[0].weight)


def test_a_frozen_parameter_written_to_while_it_waits_fails_the_checkpoint(lora: Any, disk: Any) -> None:
    for step in range(3):
        eager_bytes(lora, step)
    lora.step()
    disk.hold()
    handle = lora.ckpt.save(3)
    with torch.no_grad():
        lora.model[0].weight.mul_(2)
    disk.release()
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"model\.0\.weight"):
        handle.result(timeout=30)


def test_frozen_parameters_are_found_wherever_they_are() -> None:
    shared = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(shared, torch.nn.Sequential(shared, torch.nn.BatchNorm1d(2)), torch.nn.Linear(2, 2))
    model[1][1].register_parameter("none", None)
    model.register_module("nothing", None)
    model.add_module("itself", torch.nn.ModuleList([shared]))
    for frozen in (shared.weight, model[1][1].bias, model[2].weight):
        frozen.requires_grad_(False)
    sparse = torch.nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    model[2].register_parameter("sparse", sparse)
    expected = {id(p) for p in model.parameters() if not p.requires_grad} - {id(sparse)}
    assert len(expected) == 3
    found = frozen_parameters([model, shared])
    assert {id(p) for p in found} == expected


def test_after_a_restore_frozen_parameters_earn_their_laziness_anew(lora: Any, tmp_path: Any) -> None:
    """Restore writes to them; that is not somebody's forbidden write."""
    other = tmp_path / "other"
    with lazyckpt.Checkpointer(other) as ckpt:
        ckpt.track(model=lora.model, optimizer=lora.optimizer)
        path = ckpt.save(1).result()
    lora.model[0].weight.data.mul_(3)
    for step in range(3):
        eager_bytes(lora, step)
    lora.ckpt.restore(path=path)
    handle = lora.ckpt.save(7)
    assert torch.equal(saved(handle)["model"]["0.weight"], lora.model[0].weight)
