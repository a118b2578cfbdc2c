"""Ways to train. Each changes the saved state right after the save in a way of its own.

Every tensor holds one value all over, and another one after each round, so the values tell which rounds a checkpoint
mixes. Sizes are random multiples of 64 elements, since vector and scalar code of an optimizer round differently.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import SGD, AdamW, Optimizer

import lazyckpt
from fake_cuda.memory import Gpu
from lazyckpt.capture.laziness import LAZY_MIN_BYTES


class Place(Protocol):
    """Where tensors are."""

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes that torch has just changed these tensors."""

    def value(self, tensor: torch.Tensor) -> object:
        """The value that a tensor holds all over."""

    def settle(self) -> None:
        """Waits until everything that torch was told to do is done."""


class Host:
    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """torch's kernels have written."""

    def value(self, tensor: torch.Tensor) -> object:
        return value_of(tensor)

    def settle(self) -> None:
        """Host operations are done when they return."""


class Device:
    """A fake device. Each kernel writes a byte of its own, in the order of the training stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kernels = 0

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        self._kernels += 1
        self._gpu.place(tensors)
        self._gpu.kernel(tensors, 1 + self._kernels % 100)  # as floats these are numbers

    def value(self, tensor: torch.Tensor) -> object:
        byte = self._gpu.byte(tensor)
        if byte is None:
            return value_of(tensor)
        return value_of(torch.frombuffer(bytearray([byte] * tensor.dtype.itemsize), dtype=tensor.dtype))

    def settle(self) -> None:
        self._gpu.driver.synchronize()


def value_of(tensor: torch.Tensor) -> object:
    """The value that a tensor holds all over, or the values that it mixes."""
    flat = tensor.detach().flatten()
    if flat.numel() and bool((flat != flat[0]).any()):
        return f"mixed of {flat.unique().tolist()[:9]}"
    return flat[0].item() if flat.numel() else None


def values_in(state: Any, value: Callable[[torch.Tensor], object] = value_of) -> Any:
    """Replaces the tensors of a state by their values."""
    if isinstance(state, torch.Tensor):
        return value(state)
    if isinstance(state, dict):
        return {key: values_in(item, value) for key, item in state.items()}
    return [values_in(item, value) for item in state] if isinstance(state, list | tuple) else state


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(item)


class Training:
    """A model with one optimizer, whose step follows the save at once."""

    def __init__(self, place: Place, chance: random.Random, optimizer: Callable[[Any], Optimizer]) -> None:
        self.place = place
        self.chance = chance
        self.round = 0
        self.model = torch.nn.ParameterList(self.parameter(64 * chance.randint(100, 600)) for _ in range(6))
        self.optimizer = self.watched(optimizer(self.model.parameters()))
        place.wrote(self.model.parameters())
        self.tracked: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.prepare()

    def prepare(self) -> None:
        """Adds what else there is to train."""

    def parameter(self, numel: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.full((numel,), 1.0 + self.chance.randrange(8)))

    def watched(self, optimizer: Optimizer) -> Optimizer:
        """Notes what each step of the optimizer writes."""
        optimizer.register_step_post_hook(lambda *_: self.place.wrote(self.owned(optimizer)))
        return optimizer

    def owned(self, optimizer: Optimizer) -> list[torch.Tensor]:
        found = tensors_in([[group["params"] for group in optimizer.param_groups], list(optimizer.state.values())])
        return [tensor for tensor in found if tensor.numel() > 1]  # Adam's ``step`` is on the host

    def backward(self, *optimizers: Optimizer) -> torch.Tensor:
        """Sets other gradients in every round, so that averages over them never rest."""
        for optimizer in optimizers or [self.optimizer]:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.full_like(p, 1.0 + self.round % 7)
        return torch.zeros((), requires_grad=True)

    def train(self) -> None:
        """Trains from one save to the next."""
        self.round += 1
        self.go_on()

    def go_on(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {n: dict(o.state_dict()) if hasattr(o, "state_dict") else o for n, o in self.tracked.items()}

    def values(self) -> Any:
        return values_in(self.state(), self.place.value)

    def sizes(self) -> tuple[int, int]:
        """Counts the bytes of the state that the gate protects, and the others."""
        owners = [o for o in self.tracked.values() if isinstance(o, Optimizer)]
        gated = {id(t): t.nbytes for o in owners for t in self.owned(o) if t.nbytes > LAZY_MIN_BYTES} | self.guarded()
        return sum(gated.values()), sum(t.nbytes for t in tensors_in(self.state())) - sum(gated.values())

    def guarded(self) -> dict[int, int]:
        """The bytes of guarded tensors that no optimizer owns, by identity."""
        return {}


class WithClosure(Training):
    def go_on(self) -> None:
        self.optimizer.step(self.backward)  # type: ignore[arg-type]


class InTurns(Training):
    """Two models, each with its optimizer, as in adversarial training."""

    def prepare(self) -> None:
        self.critic = torch.nn.ParameterList(self.parameter(64 * self.chance.randint(32, 200)) for _ in range(4))
        self.other = self.watched(SGD(self.critic.parameters(), lr=0.1, momentum=0.9, fused=self.chance.random() < 0.5))
        self.place.wrote(self.critic.parameters())
        self.tracked |= {"critic": self.critic, "other": self.other}

    def go_on(self) -> None:
        for optimizer in self.chance.sample([self.optimizer, self.other], 2):
            self.backward(optimizer)
            optimizer.step()


class Average(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model: torch.nn.Module, place: Place) -> None:
        super().__init__(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        self._place = [place]

    def update_parameters(self, model: torch.nn.Module) -> None:
        super().update_parameters(model)
        self._place[0].wrote(self.parameters())


class Averaged(Training):
    """A training with a moving average, whose update waits at the gate too."""

    def prepare(self) -> None:
        self.average = Average(self.model, self.place)
        self.place.wrote(self.average.parameters())
        lazyckpt.guard(self.average, "update_parameters")
        self.tracked["average"] = self.average

    def guarded(self) -> dict[int, int]:
        return {id(t): t.nbytes for t in self.average.parameters()}

    def go_on(self) -> None:
        self.average.update_parameters(self.model)
        self.backward()
        self.optimizer.step()


class Normed(Training):
    """A training with statistics that change in forward, before any step, and move no version."""

    def prepare(self) -> None:
        self.norm = torch.nn.BatchNorm1d(64 * self.chance.randint(30, 100), affine=False)
        self.place.wrote([self.norm.running_mean, self.norm.running_var])  # type: ignore[list-item]
        self.tracked["norm"] = self.norm

    def go_on(self) -> None:
        rows = torch.tensor([[0.0], [float(self.round % 5)]])
        self.norm(rows.expand(2, self.norm.num_features).contiguous())
        self.place.wrote([self.norm.running_mean, self.norm.running_var])  # type: ignore[list-item]
        super().go_on()


class Accumulating(Training):
    """A training that also saves a gradient, which grows in the next backward."""

    def prepare(self) -> None:
        self.gradient = torch.zeros_like(self.model[0])
        self.tracked["gradients"] = {"0": self.gradient}
        self.place.wrote([self.gradient])

    def go_on(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            self.gradient += 1.0 + self.round % 7
            self.place.wrote([self.gradient])
        self.backward()
        self.model[0].grad = self.gradient
        self.optimizer.step()
        if self.round % 3 == 0:
            self.gradient.zero_()
            self.place.wrote([self.gradient])


class Loading(Training):
    """A training that loads a state right after the save, in place and not."""

    def prepare(self) -> None:
        self.model.register_load_state_dict_post_hook(lambda *_: self.place.wrote(self.model.parameters()))

    def go_on(self) -> None:
        def more(state: Any) -> Any:
            if isinstance(state, torch.Tensor):
                return state.detach() + 1.0
            return {key: more(value) for key, value in state.items()}

        def load_optimizer() -> None:
            state = self.optimizer.state_dict()
            fresh = {"state": more(state["state"]), "param_groups": copy.deepcopy(state["param_groups"])}
            self.optimizer.load_state_dict(fresh)  # which keeps these tensors
            for moments in self.optimizer.state.values():
                for moment in tensors_in(moments):
                    moment += 1.0
            self.place.wrote(self.owned(self.optimizer))

        def load_model() -> None:
            self.model.load_state_dict(more(self.model.state_dict()))

        for load in self.chance.sample([load_optimizer, load_model], self.chance.randint(1, 2)):
            load()
        super().go_on()


class Regrouped(Training):
    """A training whose optimizers exchange parameters, state and learning rates between a save and the step."""

    def prepare(self) -> None:
        self.head = torch.nn.ParameterList([self.parameter(64 * 100)])
        self.other = self.watched(AdamW(self.head.parameters(), lr=0.1, fused=True))
        self.place.wrote(self.head.parameters())
        self.tracked |= {"head": self.head, "other": self.other}

    def go_on(self) -> None:
        giver, taker = self.chance.sample([self.optimizer, self.other], 2)
        while len(giver.param_groups[0]["params"]) < 2:
            giver, taker = taker, giver
        *rest, parameter = giver.param_groups[0]["params"]
        giver.param_groups[0]["params"] = rest
        taker.param_groups[0]["params"] = [*taker.param_groups[0]["params"], parameter]
        if parameter in giver.state:
            taker.state[parameter] = giver.state.pop(parameter)
        for optimizer in self.chance.sample([giver, taker], 2):
            optimizer.param_groups[0]["lr"] *= 0.99
            self.backward(optimizer)
            optimizer.step()


def lbfgs(parameters: Any) -> Optimizer:
    return torch.optim.LBFGS(parameters, lr=1.0, max_iter=2, history_size=2)


PLAIN = partial(AdamW, lr=0.1, foreach=False)
FUSED = partial(AdamW, lr=0.1, fused=True)
FOREACH = partial(AdamW, lr=0.1, foreach=True)
MAKE: dict[str, Callable[[Place, random.Random], Training]] = {
    "plain": partial(Training, optimizer=PLAIN),
    "fused": partial(Training, optimizer=FUSED),
    "foreach": partial(Training, optimizer=FOREACH),
    "closure": partial(WithClosure, optimizer=FUSED),
    "LBFGS": partial(WithClosure, optimizer=lbfgs),
    "two optimizers": partial(InTurns, optimizer=FUSED),
    "EMA": partial(Averaged, optimizer=FUSED),
    "BatchNorm": partial(Normed, optimizer=FUSED),
    "accumulation": partial(Accumulating, optimizer=FUSED),
    "loading": partial(Loading, optimizer=FUSED),
    "regrouped": partial(Regrouped, optimizer=FUSED),
}
