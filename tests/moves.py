"""Every way to change the state of a training between two saves that a save must notice.

A move may return what takes it back.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections import OrderedDict
from collections.abc import Callable
from inspect import isfunction, signature
from typing import Any

import numpy as np
import torch
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel
from tracked_training import Block, Tagged, Training

Undo = Callable[[], object]


# Memory


def data_is_given(t: Training) -> None:
    p = t.parameter()
    p.data = torch.randn_like(p)


def data_is_transposed(t: Training) -> None:
    p = t.block().inner.weight
    p.data = p.data.t().contiguous().t()


def storage_is_set(t: Training) -> None:
    p = t.parameter()
    with torch.no_grad():
        p.set_(torch.randn_like(p))


def storage_is_resized(t: Training) -> None:
    mean = t.block().mean
    if mean.untyped_storage().resizable():
        mean.resize_(t.random.choice([2, 2000, 6000])).fill_(1)


def tensors_are_swapped(t: Training) -> None:
    a, b = t.random.sample(list(t.model), 2)
    if isinstance(a, Block) and isinstance(b, Block) and a.mean is not b.mean:
        with contextlib.suppress(RuntimeError):  # a weak reference to one of them
            torch.utils.swap_tensors(a.mean, b.mean)


def state_is_swapped(t: Training) -> None:
    state = t.state()
    if len(names := t.moments(state)) > 1:
        state[names[0]], state[names[1]] = state[names[1]], state[names[0]]


def identities_come_back(t: Training) -> None:
    """A tensor where another one has just been freed."""
    linear = t.block().inner
    shape, dtype = linear.weight.shape, linear.weight.dtype
    linear._parameters["weight"] = None
    linear._parameters["weight"] = torch.nn.Parameter(torch.randn(shape, dtype=dtype))


def dtype_in_place(t: Training) -> None:
    p = t.parameter()
    p.data = p.data.to(t.random.choice([torch.float64, torch.float32, torch.bfloat16]))


def dtype_of_the_same_bytes(t: Training) -> None:
    block = t.block()
    mean = block.mean.resolve_neg().resolve_conj().contiguous()
    block.mean = mean.view(torch.int32 if mean.dtype is torch.float32 else torch.float32)


def one_memory_with_two_dtypes(t: Training) -> Undo:
    t.extra["other dtype"] = torch.empty(0, dtype=torch.uint8).set_(t.block().mean.untyped_storage())
    return lambda: t.extra.pop("other dtype")


def view_of_a_part(t: Training) -> None:
    whole = torch.ones(t.random.choice([4, 4000]))
    t.block().mean = whole[t.random.choice([0, 1]) : t.random.choice([2, 3])]


def negated(t: Training) -> None:
    t.block().mean = torch.complex(torch.ones(3), torch.ones(3)).conj().imag


def conjugated(t: Training) -> None:
    t.block().mean = torch.complex(torch.ones(3), torch.ones(3)).conj()


def meta_and_back(t: Training) -> Undo:
    block, mean = (block := t.block()), block.mean
    block.mean = torch.empty(30, device="meta")
    return lambda: setattr(block, "mean", mean)


def empty(t: Training) -> None:
    t.block().mean = torch.zeros(t.random.choice([(0,), (2, 0, 3)]))


# Modules


def tied(t: Training) -> None:
    a, b = t.block(), t.block()
    if a.inner.weight.shape == b.inner.weight.shape:
        b.inner.weight = a.inner.weight


def untied(t: Training) -> None:
    for block in t.model:
        if isinstance(block, Block):
            block.inner.weight = torch.nn.Parameter(block.inner.weight.detach().clone())


def tied_across_objects(t: Training) -> Undo:
    """Each object by itself has as many storages of the same kinds as before."""
    apart = t.extra["like a weight"]
    alike = [p for p in t.model.parameters() if p.shape == apart.shape and p.dtype == apart.dtype and p.is_contiguous()]
    t.extra["like a weight"] = t.random.choice(alike or [apart]).detach()
    return lambda: t.extra.update({"like a weight": apart})


def module_is_replaced(t: Training) -> None:
    t.model[t.random.randrange(len(t.model))] = Block(t.random.choice([8, 64]))


def module_is_compiled(t: Training) -> None:
    at = t.random.randrange(len(t.model))
    if isinstance(t.model[at], Block):
        t.model[at] = torch.compile(t.model[at], backend="eager")


def order_of_modules(t: Training) -> None:
    modules = t.block()._modules
    modules["inner"] = modules.pop("inner")


def parameters_in_place(t: Training) -> None:
    table = t.block().table
    table._parameters["more"] = torch.nn.Parameter(torch.randn(t.random.choice([3, 5000])))


def buffer_goes_or_comes(t: Training) -> None:
    block = t.block()
    block.unsaved = None if block.unsaved is not None else torch.zeros(3)


def buffer_is_persistent_or_not(t: Training) -> None:
    t.block()._non_persistent_buffers_set.symmetric_difference_update({"unsaved"})


def hook_of_state_dict(t: Training) -> Undo:
    name = t.random.choice(["mean", "refused"])

    def hook(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + name] = torch.full((3,), 7.0)

    removed = t.block()._register_state_dict_hook(hook)
    return removed.remove


def state_dict_of_the_instance(t: Training) -> Undo:
    block = t.block()
    block.state_dict = lambda *args, **named: {}
    return lambda: delattr(block, "state_dict")


def patched(owner: Any, name: str, method: Any) -> Undo:
    before = vars(owner)[name]
    setattr(owner, name, method)
    return lambda: setattr(owner, name, before)


def class_of_modules_is_patched(t: Training) -> Undo:
    save = torch.nn.Module._save_to_state_dict

    def more(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        save(self, destination, prefix, keep_vars)
        if prefix.endswith("norm."):
            destination[prefix + "weight"] = destination[prefix + "weight"] * 2

    return patched(torch.nn.Module, "_save_to_state_dict", more)


def load_by_assignment(t: Training) -> None:
    t.model.load_state_dict({key: value.clone() for key, value in t.model.state_dict().items()}, assign=True)
    if t.random.random() < 0.5:
        t.new_optimizer()


def version_of_a_module(t: Training) -> None:
    t.block()._version = t.random.randrange(9)


def frozen_or_not(t: Training) -> None:
    p = t.parameter()
    p.requires_grad_(not p.requires_grad)


def memory_format(t: Training) -> None:
    t.block().mean = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


# Optimizers


def class_of_optimizers_is_patched(t: Training) -> Undo:
    state_dict = torch.optim.Optimizer.state_dict
    return patched(torch.optim.Optimizer, "state_dict", lambda self: {**state_dict(self), "patched": 1})


def state_gains_an_entry(t: Training) -> None:
    t.state()["extra"] = torch.randn(t.random.choice([2, 5000]))


def state_of_a_number(t: Training) -> None:
    t.state()["n"] = t.random.choice([1, 2, 1.5, None, "x", True, 10**6])


def state_is_lost(t: Training) -> None:
    if t.optimizer.state:
        t.optimizer.state.pop(t.random.choice(list(t.optimizer.state)))


def state_is_replaced(t: Training) -> None:
    state = t.state()
    state.update({name: state[name].clone() for name in t.moments(state)})


def state_is_shared(t: Training) -> None:
    state = t.state()
    if len(names := t.moments(state)) > 1:
        state[names[1]] = state[names[0]]


def state_requires_grad(t: Training) -> None:
    state = t.state()
    for name in t.moments(state)[:1]:
        state[name] = state[name].detach().requires_grad_(t.random.random() < 0.7)


def state_has_attributes(t: Training) -> Undo:
    state = t.state()
    tensors = [state[name] for name in t.moments(state)[:1]]
    for tensor in tensors:
        tensor.tag = t.random.randrange(9)
    return lambda: [vars(tensor).clear() for tensor in tensors]


def state_has_hooks(t: Training) -> Undo:
    tensor = torch.ones(3, requires_grad=True)
    hook = tensor.register_hook(print)
    t.extra["hooked"] = tensor
    return lambda: (hook.remove(), t.extra.pop("hooked"))


def group_is_added(t: Training) -> None:
    block = Block(8)
    t.model.append(block)
    t.optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-4})


def rate_is_a_tensor(t: Training) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=t.random.choice([torch.float32, torch.float64]))


def optimizer_beside(t: Training) -> None:
    other = SGD([t.parameter()], lr=0.0, momentum=0.9)
    other.step()
    t.others = [other]


def average_beside(t: Training) -> None:
    t.others = [AveragedModel(t.block())]
    t.others[0].update_parameters(t.others[0].module)


def owners_go(t: Training) -> None:
    t.others.clear()
    gc.collect()


def nothing_is_stepped(t: Training) -> None:
    """Two saves without a step between them."""
    t.skip = True


# Values

_ITSELF: list[Any] = []
_ITSELF.append(_ITSELF)
_IN_A_TUPLE: list[Any] = []
_IN_A_TUPLE.append((_IN_A_TUPLE,))
_WITH_ATTRIBUTES: Any = OrderedDict(a=1, b=2)
_WITH_ATTRIBUTES.note = [1]
_MOVED = OrderedDict((number, str(number)) for number in range(4))
_MOVED.move_to_end(0)

_BYTES = torch.zeros(4)
REFUSED: list[Any] = [_BYTES, _BYTES.view(torch.int32)]  # one memory as two dtypes

VALUES: list[Any] = [
    torch.complex(torch.ones(3), torch.ones(3)).conj().imag, torch.complex(torch.ones(3), torch.ones(3)).conj(),
    {"a": {"b": [1, (2, {"c": None})]}}, [], [1], [0] * 999, [0] * 1000, [0] * 1001, [[]] * 3, {}, {1: 2},
    {n: n for n in range(1001)}, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),) * 5, "", "text", "n" * 300, "é→",
    "\udc80", 0, 255, 256, 65535, 65536, -1, -128, -129, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1,
    -(2**63), 2**63, 2**70, -(2**70), 0.5, -0.0, float("nan"), float("inf"), True, False, None, 1j, b"bytes",
    bytearray(b"b"), {1, 2}, np.float64(0.5), np.float32(0.5), np.int64(3), np.arange(5),
    np.arange(70_000, dtype=np.uint8), torch.Size([1, 2]), torch.float16, torch.device("cpu"), _ITSELF, _IN_A_TUPLE[0],
    _WITH_ATTRIBUTES, _MOVED, OrderedDict(a=[1]), torch.zeros(300).as_subclass(Tagged),
    torch.nn.Parameter(torch.ones(2)), torch.ones(2).untyped_storage(), torch.zeros(3, dtype=torch.float8_e4m3fn),
    torch.zeros(3, dtype=torch.uint16), torch.tensor(True), torch.eye(2).to_sparse(), torch.eye(3).to_sparse(),
]  # fmt: skip


def value(t: Training) -> None:
    t.extra["value"] = t.random.choice(VALUES)


def several_values(t: Training) -> None:
    t.extra["values"] = [t.random.choice(VALUES) for _ in range(3)] * 2


def value_goes(t: Training) -> None:
    t.extra.pop("values", None)
    t.extra["value"] = 1


def objects_that_are_one(t: Training) -> None:
    one: list[Any] = [torch.ones(3), "text"]
    t.extra["one"] = [one, one] if t.random.random() < 0.5 else [one, list(one)]


def random_numbers(t: Training) -> None:
    torch.rand(3)
    random.random()


def plain_step(t: Training) -> None:
    pass


MOVES: list[Callable[[Training], Undo | None]] = [
    found for found in list(globals().values()) if isfunction(found) and list(signature(found).parameters) == ["t"]
]
