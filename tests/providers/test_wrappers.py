"""Wrapper subclasses: the inner tensors belong to the optimizer that owns the wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import lazyckpt
from lazyckpt.gate.evidence import addresses
from lazyckpt.providers.wrappers import address_inside, links_of, storages_in

MATRIX = 256 * 256 * 4
HELD_S = 0.05
WITNESSES = pytest.mark.parametrize("witness", ["auto", "versions"])
aten = torch.ops.aten


class Boxed(torch.Tensor):
    """Stands for low-bit state: its value is the sum of two tensors inside."""

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Boxed:
        made: Boxed = torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype, device=high.device)
        return made

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> Any:
        return ["high", "low"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].high.detach(), args[0].low.detach())
        plain_args, plain_kwargs = tree_map_only(Boxed, Boxed.value, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            args[0].high.copy_(out)
            args[0].low.zero_()
            return args[0]
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl

    def value(self) -> torch.Tensor:
        high, low = (t.value() if isinstance(t, Boxed) else t for t in (self.high, self.low))
        return high + low


def boxed(fill: float = 0.0, size: int = 256) -> Boxed:
    return Boxed(torch.full((size, size), fill), torch.zeros(size, size))


def nested() -> Boxed:
    return Boxed(boxed(), boxed())


class LowBit(torch.optim.SGD):
    """Its momentum is in wrappers."""

    make: Callable[[], torch.Tensor] = staticmethod(boxed)

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, foreach=False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", None)
                    if momentum is None:
                        momentum = self.state[p]["momentum"] = self.make()
                    momentum.add_(p.grad)
                    p.add_(p.grad, alpha=-0.1)


class WithNested(LowBit):
    make = staticmethod(nested)


def matrices() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(3)))


def eager_matrices(run: Any, step: int = 1) -> int:
    """How many matrices of 256 KiB ``save()`` copies itself."""
    return int(run.ckpt.save(step, blocking=True).metrics.eager_bytes) // MATRIX


def saved(handle: lazyckpt.SaveHandle) -> Any:
    return torch.load(handle.result(timeout=30) / "state.pt", weights_only=False)


def momenta(state: Any) -> list[torch.Tensor]:
    return [entry["momentum"].value() for entry in state["optimizer"]["state"].values()]


@WITNESSES
@pytest.mark.parametrize("kind", [LowBit, WithNested])
def test_state_in_wrappers_is_lazy_and_of_the_moment_of_save(
    kind: Any, witness: str, make_run: Any, disk: Any, pending: Any
) -> None:
    run = make_run(kind, matrices(), witness=witness)
    for step in range(3):
        before = [entry["momentum"].value() for entry in run.optimizer.state.values()]
        disk.hold()
        handle = run.ckpt.save(step)
        assert pending(handle) > 0
        run.backward()
        disk.release(after_s=HELD_S)
        run.optimizer.step()
        assert handle.metrics.eager_bytes < handle.metrics.bytes * 0.03
        assert all(map(torch.equal, momenta(saved(handle)), before))
        assert not torch.equal(next(iter(run.optimizer.state.values()))["momentum"].value(), before[0])


def parameters_in_boxes(count: int) -> torch.nn.ParameterList:
    return torch.nn.ParameterList(torch.nn.Parameter(boxed(1.0)) for _ in range(count))


def step_on(run: Any, *numbers: int) -> None:
    run.optimizer.zero_grad()
    for number in numbers:
        run.model[number].grad = boxed(1.0)
    run.optimizer.step()


SGD = lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)  # noqa: E731


def test_a_step_waits_for_what_was_moved_from_one_wrapper_into_another(make_run: Any, disk: Any, graph: Any) -> None:
    """Who owns the wrappers now may own any of the storages."""
    run = make_run(SGD, parameters_in_boxes(4), warm=False)
    other = torch.nn.Parameter(boxed(3.0))
    foreign = torch.optim.SGD([other], lr=0.1, foreach=False)
    other.grad = boxed(1.0)
    foreign.step()
    step_on(run, 0, 1, 2, 3)
    before = [p.value() for p in run.model]
    disk.hold()
    handle = run.ckpt.save(1)
    other.high, run.model[0].high = run.model[0].high, other.high
    disk.release(after_s=HELD_S)
    foreign.step()
    assert handle.metrics.gate_blocked_s > HELD_S / 2
    found = saved(handle)["model"]
    assert all(torch.equal(found[str(n)].value(), value) for n, value in enumerate(before))


# who writes outside of a step


def through_the_wrapper(wrapper: Any) -> None:
    wrapper.add_(1)


def through_what_is_inside(wrapper: Any) -> None:
    while isinstance(wrapper, Boxed):
        wrapper = wrapper.high
    wrapper.add_(1)


def through_a_copy_of_the_wrapper(wrapper: Any) -> None:
    wrapper.detach().add_(1)


def through_a_box_inside(wrapper: Any) -> None:
    (wrapper.high if isinstance(wrapper.high, Boxed) else wrapper).add_(1)


def through_a_wrapper_that_took_what_was_inside(wrapper: Any) -> None:
    """As averages are swapped in: ``save()`` saw neither the taker nor its version."""
    taker = nested() if isinstance(wrapper.high, Boxed) else boxed()
    taker.high, wrapper.high = wrapper.high, taker.high
    taker.add_(1)


@WITNESSES
@pytest.mark.parametrize("kind", [LowBit, WithNested])
@pytest.mark.parametrize(
    "write",
    [
        through_the_wrapper,
        through_what_is_inside,
        through_a_copy_of_the_wrapper,
        through_a_box_inside,
        through_a_wrapper_that_took_what_was_inside,
    ],
)
def test_a_write_outside_of_a_step_fails_the_checkpoint_and_names_the_tensor(
    write: Callable[[Any], None], kind: Any, witness: str, make_run: Any, disk: Any
) -> None:
    run = make_run(kind, matrices(), witness=witness)
    disk.hold()
    handle = run.ckpt.save(1)
    write(run.optimizer.state[run.model[2].weight]["momentum"])
    disk.release()
    where = r"optimizer\.state\.2\.momentum\.high|data/\d+"
    with pytest.raises(lazyckpt.TornSnapshotError, match=where if "took" in write.__name__ else where.split("|")[0]):
        handle.result(timeout=30)
    run.step()
    saved(run.ckpt.save(2))


@WITNESSES
def test_frozen_wrappers_become_lazy_and_a_write_to_them_is_found(witness: str, make_run: Any, disk: Any) -> None:
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = parameters_in_boxes(2).requires_grad_(False)
            self.adapter = torch.nn.Linear(256, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.adapter(x[:, :256])
            return y

    run = make_run(lambda p: torch.optim.SGD([q for q in p if q.requires_grad], 0.1), Adapted(), witness=witness)
    run.batch = lambda: torch.ones(1, 256)
    eager = []
    for step in range(3):
        eager.append(eager_matrices(run, step))
        run.step()
    assert eager == [4, 4, 0]
    disk.hold()
    handle = run.ckpt.save(3)
    with torch.no_grad():
        run.model.base[1].add_(1)
    disk.release()
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"model\.base\.1\.high"):
        handle.result(timeout=30)


# classes that do not keep to the rules


class Fresh(Boxed):
    """Gives other tensors at each call."""

    @property
    def upper(self) -> torch.Tensor:
        return self.high.view_as(self.high)

    def __tensor_flatten__(self) -> Any:
        return ["upper"], None


class Refusing(Boxed):
    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError("not for you")


class Vague(Boxed):
    def __tensor_flatten__(self) -> Any:
        return None


class Forgetful(Boxed):
    def __tensor_flatten__(self) -> Any:
        return ["lost"], None


class Endless(Boxed):
    """Is inside of itself."""

    def __tensor_flatten__(self) -> Any:
        return ["itself"], None

    @property
    def itself(self) -> torch.Tensor:
        return self


BROKEN = [Fresh, Refusing, Vague, Forgetful, Endless]


@WITNESSES
@pytest.mark.parametrize("kind", BROKEN)
def test_wrappers_that_do_not_tell_what_is_inside_are_eager(
    kind: type[Boxed], witness: str, make_run: Any, disk: Any
) -> None:
    class Kept(LowBit):
        make = staticmethod(lambda: kind(torch.zeros(256, 256), torch.zeros(256, 256)))

    run = make_run(Kept, matrices(), witness=witness, host_buffer_bytes=8 << 20)
    for step in range(2):
        before = [entry["momentum"].value() for entry in run.optimizer.state.values()]
        handle = run.ckpt.save(step)
        for entry in run.optimizer.state.values():
            entry["momentum"].high.data.add_(1)
        assert all(map(torch.equal, momenta(saved(handle)), before))
        assert handle.metrics.eager_bytes // MATRIX == 6
        run.step()


def test_inference_tensors_inside_or_outside_are_eager() -> None:
    with torch.inference_mode():
        outside, high = boxed(), torch.zeros(256, 256)
    assert links_of(outside) == [] and address_inside(outside) == 0
    _, inner = storages_in(Boxed(high, torch.zeros(256, 256)))
    assert list(inner.seen.whole) == [0, 1]


class Plain(torch.Tensor):
    """Has memory of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.untyped_storage, torch.Tensor.data_ptr, torch.Tensor.is_contiguous):
            raise TypeError("not for you")
        return super().__torch_function__(func, types, args, kwargs or {})


class PlainThatFlattens(Plain):
    def __tensor_flatten__(self) -> Any:
        return [], None


@pytest.mark.parametrize("kind", [Plain, PlainThatFlattens])
def test_a_subclass_with_memory_of_its_own_is_no_wrapper(kind: Any) -> None:
    for tensor in (torch.ones(4).as_subclass(kind), torch.nn.Parameter(torch.ones(4).as_subclass(kind))):
        [found] = storages_in([tensor])
        assert [id(t) for t in found.tensors] == [id(tensor)]
        with torch._C.DisableTorchFunction():
            assert found.identities == [tensor.untyped_storage()._cdata] and list(found.seen.whole) == [1]
            expected = [tensor.data_ptr()]
        assert addresses([tensor]) == expected


# DTensors


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """restore() reads these classes; otherwise the first save() would refuse them."""
    mine = [c for c in globals().values() if isinstance(c, type) and issubclass(c, torch.Tensor)]
    with torch.serialization.safe_globals(mine):
        yield


@pytest.fixture
def one_rank() -> Iterator[Any]:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("this torch has no distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def distributed(mesh: Any, how: str) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = matrices()
    if how == "fully_shard":
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    for layer in model:
        placements = [Replicate() if how == "replicated" else Shard(0)]
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))
    return model


@WITNESSES
@pytest.mark.parametrize("how", ["replicated", "sharded", "fully_shard"])
def test_dtensors_on_one_rank_are_lazy(
    how: str, witness: str, make_run: Any, disk: Any, pending: Any, one_rank: Any
) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    run = make_run(lambda p: torch.optim.AdamW(p, lr=0.1), distributed(one_rank, how), warm=False, witness=witness)
    x = torch.ones(1, 256)
    batch = x if how == "fully_shard" else distribute_tensor(x, one_rank, [Replicate()])
    run.batch = lambda: batch

    def tensors() -> Iterator[torch.Tensor]:
        for p in run.model.parameters():
            yield p.to_local().detach().clone()
            yield run.optimizer.state[p]["exp_avg"].to_local().clone()

    run.step()
    for step in range(3):
        before = list(tensors())
        disk.hold()
        handle = run.ckpt.save(step)
        assert pending(handle) > 0
        run.backward()
        disk.release(after_s=HELD_S)
        run.optimizer.step()
        assert handle.metrics.eager_bytes < handle.metrics.bytes * 0.03
        state = lazyckpt.load(handle.result(timeout=30))
        found = [
            (state["model"][f"{n}.weight"], state["optimizer"]["state"][f"{n}.weight"]["exp_avg"]) for n in range(3)
        ]
        assert all(map(torch.equal, itertools.chain.from_iterable(found), before))
