"""Trains with FSDP2, or with replicas, and saves all the time, on ranks that a trial kills and stops.

The state is a pure function of the number of steps, whatever the number of ranks: gradients are whole numbers that are
the same on every rank, and the sums of SGD with momentum 1 stay exact in float32. So one wrong element of one tensor
tells that a checkpoint is a mixture. The checkpoint step may differ from the number of training steps, the *tick*:
``laps=3`` saves as steps 0, 1 and 2 again and again, so that checkpoints are replaced. Replicas also save lone files,
as trainers do (lone_files.py).

A rank logs one line for each event, with the time: the tick that it saves, what became of it, an error that it gets.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lazyckpt
from crash.actor import Calls, Task
from lazyckpt import _engine
from lazyckpt.storage import manifest
from ranks.jobs import Job

SHAPES = {"wide": (257, 256), "odd": (33, 77), "few": (5,)}  # no number of ranks divides them
KNOBS: dict[str, Any] = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 128 << 10}  # copies wait for writes
TIMEOUT_S = 3.0  # rank_timeout_s
PROBE = 999_999_999  # the step that a rank saves alone once training has failed: it must never be committed
GLOO_TIMEOUT_S = 12.0
MAX_TICK = 400  # the numbers stay below 2**24


@dataclass(frozen=True)
class Orders(Job):
    """What the ranks of one attempt of a job do."""

    ticks: int = MAX_TICK  # training ends after so many more
    laps: int | None = None
    writers: Any = None  # of replicas; None: the ranks hold shards
    lone: bool = False  # replicas save lone files, and not folders
    knobs: Mapping[str, Any] = field(default_factory=dict)
    victim: int = -1  # of what follows
    armed_at: int | None = None  # operations count from the save of this tick to the next; None: until the first save
    kill_at: int = 0  # SIGKILL before this call that changes the folder
    fault: str = ""  # of the victim's engine
    record: bool = False

    def run(self, rank: int) -> None:
        log = os.open(self.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(f"{self.log(rank)}.err", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())

        def note(event: str, tick: int, text: object = "") -> None:
            line = " ".join(str(text).split())
            os.write(log, f"{event} {tick} {time.monotonic()} {line}\n".encode())

        torch.set_num_threads(1)
        try:
            store = self.store(rank, GLOO_TIMEOUT_S)
            timeout = timedelta(seconds=GLOO_TIMEOUT_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.world_size, timeout=timeout)
            self.member(rank, note).run()
            note("ended", 0)
        except BaseException as error:
            note("raised", 0, f"{type(error).__name__}: {error}")
            raise
        os._exit(0)

    def member(self, rank: int, note: Any) -> Rank:
        if not self.lone:
            return Rank(rank, self, note)
        from ranks.lone_files import LoneFileRank

        return LoneFileRank(rank, self, note)

    def saved_as(self, tick: int) -> int:
        return tick if self.laps is None else tick % self.laps

    def path_of(self, step: int) -> Path:
        """A checkpoint."""
        return self.folder / f"{manifest.folder_name(step)}{'.pt' * self.lone}"

    def checkpoints(self) -> list[Path]:
        names = os.listdir(self.folder) if self.folder.exists() else []
        return [self.folder / name for name in sorted(names) if manifest.is_folder_name(name.removesuffix(".pt"))]


class Line(NamedTuple):
    """A line of a log: an event, the tick it concerns, the time, and an error."""

    event: str
    tick: int
    at: float
    text: str


class Answer(NamedTuple):
    """What a rank was told of a save."""

    text: str  # the name of the checkpoint, or the error
    late_s: float  # since it called ``save``


def told(orders: Orders, rank: int, *events: str) -> list[Line]:
    """What a rank has logged, or these events of it."""
    lines = []
    for line in orders.lines(rank):
        event, tick, at, text = line.split(" ", 3)
        lines.append(Line(event, int(tick), float(at), text))
    return [line for line in lines if not events or line.event in events]


# the state


def _pattern(name: str, tick: int) -> list[float]:
    """The gradient of the elements 0 to 4 of a tensor; those that follow have the same. A mean over up to 4 ranks is
    exact."""
    first = 7 * tick + list(SHAPES).index(name)
    return [12.0 * (1 + (first + element) % 5) for element in range(5)]


def _spread(name: str, five: list[float]) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.tensor(five)[torch.arange(math.prod(shape)) % 5].view(shape)


@functools.lru_cache(maxsize=256)
def expected(name: str, tick: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter and its momentum after so many steps."""
    parameter = momentum = [0.0] * 5
    for turn in range(1, tick + 1):
        momentum = [m + g for m, g in zip(momentum, _pattern(name, turn), strict=True)]
        parameter = [p - m for p, m in zip(parameter, momentum, strict=True)]
    return _spread(name, parameter), _spread(name, momentum)


class _Layer(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = torch.nn.Parameter(torch.zeros(SHAPES[name]))

    def forward(self, tick: int) -> torch.Tensor:
        return (self.weight * _spread(self.name, _pattern(self.name, tick))).sum()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: _Layer(name) for name in SHAPES})
        self.register_buffer("ticks", torch.zeros(1, dtype=torch.int64))

    def forward(self, tick: int) -> torch.Tensor:
        self.ticks.fill_(tick)
        return torch.stack([layer(tick) for layer in self.layers.values()]).sum()


class Training:
    def __init__(self, rank: int, world_size: int, *, replicas: bool = False) -> None:
        self.rank = rank
        self.model = Net()
        self.forward: torch.nn.Module = self.model
        if replicas:
            self.forward = torch.nn.parallel.DistributedDataParallel(self.model)
        else:
            mesh = init_device_mesh("cpu", (world_size,))
            for layer in self.model.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=1.0)
        self.clock = {"tick": 0}

    @property
    def tick(self) -> int:
        return self.clock["tick"]

    def step(self) -> None:
        tick = self.tick + 1
        self.optimizer.zero_grad()
        self.forward(tick).backward()
        self.optimizer.step()
        self.clock["tick"] = tick
        torch.manual_seed(1000 * tick + self.rank)

    def differences(self, saved_by: int) -> list[str]:
        """Returns the names of values that differ from those of this tick. ``saved_by``: the number of ranks then."""
        tick, found = self.tick, []
        for name, layer in self.model.layers.items():
            momentum = self.optimizer.state[layer.weight]["momentum_buffer"]
            for what, tensor, value in zip(
                ("weight", "momentum"), (layer.weight, momentum), expected(name, tick), strict=True
            ):
                if not torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, value):
                    found.append(f"{name}.{what}")
        found += ["ticks"] * (int(self.model.ticks) != tick)
        random = torch.Generator().manual_seed(1000 * tick + self.rank).get_state()
        return found + ["random state"] * (self.rank < saved_by and not torch.equal(torch.get_rng_state(), random))


def tick_of(checkpoint: Path) -> int:
    """The tick of a checkpoint. Fails if it is not whole, or a mixture."""
    report = lazyckpt.verify(checkpoint)
    assert report.ok, f"{checkpoint}: {report}"
    tree = lazyckpt.load(checkpoint)
    tick: int = tree["clock"]["tick"]
    replicas = checkpoint.is_file() or (checkpoint / "state.pt").exists()
    for number, name in enumerate(SHAPES):
        parameter, momentum = expected(name, tick)
        assert torch.equal(tree["model"][f"layers.{name}.weight"], parameter), f"{checkpoint}: {name}.weight, {tick}"
        buffer = tree["optimizer"]["state"][number if replicas else f"layers.{name}.weight"]["momentum_buffer"]
        assert torch.equal(buffer, momentum), f"{checkpoint}: {name}.momentum, {tick}"
    assert int(tree["model"]["ticks"]) == tick, checkpoint
    own = {0: tree["rng"]} if replicas else tree["rng"]
    own |= {int(file.stem[len("rank-") :]): lazyckpt.load(file)["rng"] for file in checkpoint.glob("rank-*.pt")}
    for rank, states in own.items():
        random = torch.Generator().manual_seed(1000 * tick + int(rank)).get_state()
        assert torch.equal(states["torch"], random), f"{checkpoint}: random state of rank {rank}"
    return tick


# one rank


class Rank:
    """Saves with a Checkpointer."""

    def __init__(self, rank: int, orders: Orders, note: Any) -> None:
        self.orders, self.note = orders, note
        self.calls: Calls | None = None
        if rank == orders.victim:
            trace = f"{orders.logs / orders.attempt}-operations"
            faults = [fault for fault in (orders.fault, f"trace:{trace}" * orders.record) if fault]
            _engine.Engine = functools.partial(_engine.Engine, fault=",".join(faults))  # type: ignore[assignment,misc]
            task = Task(str(orders.folder), trace, "", record=orders.record, kill_at=orders.kill_at)
            self.operations = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self.calls = Calls(task, self.operated)
        self.training = Training(rank, orders.world_size, replicas=orders.writers is not None)
        note("started", 0)

    def operated(self, *words: object) -> None:
        os.write(self.operations, (" ".join(map(str, words)) + "\n").encode())

    def arm(self, tick: int | None) -> None:
        if self.calls is not None:
            self.calls.armed = tick == self.orders.armed_at
            self.operated("armed" if self.calls.armed else "disarmed")

    def run(self) -> None:
        """Restores, trains and saves. If training fails, as it does without one of its ranks, saves once more alone."""
        knobs = {**KNOBS, "rank_timeout_s": TIMEOUT_S, **self.orders.knobs}
        self.arm(None)
        try:
            with self.opened(knobs):
                try:
                    self.restore()
                    self.train()
                except lazyckpt.LazyCkptError:
                    raise
                except RuntimeError as error:  # of gloo
                    self.note("training", self.training.tick, error)
                    self.probe()
        except lazyckpt.LazyCkptError as error:
            self.note("refused", self.training.tick, error)

    @contextlib.contextmanager
    def opened(self, knobs: dict[str, Any]) -> Iterator[None]:
        knobs = {"keep_last": 2, "writers": self.orders.writers, **knobs}
        with lazyckpt.Checkpointer(self.orders.folder, **knobs) as self.ckpt:
            training = self.training
            self.ckpt.track(model=training.model, optimizer=training.optimizer, clock=training.clock)
            self.saver = self.ckpt._saver
            yield

    def restore(self) -> None:
        found = self.ckpt.restore()
        if found is not None:
            files = self.ckpt.checkpoint(found).path
            self.restored(files, len(list(files.glob("__*.distcp"))) or 1 + len(list(files.glob("rank-*.pt"))))
            assert found == self.orders.saved_as(self.training.tick)
        self.note("restored", self.training.tick)

    def restored(self, checkpoint: Path, saved_by: int) -> None:
        differences = self.training.differences(saved_by)
        assert not differences, (checkpoint, self.training.tick, differences)

    def train(self) -> None:
        end = self.training.tick + self.orders.ticks
        while self.training.tick < end and not self.is_enough():
            self.training.step()
            self.save(self.training.tick)

    def is_enough(self) -> bool:
        flag = torch.tensor((self.orders.logs / f"{self.orders.attempt}-enough").exists())
        dist.broadcast(flag, 0)
        return bool(flag)

    def save(self, tick: int) -> None:
        self.arm(tick)
        self.note("saving", tick)

        def settled(handle: lazyckpt.SaveHandle) -> None:
            error = Future.exception(handle)  # the handle's own would keep the next save from raising it
            self.note("done" if error is None else "failed", tick, error or "")

        try:
            self.launch(self.orders.saved_as(tick)).add_done_callback(settled)
            self.note("saved", tick)
        except lazyckpt.SaveError as error:
            of_an_earlier_save = "saves step" in str(error) and "all the same" in str(error)
            self.note("told" if of_an_earlier_save else "failed", tick, error)

    def probe(self) -> None:
        with contextlib.suppress(lazyckpt.SaveError):  # an earlier one, which was told
            self.saver.wait()
        try:
            self.launch(PROBE).result()
            self.note("done", PROBE)
        except lazyckpt.SaveError as error:
            self.note("probed", PROBE, error)

    def launch(self, step: int) -> lazyckpt.SaveHandle:
        return self.ckpt.save(step)
