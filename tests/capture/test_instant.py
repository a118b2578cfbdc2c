"""A checkpoint holds one moment, also if code that interrupts ``save()`` on its thread writes to the state."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from interrupts import Interrupt
from lazyckpt import _engine

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")
needs_pages = pytest.mark.skipif(bool(_engine.page_witness()), reason="only the kernel sees such a write")


def in_place(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


def by_data(tensor: torch.Tensor, value: float) -> None:
    tensor.data.fill_(value)


def by_numpy(tensor: torch.Tensor, value: float) -> None:
    tensor.detach().numpy()[:] = value


Write = Callable[[torch.Tensor, float], None]


class Uniform:
    """A state in which everything has one value: lazy and eager parameters, a buffer, a tensor, objects."""

    def __init__(self, folder: Path, **knobs: Any) -> None:
        self.model = torch.nn.Module()
        for name in ("lazy", "torn", "last"):
            self.model.register_parameter(name, torch.nn.Parameter(torch.zeros(128, 128)))
        self.model.register_buffer("average", torch.zeros(100, 100))
        self.tensor = torch.zeros(3000)
        self.small = torch.zeros(3)
        self.objects = {"value": 0.0}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        self.ckpt = lazyckpt.Checkpointer(folder, keep_last=2, **{"chunk_bytes": 16 << 10, **knobs})
        self.ckpt.track(first=self.objects, model=self.model, small=self.small, tensor=self.tensor, last=self.objects)
        self.ckpt.track(optimizer=self.optimizer)
        self.step()

    def set(self, value: float, write: Write = by_data) -> None:
        tensors = [*self.model.parameters(), *self.model.buffers(), self.tensor, self.small]
        with torch.no_grad():
            for tensor in tensors:
                write(tensor, value)
        self.objects["value"] = value

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()


def values_in(path: Path) -> set[float]:
    saved = torch.load(path / "state.pt")
    tensors = [*saved["model"].values(), saved["small"], saved["tensor"]]
    found = set(itertools.chain.from_iterable(tensor.unique().tolist() for tensor in tensors))
    return found | {saved["first"]["value"], saved["last"]["value"]}


@pytest.fixture
def handler(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Sets what SIGUSR1 does."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda act: signal.signal(signal.SIGUSR1, lambda *_: act())  # type: ignore[func-returns-value]
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def one_is_torn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Uniform], None]:
    """Makes one parameter eager, as a torn snapshot does, and keeps the others lazy whatever is torn."""

    def tear(state: Uniform) -> None:
        torn = state.model.torn.untyped_storage()._cdata
        monkeypatch.setattr(
            "lazyckpt.capture.torn.TornStorages.without",
            lambda self, owners, found: [0 if at == torn else bits for bits, at in zip(owners, found, strict=True)],
        )

    return tear


def outcomes(state: Uniform, write: Write, handler: Any, points: Iterator[int]) -> list[str]:
    """Saves once for each point, with a handler that writes there."""
    found = []
    for number, at in enumerate(points, 1):
        state.set(number)
        state.step()
        handler(lambda number=number: state.set(number + 1000, write))
        try:
            with Interrupt(at, lambda: signal.raise_signal(signal.SIGUSR1)) as hit:
                handle = state.ckpt.save(number)
            values = values_in(handle.result())
        except lazyckpt.TornSnapshotError as error:
            found.append("torn")
            assert "signal handler" in str(error) or "written to" in str(error), error
        else:
            assert len(values) == 1, f"{hit.where}: {sorted(values)}"
            found.append("before" if values == {number} else "after")
    return found


def every_point(state: Uniform) -> int:
    """The number of points of a save at which a handler may run."""
    state.ckpt.save(0, blocking=True)
    state.step()
    with Interrupt(-1) as counted:
        state.ckpt.save(1)
    state.ckpt._saver.drain()
    return counted.points


@pytest.mark.parametrize("knobs", [{}, {"host_buffer_bytes": 96 << 10}], ids=["room", "no-room"])
@pytest.mark.parametrize(
    ("write", "witness"),
    [
        pytest.param(in_place, "auto", id="in-place"),
        pytest.param(by_data, "auto", id="data", marks=needs_pages),
        pytest.param(by_numpy, "auto", id="numpy", marks=needs_pages),
        pytest.param(in_place, "versions", id="versions"),
    ],
)
def test_a_signal_handler_that_writes_inside_save_gives_one_moment_or_an_error(
    tmp_path: Path, handler: Any, one_is_torn: Any, write: Write, witness: str, knobs: dict[str, int]
) -> None:
    """Regression: eager bytes were copied after lazy ones were guarded, and a handler could run in between."""
    state = Uniform(tmp_path, witness=witness, **knobs)
    one_is_torn(state)
    points = every_point(state)
    found = outcomes(state, write, handler, iter(range(1, points + 1, max(1, points // 25))))
    assert {"before", "torn"} <= set(found) or {"after", "torn"} <= set(found), found
    state.ckpt.close()


@pytest.mark.slow
@pytest.mark.parametrize("write", [in_place, pytest.param(by_data, marks=needs_pages)])
def test_a_signal_handler_that_writes_at_any_point_gives_one_moment_or_an_error(
    tmp_path: Path, handler: Any, one_is_torn: Any, write: Write
) -> None:
    state = Uniform(tmp_path)
    one_is_torn(state)
    outcomes(state, write, handler, iter(range(1, every_point(state) + 1)))
    state.ckpt.close()


@needs_pages
@pytest.mark.parametrize("knobs", [{}, {"host_buffer_bytes": 96 << 10}], ids=["room", "no-room"])
def test_a_write_to_eager_bytes_behind_the_call_that_takes_them_is_in_no_checkpoint(
    tmp_path: Path, one_is_torn: Any, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, int]
) -> None:
    """Without room, the engine watches them until it has copied them."""
    from lazyckpt.pipeline import launch

    state = Uniform(tmp_path, **knobs)
    one_is_torn(state)
    state.ckpt.save(0, blocking=True)
    state.step()
    capture = launch.capture

    def written_behind(*args: Any) -> Any:
        job = capture(*args)
        by_data(state.model.torn, 1000.0)
        return job

    monkeypatch.setattr(launch, "capture", written_behind)
    try:
        assert values_in(state.ckpt.save(1).result()) == {0.0}
    except lazyckpt.TornSnapshotError as error:
        assert knobs and "model.torn" in str(error)
    monkeypatch.undo()
    state.ckpt.close()


def at_capture(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Calls ``act`` in the next save, before the engine takes the bytes."""
    from lazyckpt.pipeline import launch

    capture, todo = launch.capture, [act]

    def interrupted(*args: Any) -> Any:
        if todo:
            todo.pop()()
        return capture(*args)

    monkeypatch.setattr(launch, "capture", interrupted)


def test_a_step_inside_save_on_its_own_thread_fails_the_save_and_the_next_one_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Uniform(tmp_path)
    at_capture(monkeypatch, state.step)
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"SGD stepped inside save\(\)"):
        state.ckpt.save(1)
    state.ckpt.save(2, blocking=True)
    assert [c.step for c in state.ckpt.checkpoints()] == [2]
    state.ckpt.close()


def test_a_handler_that_draws_random_numbers_inside_save_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Any
) -> None:
    """The state of a generator is a copy, made before the bytes are taken."""
    state = Uniform(tmp_path)
    state.ckpt.save(0, blocking=True)
    handler(lambda: torch.rand(1))
    at_capture(monkeypatch, lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(lazyckpt.TornSnapshotError, match="an object in the state changed inside save"):
        state.ckpt.save(1)
    state.ckpt.close()


def test_a_handler_that_leaves_the_state_alone_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Any
) -> None:
    state = Uniform(tmp_path)
    flags = []
    handler(lambda: flags.append(1))
    at_capture(monkeypatch, lambda: signal.raise_signal(signal.SIGUSR1))
    state.ckpt.save(1, blocking=True)
    assert flags
    assert signal.set_wakeup_fd(-1) == -1, "no listener is left"
    state.ckpt.close()


def test_what_listens_to_signals_itself_keeps_listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = os.pipe2(os.O_NONBLOCK)
    state = Uniform(tmp_path)
    signal.set_wakeup_fd(end)
    try:
        at_capture(monkeypatch, lambda: signal.raise_signal(signal.SIGWINCH))
        state.ckpt.save(1, blocking=True)
    finally:
        assert signal.set_wakeup_fd(-1) == end
        os.close(begin)
        os.close(end)
    state.ckpt.close()


def test_a_destructor_that_writes_inside_save_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal: the versions of the tensors tell that something ran."""
    state = Uniform(tmp_path)
    state.set(1)

    class Holder:
        def __del__(self) -> None:
            state.set(2, in_place)

    held = [Holder()]
    at_capture(monkeypatch, held.clear)
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"model\.lazy, .* changed inside save"):
        state.ckpt.save(1)
    state.ckpt.close()


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_file_of_tensors_is_of_one_moment_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype | None
) -> None:
    """Also for tensors that are copied while the state is collected: views, and tensors in another dtype."""
    whole = torch.zeros(4, 5000)
    state = {"whole": whole, "view": torch.zeros(5000, 4).t()[1], "part": torch.zeros(9000)[500:]}

    def write() -> None:
        for tensor in state.values():
            tensor.fill_(1)

    at_capture(monkeypatch, write)
    with lazyckpt.Saver() as saver:
        try:
            path = saver.save(state, tmp_path / name, dtype=dtype).result()
        except lazyckpt.TornSnapshotError:
            return
    saved = lazyckpt.load(path)
    assert len(set(itertools.chain.from_iterable(t.unique().tolist() for t in saved.values()))) == 1
