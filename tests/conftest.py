"""Fixtures that several tests share: an exact comparison of object graphs, a small training run, a fake GPU."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import os
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from duplicates import DUPLICATES
from hypothesis import settings
from processes import Ranks

import lazyckpt
from fake_cuda import FakeCuda, compiler
from fake_cuda.memory import Gpu
from lazyckpt import _engine, devices
from lazyckpt.formats import safe_globals
from lazyckpt.gate.gate import gate
from lazyckpt.storage import commit
from marks import lacking
from trials import Trials

settings.register_profile("lazyckpt", deadline=None)  # how long an example takes says more of the machine
settings.load_profile("lazyckpt")
# Two busy cores make OpenMP's barriers spin for milliseconds, and after a fork they hang.
torch.set_num_threads(1)
# torch asks for the host's name at every connection to its store, and waits 5 s for each answer that a resolver drops.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

collect_ignore = ["ecosystem"]  # needs an environment of its own: `make ecosystem`

Graph = Callable[[Any], Any]
_STDERR = pytest.StashKey[int]()


# The longest files, but for the attacks: they begin first, so that no core is idle at the end.
BEGIN = ("test_build", "test_mutants", "test_plugin", "test_torture", "test_benchmarks", "test_examples")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in BEGIN)
    cases: Counter[str] = Counter()
    for item in items:
        long = item.get_closest_marker("long")
        if long is not None and isinstance(item, pytest.Function):
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            if cases[function] <= long.kwargs.get("first", 0):
                item.own_markers.remove(long)


def pytest_xdist_auto_num_workers() -> int | None:
    """One more than cores: the tests wait for the disk two fifths of their time. 16 are enough for so many files."""
    told = "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ
    return None if told else min(len(os.sched_getaffinity(0)) + 1, 16)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # pytest captures 2 later


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skips a test that failed because a framework is too old for it."""
    report = yield
    if report.failed and (reason := lacking(report.longreprtext)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: needs {reason}")
    return report


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Ends the process of a test that hangs and prints all stacks, even where C code keeps the GIL.

    pytest-timeout interrupts the test first; the test may miss that. Its method "thread" would end the process too,
    but xdist drops the stacks that it prints."""
    ends_at_once = settings.method == "thread"
    patience_s = 0 if ends_at_once else 60
    faulthandler.dump_traceback_later(settings.timeout + patience_s, exit=True, file=item.config.stash[_STDERR])
    return ends_at_once or None  # None: pytest-timeout sets its timer


def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def temporary_files_go_with_the_others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what killed processes, torchrun and Lightning leave in pytest's folder.

    The folder itself serves as TMPDIR: the names of their sockets may have only a hundred bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.getbasetemp()))
        patch.setattr(tempfile, "tempdir", None)  # tempfile caches the folder
        yield


@pytest.fixture(autouse=True)
def no_step_stays_open() -> Iterator[None]:
    """Fails a test that leaves a step open: all that later tests save would be eager.

    A step that raised stays open until its traceback is collected."""
    yield
    if gate.inside_step():
        gc.collect()
    assert not gate.inside_step()


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    """Makes collections quick: they skip the million objects that the modules of torch and of the tests hold, and what
    earlier files imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Trials:
    """The number of trials, their seed, and where to report them."""
    trials = Trials(request.node.nodeid)
    print(f"LAZYCKPT_SEED={trials.seed}")  # shown if the test fails
    return trials


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that are the ranks of a job."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def spawned_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would spawn is a fork of a server that has imported torch."""
    start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)


@pytest.fixture
def graph() -> Graph:
    """A function that describes everything ``torch.save`` keeps of an object, to compare two objects exactly.

    It compares bits and not values: -0.0, NaN payloads, strides, and which objects are one."""
    return describe_graph


def describe_graph(obj: Any) -> Any:
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    alive: list[Any] = []  # an id must not come back

    def storage_of(storage: torch.UntypedStorage) -> Any:
        if storage._cdata in storages:
            return "storage", storages[storage._cdata]
        alive.append(storage)
        storages[storage._cdata] = len(storages)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage) if storage.device.type == "cpu" else None
        data = flat.numpy().tobytes() if flat is not None and storage.nbytes() else b""
        return "storage", storages[storage._cdata], storage.nbytes(), str(storage.device), data

    def tensor_of(t: torch.Tensor) -> Any:
        head: tuple[Any, ...] = (type(t).__name__, t.dtype, t.requires_grad, t.layout, attributes(t))
        if hasattr(t, "__tensor_flatten__") and not hasattr(t, "_local_tensor"):
            names, context = t.__tensor_flatten__()
            return *head, [tensor_of(getattr(t, name)) for name in names], str(context)
        if hasattr(t, "_local_tensor"):
            return *head, tensor_of(t._local_tensor), str(t.placements)
        if t.is_nested:
            return *head, [tensor_of(part) for part in t.unbind()]
        head = (*head, tuple(t.shape))
        if t.layout is torch.sparse_coo:
            return *head, t.is_coalesced(), tensor_of(t._indices()), tensor_of(t._values())
        if t.layout is not torch.strided:
            return *head, tensor_of(t.crow_indices()), tensor_of(t.col_indices()), tensor_of(t.values())
        if t.is_quantized:
            affine = t.qscheme() is torch.per_tensor_affine
            scale = t.q_scale() if affine else t.q_per_channel_scales().tolist()
            return *head, str(t.qscheme()), scale, t.stride(), t.int_repr().flatten().tolist()
        plain = t.detach().as_subclass(torch.Tensor)
        view = (plain.storage_offset(), plain.stride(), plain.is_conj(), plain.is_neg(), str(plain.device))
        return *head, view, storage_of(plain.untyped_storage())

    def attributes(o: Any) -> Any:
        return [(k, walk(v)) for k, v in getattr(o, "__dict__", {}).items()]

    def walk(o: Any) -> Any:
        if isinstance(o, float):
            return "float", struct.pack("<d", o)
        if o is None or isinstance(o, bool | int | str | bytes | complex | torch.dtype | torch.Size):
            return type(o).__name__, o
        if id(o) in objects:
            return "seen", objects[id(o)]
        alive.append(o)
        number = objects[id(o)] = len(objects)
        if isinstance(o, torch.Tensor):
            return "tensor", number, tensor_of(o)
        if isinstance(o, torch.UntypedStorage):
            return "untyped", number, storage_of(o)
        if isinstance(o, torch.storage.TypedStorage):
            return "typed", number, o.dtype, storage_of(o._untyped_storage)
        if type(o).__module__ == "numpy":
            if getattr(o, "dtype", None) is not None and o.dtype.hasobject:
                return "array", number, o.shape, [walk(x) for x in o.ravel().tolist()]
            order = (o.flags.c_contiguous, o.flags.f_contiguous) if o.ndim else ()
            return "array", number, type(o).__name__, o.shape, str(o.dtype), order, o.tobytes()
        if isinstance(o, dict):
            items = [(walk(k), walk(v)) for k, v in o.items()]
            return type(o).__name__, number, items, attributes(o)
        if isinstance(o, list | tuple):
            return type(o).__name__, number, [walk(x) for x in o]
        if isinstance(o, set | frozenset):
            return type(o).__name__, number, sorted(map(repr, o))
        if hasattr(o, "__dict__"):
            return type(o).__name__, number, attributes(o)
        return type(o).__name__, number, repr(o)

    return walk(obj)


def torch_load_with_our_globals(path: Path) -> Any:
    """Loads with torch, and allows the globals that lazyckpt adds to torch's list."""
    with torch.serialization.safe_globals([(found, name) for name, found in safe_globals._GLOBALS.items()]):
        return torch.load(path, weights_only=True)


@pytest.fixture
def by_torch() -> Callable[[Any], Any]:
    """A function that saves and loads an object with torch."""

    def round_trip(obj: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    return round_trip


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """Two fake devices. Fails the test if somebody broke their rules; ``forget_violations()`` forgives."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    fake = FakeCuda()
    fake.reset()
    yield fake
    violations = fake.violations()
    fake.reset()
    assert violations == []


@pytest.fixture
def gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Tensors on the fake devices (fake_cuda/memory.py). Fails the test if it leaves anything on them."""
    if not _engine.FAULTS:
        pytest.skip("only the test build looks for another driver")
    monkeypatch.setenv("LAZYCKPT_CUDA_LIBRARY", str(cuda.path))
    gpu = Gpu(cuda)
    for name in ("locate", "target", "new_storage", "data_ptr", "current_streams", "on_host"):
        monkeypatch.setattr(devices, name, getattr(gpu, name))
    monkeypatch.setattr(devices, "capturing", lambda: gpu.captured)
    yield gpu
    assert gate._pending == ()
    gc.collect()  # tracebacks hold on to engines
    assert not any(cuda.live().values())
    assert cuda.context_depth() == 0


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on tmpfs, where some kernels refuse O_DIRECT."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Disk:
    """Holds checkpoints back before their file is made. What does not fit into the ring stays uncopied."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._timer: threading.Timer | None = None

    def hold(self) -> None:
        if self._timer is not None:
            self._timer.join()  # an earlier release must not end this hold
        self._free.clear()

    def release(self, after_s: float = 0.0) -> None:
        if after_s:
            self._timer = threading.Timer(after_s, self._free.set)
            self._timer.start()
        else:
            self._free.set()

    def wait(self) -> None:
        assert self._free.wait(60), "a test forgot to release the disk"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """See ``Disk``."""
    disk = Disk()
    make = commit.Staging.__init__

    def held(self: commit.Staging, target: Path) -> None:
        disk.wait()
        make(self, target)

    monkeypatch.setattr(commit.Staging, "__init__", held)
    yield disk
    disk.release()


@dataclass
class Run:
    """A training whose state is 18 times the ring, and small enough to be saved a thousand times."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    ckpt: lazyckpt.Checkpointer

    def batch(self) -> torch.Tensor:
        return torch.ones(1, next(self.model.parameters()).shape[1])

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss: torch.Tensor = self.model(self.batch()).square().sum()
        loss.backward()
        return loss

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Copies the tracked state."""
        tracked = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        buffer = io.BytesIO()
        torch.save(tracked, buffer)
        buffer.seek(0)
        copied: dict[str, Any] = torch.load(buffer)
        return copied


MakeRun = Callable[..., Run]
TINY_RING = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 128 << 10}


@pytest.fixture
def make_run(tmp_path: Path, disk: Disk) -> Iterator[MakeRun]:
    """A function that makes a ``Run`` and takes one step: 2 MiB of state, a ring of 128 KiB."""
    runs: list[Run] = []

    def make(optimizer: Any = None, model: torch.nn.Module | None = None, warm: bool = True, **knobs: Any) -> Run:
        model = model or torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
        optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.1))
        folder = knobs.pop("directory", tmp_path / f"run-{len(runs)}")
        run = Run(model, optimizer(model.parameters()), lazyckpt.Checkpointer(folder, **{**TINY_RING, **knobs}))
        run.ckpt.track(model=run.model, optimizer=run.optimizer)
        runs.append(run)
        if warm:
            run.step()
        return run

    yield make
    disk.release()
    for run in runs:
        with contextlib.suppress(lazyckpt.SaveError):
            run.ckpt.close()
    assert gate._pending == ()


def pending_chunks(handle: lazyckpt.SaveHandle) -> int:
    """Counts the lazy chunks that are not copied yet."""
    snapshot = handle._snapshot
    return 0 if snapshot is None else snapshot.job.pending_chunks((1 << 64) - 1)


@pytest.fixture
def pending() -> Callable[[lazyckpt.SaveHandle], int]:
    return pending_chunks


@pytest.fixture(params=DUPLICATES)
def duplicate(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """See ``duplicates.py``."""
    return DUPLICATES[request.param]


@pytest.fixture
def small_tensors_are_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the page witness leaves to the eager copy: small models show the same, sooner. Not those of less than
    two pages, which may hold no whole one."""
    monkeypatch.setattr("lazyckpt.capture.laziness.WATCHED_MIN_BYTES", 2 * 4096 - 1)


@pytest.fixture
def nothing_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps torn storages lazy, so that a test can tear one snapshot after another."""
    monkeypatch.setattr("lazyckpt.capture.torn.TornStorages.without", lambda self, owners, *_: owners)
