"""Everything that is known to write to parameters and optimizer state, each in a small training of its own.

A writer says which witnesses can see it. One that ``versions`` cannot see has a row in the documentation: the call
that covers it where there is no page witness. The test of the documentation compares that table with this registry.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import lazyckpt
from writers.judge import Flat, different

KIB = 1024
PAGES, VERSIONS = "pages", "versions"
EVERYONE = frozenset({PAGES, VERSIONS})
ONLY_PAGES = frozenset({PAGES})
ALL_WAYS = frozenset({"checkpointer", "archive", "safetensors", "folder"})
TRACKED = frozenset({"checkpointer"})  # where lazyckpt knows the modules and optimizers, not just their tensors
WAIT = "`lazyckpt.wait_captured()` before the write"
# Rows of the documentation's table that need a GPU to be tried.
ON_DEVICES = (("kernels on a side stream of a GPU that run past the gate", WAIT),)


@dataclass(frozen=True)
class Size:
    name: str
    numels: tuple[int, ...]  # of the parameters
    chunk_bytes: int


SIZES = {
    size.name: size
    for size in (
        Size("small", (12_000,) * 24, 16 * KIB),  # 48 KB each: below what a page witness protects
        # Around a page, 64 KiB and a chunk, and none of them a whole number of pages at its end.
        Size("edges", (1024, 1025, 16_384, 16_385, 20_000, 32_768, 65_537), 16 * KIB),
        Size("medium", (50_000, 35_000, 50_000, 27_777, 45_000), 64 * KIB),
        Size("large", (2_500_000, 500_000), 256 * KIB),  # normal_() takes 30 ms
    )
}


class Layer(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.square().sum()  # not the mean: every step has to move every element


class Writer:
    """A training whose model and optimizer are saved, and a write that comes right after ``save()``."""

    name: ClassVar[str]
    seen_by: ClassVar[frozenset[str]] = EVERYONE
    always_commits: ClassVar[frozenset[str]] = frozenset()  # ways in which it must not even fail a save
    row: ClassVar[tuple[str, str]] = ("", "")  # of the documentation, for what `versions` does not see: writer, cure
    sizes: ClassVar[tuple[str, ...]] = tuple(SIZES)
    ways: ClassVar[frozenset[str]] = ALL_WAYS
    slow: ClassVar[bool] = False  # not in the short run
    races: ClassVar[bool] = False  # writes during save(), so that wait_captured() afterwards is too late
    swaps: ClassVar[bool] = False  # the storages behind a name are others from save to save

    def __init__(self, size: Size, chance: random.Random) -> None:
        self.size = size
        self.chance = chance
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        self.tracked: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.prepare()

    @classmethod
    def unavailable(cls) -> str:
        """Why it cannot be tried here; empty if it can."""
        return ""

    def make_model(self) -> nn.Module:
        return nn.Sequential(*map(Layer, self.size.numels))

    def make_optimizer(self) -> Optimizer:
        if self.size.name == "large":
            return SGD(self.parameters(), lr=0.01, fused=self.chance.random() < 0.5)
        kind = self.chance.choice(({"fused": True}, {"foreach": True}, {"foreach": False}))
        if self.chance.random() < 0.5:
            return AdamW(self.parameters(), lr=0.01, **kind)
        return SGD(self.parameters(), lr=0.01, momentum=0.9, **kind)

    def prepare(self) -> None:
        """Builds what else there is."""

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.zeros(()))
        loss.backward()
        return loss

    def train(self) -> None:
        """Takes an ordinary step."""
        self.backward()
        self.optimizer.step()

    def before_save(self) -> None:
        """What training does right before every ``save()``."""

    def start(self) -> None:
        """Begins what goes on during ``save()``, until ``after()``."""

    def write(self) -> None:
        """Writes. It may start what goes on until ``after()``."""
        raise NotImplementedError

    def after(self) -> None:
        """Ends what ``write()`` began, once the save has ended."""

    def close(self) -> None:
        """Undoes what outlives the training."""

    def instant(self) -> dict[str, Any]:
        """What else ``wrong`` is to be told of the save that was just made."""
        return {}

    def wrong(self, found: Flat, expected: Flat) -> list[str]:
        """Returns the names of tensors in ``found`` that are not of the instant of ``save()``."""
        return different(found, expected)


REGISTRY: dict[str, type[Writer]] = {}


def register(cls: type[Writer]) -> type[Writer]:
    assert cls.name not in REGISTRY
    assert (VERSIONS in cls.seen_by) == (cls.row == ("", "")), "what `versions` cannot see is in the documentation"
    REGISTRY[cls.name] = cls
    return cls


# Writes that come out of nowhere: each is a function of one tensor


class Write(Writer):
    """Changes some parameters, and some optimizer state, by ``change``."""

    change: ClassVar[Callable[[torch.Tensor], object]]
    threaded: ClassVar[bool] = False

    def prepare(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def targets(self) -> list[torch.Tensor]:
        state = [t for s in self.optimizer.state.values() for t in s.values()]
        every = [t for t in (*self.parameters(), *state) if isinstance(t, torch.Tensor) and t.numel() > 1]
        every.sort(key=lambda t: t.numel(), reverse=True)
        return every if self.chance.random() < 0.5 else every[: self.chance.randint(1, len(every))]

    def write(self) -> None:
        targets, change = self.targets(), type(self).change
        if not self.threaded:
            for tensor in targets:
                change(tensor)
            return
        begun = threading.Event()

        def write_on() -> None:
            while not self._stop.is_set():
                for tensor in targets:
                    change(tensor)
                    begun.set()

        self._stop.clear()
        self._thread = threading.Thread(target=write_on, daemon=True)
        self._thread.start()
        begun.wait()

    def after(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _in_place(change: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    return torch.no_grad()(change)


def _elements(tensor: torch.Tensor) -> Iterator[int]:
    """Places at both ends and inside of a tensor."""
    yield from {0, tensor.numel() // 3, tensor.numel() - 1}


def _few(tensor: torch.Tensor) -> None:
    flat = tensor.detach().flatten()
    for at in _elements(tensor):
        flat[at] += 1.0


def _few_by_numpy(tensor: torch.Tensor) -> None:
    array = tensor.detach().numpy().reshape(-1)
    for at in _elements(tensor):
        array[at] += 1.0


def _last_by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy().reshape(-1)[-1] += 1.0


def _numpy(tensor: torch.Tensor) -> None:
    array = tensor.detach().numpy()
    array += 1.0


def _memmove(tensor: torch.Tensor) -> None:
    source = tensor.detach() + 1.0
    ctypes.memmove(tensor.data_ptr(), source.data_ptr(), tensor.nbytes)


def _storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().copy_((tensor.detach() * 1.5).untyped_storage())


def _dlpack(tensor: torch.Tensor) -> None:
    torch.from_dlpack(tensor.detach()).mul_(1.5)


class _Around(torch.Tensor):
    """A wrapper subclass that somebody makes around a tensor: a write through it moves the wrapper's version alone."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> _Around:
        made: _Around = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        return made

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func(*(arg.inside if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))
        return args[0]


def _around(tensor: torch.Tensor) -> None:
    _Around(tensor.detach()).mul_(1.5)


def _preserved(tensor: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.mul_(1.5)


def _fused(tensor: torch.Tensor) -> None:
    """The kernel of a fused optimizer, called by hand."""
    common = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    # Upwards: a negative second moment gives NaN in the next step, and to write to that changes no bit.
    torch._fused_sgd_([tensor], [torch.ones_like(tensor)], [], lr=-0.5, is_first_step=False, **common)


def _apply(tensor: torch.Tensor) -> None:
    """Python, element by element: the last thousand are enough."""
    tensor.detach()[-1000:].apply_(lambda x: x * 1.5 + 1.0)


def _readv(tensor: torch.Tensor) -> None:
    content = (tensor.detach() * 1.5).numpy().tobytes()
    file = os.memfd_create("content")
    try:
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        view = memoryview(tensor.detach().numpy()).cast("B")
        done = 0
        while done < len(content):
            done += os.readv(file, [view[done:]])
    finally:
        os.close(file)


def _recv_into(tensor: torch.Tensor) -> None:
    content = (tensor.detach() * 1.5).numpy().tobytes()
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=there.sendall, args=(content,))
        sender.start()
        view = memoryview(tensor.detach().numpy()).cast("B")
        done = 0
        while done < len(content):
            done += here.recv_into(view[done:])
        sender.join()


@torch.library.custom_op("lazyckpt_writers::scale", mutates_args={"tensor"})
def _scale(tensor: torch.Tensor) -> None:
    """An op that moves the version before it writes."""
    array = tensor.numpy()
    array += 1.0


def _busy() -> None:
    """Runs Python for a while: between any two bytecodes, others may look."""
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        pass


class _ThenBusy(TorchDispatchMode):
    """What it sees is written already, and the version moves when it returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        _busy()
        return result


def _dispatched(tensor: torch.Tensor) -> None:
    with _ThenBusy():
        tensor.mul_(1.5)


class _Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensor.mul_(1.5)
        _busy()
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@torch.inference_mode()
def _inference(tensor: torch.Tensor) -> None:
    tensor.mul_(1.5)


def _resized(tensor: torch.Tensor) -> None:
    """As sharded training does: the memory is given back, and there is other memory later."""
    kept = tensor.detach() * 1.5
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    tensor.data.copy_(kept)


def _shared(tensor: torch.Tensor) -> None:
    """It moves into shared memory, and is written to there."""
    tensor.share_memory_()
    _numpy(tensor)


def _add(
    name: str,
    change: Callable[[torch.Tensor], object],
    *,
    row: str = "",
    threaded: bool = False,
    slow: bool = False,
) -> None:
    attributes: dict[str, Any] = {
        "name": name,
        "change": staticmethod(_in_place(change)),
        "threaded": threaded,
        "slow": slow,
        "seen_by": ONLY_PAGES if row else EVERYONE,
        "row": (row, WAIT) if row else ("", ""),
    }
    register(type(Write)(name, (Write,), attributes))


THREAD = "another thread, by anything but the step of an optimizer"
_add("normal_", nn.init.normal_)
_add("mul_", lambda t: t.mul_(1.5))
_add("a slice", lambda t: t[t.numel() // 2 :].add_(1.0))
_add("a few elements", _few)
_add("custom op", _scale)
_add("dispatch mode", _dispatched)
_add("autograd.Function", _Dirty.apply)
_add("inference_mode", _inference)
_add("resize_", _resized)
_add("share_memory_", _shared)
_add(".data", lambda t: t.data.mul_(1.5), row="`.data`")
_add("numpy", _numpy, row="NumPy views")
_add("numpy, a few elements", _few_by_numpy, row="NumPy views")
_add("numpy, the last element", _last_by_numpy, row="NumPy views")
_add("memmove", _memmove, row="C and C++ code, Triton and CuPy kernels, anything that has the address")
_add("storage", _storage, row="methods of `untyped_storage()`")
_add("dlpack", _dlpack, row="DLPack")
_add("wrapper around it", _around, row="a wrapper subclass made around the tensor, as by `DTensor.from_local`")
_add("version counter preserved", _preserved, row="`torch.autograd._unsafe_preserve_version_counter`")
_add("fused kernel by hand", _fused, row="`torch._fused_…_` outside of a step")
_add("apply_", _apply, row="`apply_`, `map_`")
_add("readv", _readv, row="`os.readv`, `recv_into`, and other system calls")
_add("recv_into", _recv_into, row="`os.readv`, `recv_into`, and other system calls")
_add("normal_, thread", nn.init.normal_, row=THREAD, threaded=True)
_add("numpy, thread", _numpy, row=THREAD, threaded=True)
_add("memmove, thread", _memmove, row=THREAD, threaded=True, slow=True)


# Collectives


@functools.cache
def _ranks() -> tuple[Any, Any]:
    """Two ranks of gloo in this process."""
    store = torch.distributed.HashStore()
    groups: list[Any] = [None, None]

    def join(rank: int) -> None:
        groups[rank] = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    return groups[0], groups[1]


def _on_other_rank(call: Callable[[Any, torch.Tensor], Any], tensor: torch.Tensor) -> None:
    here, there = _ranks()
    theirs = tensor.detach() * 1.5
    peer = threading.Thread(target=lambda: call(there, theirs).wait())
    peer.start()
    call(here, tensor.detach()).wait()
    peer.join()


def _all_reduce(tensor: torch.Tensor) -> None:
    _on_other_rank(lambda group, t: group.allreduce([t]), tensor)


def _broadcast(tensor: torch.Tensor) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 1
    _on_other_rank(lambda group, t: group.broadcast([t], options), tensor)


class Collective(Write):
    seen_by = ONLY_PAGES
    row = ("collectives into a parameter (`all_reduce`, `broadcast`: local SGD, averaging)", WAIT)

    @classmethod
    def unavailable(cls) -> str:
        gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        return "" if gloo else "this torch has no gloo"


@register
class AllReduce(Collective):
    name = "all_reduce"
    change = staticmethod(_all_reduce)


@register
class Broadcast(Collective):
    name = "broadcast"
    change = staticmethod(_broadcast)


# Steps: these wait at the gate


class Step(Writer):
    always_commits = ALL_WAYS
    make: ClassVar[Callable[[Any], Optimizer]]

    def make_optimizer(self) -> Optimizer:
        return type(self).make(self.parameters())

    def write(self) -> None:
        self.train()


def _step(name: str, make: Callable[[Any], Optimizer]) -> None:
    register(type(Step)(name, (Step,), {"name": name, "make": staticmethod(make)}))


_step("fused step", functools.partial(AdamW, lr=0.01, fused=True))
_step("foreach step", functools.partial(AdamW, lr=0.01, foreach=True))
_step("for-loop step", functools.partial(SGD, lr=0.01, momentum=0.9, foreach=False))


@register
class StepOfClosure(Step):
    name = "step with a closure"
    make = staticmethod(functools.partial(AdamW, lr=0.01, fused=True))

    def train(self) -> None:
        self.optimizer.step(self.backward)  # type: ignore[arg-type]


@register
class SeveralClosures(StepOfClosure):
    """Weights move between the closures of one step."""

    name = "LBFGS"
    make = staticmethod(functools.partial(torch.optim.LBFGS, lr=0.01, max_iter=2, history_size=2))
    sizes = ("small", "medium")


@register
class Compiled(Step):
    name = "compiled step"
    make = staticmethod(functools.partial(SGD, lr=0.01, momentum=0.9))
    sizes = ("medium", "large")
    slow = True

    def prepare(self) -> None:
        self._step = torch.compile(self.optimizer.step, backend="eager")

    def train(self) -> None:
        self.backward()
        self._step()


@register
class InBackward(Writer):
    """One optimizer for each parameter, which steps as soon as the gradient is there."""

    name = "optimizer in backward"
    always_commits = ALL_WAYS

    def prepare(self) -> None:
        self.optimizers = {p: SGD([p], lr=0.01, momentum=0.9, fused=True) for p in self.parameters()}
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self._step)
        self.tracked = {"model": self.model} | {f"o{i}": o for i, o in enumerate(self.optimizers.values())}

    def _step(self, p: torch.Tensor) -> None:
        self.optimizers[p].step()  # type: ignore[index]
        self.optimizers[p].zero_grad()  # type: ignore[index]

    def train(self) -> None:
        self.model(torch.zeros(())).backward()

    def write(self) -> None:
        self.train()


class SlowToPickle:
    """Gives other threads time inside of ``save()``."""

    def __init__(self, seconds: float = 0.003) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(self.seconds)
        return SlowToPickle, (self.seconds,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlowToPickle)

    __hash__ = None  # type: ignore[assignment]


torch.serialization.add_safe_globals([SlowToPickle])  # or the first save would be refused


@register
class StepsOnAnotherThread(Writer):
    """Fused steps go on all the time, before ``save()``, in it and after it. Each adds 1 to everything."""

    name = "steps on another thread"
    ways = frozenset({"checkpointer", "archive"})  # these take any object
    races = True
    swaps = True  # what fails is no storage's fault

    def make_model(self) -> nn.Module:
        model = super().make_model()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        return model

    def make_optimizer(self) -> Optimizer:
        return SGD(self.parameters(), lr=1.0, fused=True)

    def prepare(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._steps = 0
        self._steps_at_save = 0
        self.tracked["slow"] = {"object": SlowToPickle()}
        self._racing = False

    def train(self) -> None:
        for p in self.parameters():
            p.grad = torch.full_like(p, -1.0)
        self._steps += 1
        self.optimizer.step()

    def before_save(self) -> None:
        self._racing = False

    def start(self) -> None:
        self._racing = True
        begun = threading.Event()
        pauses = random.Random(self.chance.random())

        def step_on() -> None:
            while not self._stop.is_set():
                self.train()
                begun.set()
                time.sleep(pauses.random() / 500)  # sometimes save() begins between two steps

        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self._stop.clear()
        self._thread = threading.Thread(target=step_on, daemon=True)
        self._thread.start()
        begun.wait()
        self._steps_at_save = self._steps

    def write(self) -> None:
        pass

    def after(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._interval)
            self.train()  # so that what was torn is different now

    def instant(self) -> dict[str, Any]:
        return {"steps": range(self._steps_at_save - 1, self._steps + 1) if self._racing else None}

    def wrong(self, found: Flat, expected: Flat, steps: range | None = None) -> list[str]:
        if steps is None:
            return different(found, expected)
        tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, torch.Tensor)}
        value = next(iter(tensors.values())).flatten()[0]
        if int(value) not in steps:
            return [f"all of them: step {value}, while save() ran in {steps}"]
        return [name for name, leaf in tensors.items() if bool((leaf != value).any())]


# Hooks of optimizers, modules and gradients


class PreHook(Writer):
    """A hook in front of every step decays the weights; lazyckpt's own hook comes before those of the instance."""

    instance: ClassVar[bool]
    closure: ClassVar[bool]

    def prepare(self) -> None:
        if self.instance:
            self._handle = self.optimizer.register_step_pre_hook(self._decay)
        else:
            self._handle = torch_optimizer.register_optimizer_step_pre_hook(self._decay)
            # Registered before lazyckpt was imported, say.
            torch_optimizer._global_optimizer_pre_hooks.move_to_end(self._handle.id, last=False)

    def _decay(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizer:
            with torch.no_grad():
                torch._foreach_mul_(self.written(), 0.9)

    def written(self) -> list[torch.Tensor]:
        return [p.data for p in self.parameters()] if self.instance else [*self.parameters()]

    def train(self) -> None:
        if self.closure:
            self.optimizer.step(self.backward)  # type: ignore[arg-type]
        else:
            super().train()

    def write(self) -> None:
        self.train()

    def close(self) -> None:
        self._handle.remove()


for _instance in (True, False):
    for _closure in (True, False):
        _name = ("" if _instance else "global ") + "step pre-hook" + (", with a closure" if _closure else "")
        _always = ALL_WAYS if _instance else frozenset()
        _facts = {"name": _name, "instance": _instance, "closure": _closure, "always_commits": _always}
        register(type(_name, (PreHook,), _facts))


@register
class ClosureThatWrites(Writer):
    """The closure clips the weights before it runs forward."""

    name = "closure that writes"

    def _closure(self) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_mul_(self.parameters(), 0.9)
        return self.backward()

    def train(self) -> None:
        self.optimizer.step(self._closure)  # type: ignore[arg-type]

    def write(self) -> None:
        self.train()


@register
class ForwardHook(Writer):
    """Each layer standardizes its weight in place before it computes."""

    name = "forward hook"

    def prepare(self) -> None:
        for layer in self.model:  # type: ignore[attr-defined]
            layer.register_forward_pre_hook(self._standardize)

    @staticmethod
    @torch.no_grad()
    def _standardize(layer: Layer, args: Any) -> None:
        layer.weight.sub_(layer.weight.mean() + 0.01)

    def write(self) -> None:
        self.backward()


@register
class GradientHook(Writer):
    """LOMO: half of the parameters are updated as soon as their gradient is there, which is dropped."""

    name = "gradient hook"
    always_commits = ALL_WAYS

    def prepare(self) -> None:
        for p in self.parameters()[::2]:
            p.register_post_accumulate_grad_hook(self._update)

    @staticmethod
    def _update(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.data.add_(p.grad, alpha=-0.1)
        p.data.mul_(0.99)
        p.grad = None

    def write(self) -> None:
        self.backward()


# Averages


@register
class AverageUpdate(Writer):
    """A moving average that is saved, too; lazyckpt does not know which code updates it."""

    name = "EMA, updated in place"
    always_commits = ALL_WAYS

    def prepare(self) -> None:
        self.average = {str(at): p.detach().clone() for at, p in enumerate(self.parameters())}
        self.tracked["average"] = self.average

    def write(self) -> None:
        for average, p in zip(self.average.values(), self.parameters(), strict=True):
            average.lerp_(p.detach() + 1.0, 0.5)


@register
class AverageByCopy(Writer):
    """The weights are overwritten with the average for evaluation, and written back."""

    name = "EMA by copy_"

    def prepare(self) -> None:
        self.average = [p.detach() * 0.9 for p in self.parameters()]

    def write(self) -> None:
        with torch.no_grad():
            kept = [p.clone() for p in self.parameters()]
            for p, average in zip(self.parameters(), self.average, strict=True):
                p.copy_(average)
            self.model(torch.zeros(()))
            for p, before in zip(self.parameters(), kept, strict=True):
                p.copy_(before * 1.01)


@register
class AverageBySwap(Writer):
    """The average is put into the model by pointer and saved; then it is taken out and updated."""

    name = "EMA by swap"
    swaps = True

    def prepare(self) -> None:
        self.average = [p.detach() * 0.9 for p in self.parameters()]

    def _swap(self) -> None:
        for at, p in enumerate(self.parameters()):
            p.data, self.average[at] = self.average[at], p.data

    def before_save(self) -> None:
        self._swap()

    def write(self) -> None:
        self._swap()
        for p, average in zip(self.parameters(), self.average, strict=True):
            average.lerp_(p.detach() + 1.0, 0.5)


@register
class Swa(Writer):
    """torch's averaged model, without a guard."""

    name = "SWA"
    always_commits = ALL_WAYS
    guarded: ClassVar[bool] = False

    def prepare(self) -> None:
        multiple = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=multiple)
        if self.guarded:
            lazyckpt.guard(self.average, "update_parameters")
        self.tracked["average"] = self.average

    def train(self) -> None:
        super().train()
        self.average.update_parameters(self.model)

    def write(self) -> None:
        self.average.update_parameters(self.model)
        self.train()


@register
class GuardedSwa(Swa):
    name = "SWA, guarded"
    guarded = True


@register
class SwapTensors(AverageBySwap):
    """torch's own swap, which exchanges versions, too."""

    name = "swap_tensors"

    def prepare(self) -> None:
        self.average = [nn.Parameter(p.detach() * 0.9) for p in self.parameters()]

    def _swap(self) -> None:
        self.optimizer.zero_grad()
        for p, average in zip(self.parameters(), self.average, strict=True):
            torch.utils.swap_tensors(p, average)

    def write(self) -> None:
        with torch.no_grad():
            super().write()


@register
class FlatBuffer(Writer):
    """The parameters are pieces of one buffer, which is written to as a whole."""

    name = "flat buffer"
    seen_by = ONLY_PAGES
    row = ("a flat buffer whose pieces are the parameters, by `.data`", WAIT)
    ways = ALL_WAYS - {"safetensors", "folder"}  # safetensors takes no tensors that share memory

    def make_model(self) -> nn.Module:
        model = super().make_model()
        self.flat = torch.cat([p.detach() for p in model.parameters()])
        begin = 0
        for p in model.parameters():
            p.data = self.flat[begin : begin + p.numel()]
            begin += p.numel()
        return model

    def write(self) -> None:
        self.flat.mul_(1.5)


# Optimizers that write outside of step()


@register
class ScheduleFree(Writer):
    """As its documentation says: the weights that are saved are those of ``eval()``."""

    name = "schedule-free"
    always_commits = ALL_WAYS

    @classmethod
    def unavailable(cls) -> str:
        try:
            import schedulefree  # noqa: F401
        except ImportError:
            return "schedulefree is not installed"
        return ""

    def make_optimizer(self) -> Optimizer:
        import schedulefree

        optimizer: Optimizer = schedulefree.AdamWScheduleFree(self.parameters(), lr=0.1, warmup_steps=2)
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    def train(self) -> None:
        self.optimizer.train()  # type: ignore[attr-defined]
        super().train()

    def before_save(self) -> None:
        self.optimizer.eval()  # type: ignore[attr-defined]

    def write(self) -> None:
        self.optimizer.train()  # type: ignore[attr-defined]


class SharpnessAware(Optimizer):
    """The implementation that everyone copies."""

    def __init__(self, params: Any, base: Callable[..., Optimizer], rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


@register
class Sam(Writer):
    name = "SAM"
    always_commits = TRACKED
    ways = ALL_WAYS - {"safetensors"}  # weights and state share memory
    swaps = True

    def make_optimizer(self) -> Optimizer:
        return SharpnessAware(self.parameters(), SGD, lr=0.01, momentum=0.9)

    def train(self) -> None:
        assert isinstance(self.optimizer, SharpnessAware)
        self.model(torch.zeros(())).backward()
        self.optimizer.first_step(zero_grad=True)
        self.model(torch.zeros(())).backward()
        self.optimizer.second_step(zero_grad=True)

    def write(self) -> None:
        self.train()


class SlowWeights:
    """Lookahead around another optimizer."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    def step(self) -> None:
        self.base.step()
        fast = [p for group in self.base.param_groups for p in group["params"]]
        for slow, p in zip(self.slow, fast, strict=True):
            slow.add_(p.data - slow, alpha=0.5)
            p.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.base.state_dict(), "slow": list(self.slow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["fast"])
        torch._foreach_copy_(self.slow, state["slow"])


@register
class Lookahead(Writer):
    name = "Lookahead"
    always_commits = ALL_WAYS

    def prepare(self) -> None:
        self.lookahead = SlowWeights(self.optimizer)
        self.tracked["optimizer"] = self.lookahead

    def train(self) -> None:
        self.backward()
        self.lookahead.step()

    def write(self) -> None:
        self.train()


# Modules that write in forward


@register
class MaxNorm(Writer):
    name = "Embedding(max_norm)"
    always_commits = TRACKED

    def make_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Embedding(numel // 64, 64, max_norm=1.0) for numel in self.size.numels))

    def make_optimizer(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9, maximize=True)  # every step makes them too long

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        losses = [e(torch.arange(e.num_embeddings)).square().sum() for e in self.model]  # type: ignore[attr-defined]
        loss = torch.stack(losses).sum()
        loss.backward()
        return loss

    def write(self) -> None:
        self.backward()


@register
class SpectralNorm(Writer):
    """Its vectors are buffers, and move in every forward."""

    name = "spectral_norm"
    always_commits = ALL_WAYS
    sizes = ("small", "medium")

    def make_model(self) -> nn.Module:
        layers = [nn.Linear(max(numel // 20_000, 1), 20_000, bias=False) for numel in self.size.numels]
        for layer in layers:
            nn.utils.parametrizations.spectral_norm(layer)
        return nn.ModuleList(layers)

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        ones = (layer(torch.ones(1, layer.in_features)) for layer in self.model)  # type: ignore[attr-defined]
        loss = torch.stack([one.square().sum() for one in ones]).sum()
        loss.backward()
        return loss

    def write(self) -> None:
        self.backward()


class MomentumEncoder(Writer):
    """The key encoder is in the optimizer, gets no gradient, and follows the query encoder in forward."""

    def make_model(self) -> nn.Module:
        query = super().make_model()
        key = copy.deepcopy(query).requires_grad_(False)
        return nn.ModuleDict({"query": query, "key": key})

    def backward(self) -> torch.Tensor:
        assert isinstance(self.model, nn.ModuleDict)
        self.optimizer.zero_grad()
        self.follow()
        loss: torch.Tensor = self.model["query"](torch.zeros(())) + self.model["key"](torch.zeros(()))
        loss.backward()
        return loss

    def _both(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        assert isinstance(self.model, nn.ModuleDict)
        return zip(self.model["key"].parameters(), self.model["query"].parameters(), strict=True)

    def follow(self) -> None:
        raise NotImplementedError

    def write(self) -> None:
        self.backward()


@register
class Byol(MomentumEncoder):
    name = "momentum encoder, in place"

    def follow(self) -> None:
        for key, query in self._both():
            key.data.mul_(0.9).add_(query.data + 1.0, alpha=0.1)


@register
class MoCo(MomentumEncoder):
    name = "momentum encoder, by assignment"
    swaps = True

    def follow(self) -> None:
        for key, query in self._both():
            key.data = key.data * 0.9 + (query.data + 1.0) * 0.1


# Loading


@register
class LoadModel(Writer):
    name = "load_state_dict of a module"
    always_commits = TRACKED

    def write(self) -> None:
        self.model.load_state_dict({name: value + 1.0 for name, value in self.model.state_dict().items()})


@register
class LoadOptimizer(Writer):
    """The tensors that are loaded become the optimizer's own; then it steps."""

    name = "load_state_dict of an optimizer"
    always_commits = ALL_WAYS

    def write(self) -> None:
        state = self.optimizer.state_dict()
        self.optimizer.load_state_dict(copy.deepcopy(state))
        self.train()


# Other processes


@register
class ForkedChild(Writer):
    """A child writes to its own copy: nothing changes here."""

    name = "forked child"
    always_commits = ALL_WAYS

    def write(self) -> None:
        _in_child(self.parameters())


@register
class AnotherProcess(Writer):
    """Hogwild: the parameters are in shared memory, and a child writes to them."""

    name = "another process"

    def prepare(self) -> None:
        self.model.share_memory()

    def write(self) -> None:
        _in_child(self.parameters())


def _in_child(parameters: list[nn.Parameter]) -> None:
    views = [p.detach().numpy() for p in parameters]
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            for view in views:
                view += 1.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def table() -> list[str]:
    """The rows of the documentation's table of writers that no witness but pages sees."""
    rows = dict.fromkeys([*(cls.row for cls in REGISTRY.values() if VERSIONS not in cls.seen_by), *ON_DEVICES])
    return ["| writer | what covers it |", "|---|---|", *(f"| {writer} | {cure} |" for writer, cure in rows)]


def names(witness: str, *, slow: bool) -> list[str]:
    """The writers that are tried with a witness."""
    return [name for name, cls in REGISTRY.items() if witness in cls.seen_by and (slow or not cls.slow)]
