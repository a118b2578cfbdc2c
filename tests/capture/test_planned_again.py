"""What a save keeps from the save before changes no byte: another Checkpointer plans the same state anew, in Python.

conftest.py makes each decision that is kept anew, too, and compares it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moves import MOVES, REFUSED, VALUES
from tracked_training import Tagged, Training

import lazyckpt
from lazyckpt import _engine
from lazyckpt.capture.decision import Decision
from lazyckpt.pipeline import launch
from lazyckpt.providers import pickles
from lazyckpt.providers.base import StorageTable, TensorViews
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.pickles import Skeleton
from trials import TORTURE

pytestmark = [
    pytest.mark.usefixtures("small_tensors_are_lazy"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(3600 if TORTURE else 300),
]


class NoVocabulary:
    """Takes the place of the native pickler, and pickles nothing."""

    def pickle(self, *_: Any) -> None:
        return None


@contextlib.contextmanager
def planned_anew(ckpt: lazyckpt.Checkpointer) -> Iterator[None]:
    """Makes a save plan as the first one of a process does, and without native code. Only the keys of storages stay."""
    for part in ckpt._provider.parts.values():
        for name, skeleton in part._skeletons.items():
            part._skeletons[name] = Skeleton()
            part._skeletons[name]._kept = TensorViews(keys=list(skeleton._kept.keys))
        if isinstance(part, ModuleProvider):
            part._accepted_keys = None
    ckpt._archive.added, ckpt._archive._layout = [], None
    ckpt._launcher.decisions._kept.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickles, "_VOCABULARY", NoVocabulary())
        _engine.ask_tensors_always(True)
        try:
            yield
        finally:
            _engine.ask_tensors_always(False)


class Twice:
    """Saves the state of a training with two Checkpointers, and compares all that they plan and write."""

    def __init__(self, training: Training, folder: Path, graph: Any, by_torch: Any) -> None:
        self.training = training
        self.kept, self.anew = (
            lazyckpt.Checkpointer(folder / name, keep_last=1, chunk_bytes=64 << 10, host_buffer_bytes=1 << 20)
            for name in ("kept", "anew")
        )
        training.checkpointers = [self.kept, self.anew]
        training.track()
        self._graph, self._by_torch = graph, by_torch
        self.saves = self.refused = 0
        self.native = 0  # objects that the native pickler wrote

    def save(self, what: str, *, and_load: bool = True) -> None:
        self.saves += 1
        now = self._saved(self.kept)
        self.native += sum(s._plain is not None for p in self._parts() for s in p._skeletons.values())
        with planned_anew(self.anew):
            expected = self._saved(self.anew)
        assert now == expected, what
        if isinstance(now, str):
            self.refused += 1
        elif and_load:
            loaded = torch.load(self.kept.directory / f"step-{self.saves:08d}/state.pt", weights_only=False)
            for name, part in self.kept._provider.parts.items():
                assert self._graph(loaded[name]) == self._graph(self._by_torch(part.state())), (what, name)

    def _parts(self) -> Any:
        return self.kept._provider.parts.values()

    def _saved(self, ckpt: lazyckpt.Checkpointer) -> Any:
        """The programs and the bytes of the file; what the error says if the state is refused."""
        programs: list[Any] = []
        lay_out = launch.lay_out

        def noted(*args: Any) -> Any:
            programs.extend(lay_out(*args))
            return programs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "lay_out", noted)
            try:
                path = ckpt.save(self.saves, blocking=True).path
            except lazyckpt.LazyCkptError as error:
                return f"{type(error).__name__}: {error}".replace(str(ckpt.directory), "…")
        return programs, (path / "state.pt").read_bytes()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_what_is_kept_between_saves_changes_no_byte(
    seed: int, tmp_path: Path, graph: Any, by_torch: Any, kept_decisions: list[Decision]
) -> None:
    training = Training(seed)
    with torch.serialization.safe_globals([Tagged]):
        twice = Twice(training, tmp_path, graph, by_torch)
        for move in training.random.sample(MOVES, len(MOVES)):
            undo = move(training)
            if move.__name__ != "nothing_is_stepped":
                training.step()
            twice.save(move.__name__)
            training.step()
            twice.save(f"a step after {move.__name__}", and_load=False)
            if undo is not None:
                undo()
                twice.save(f"{move.__name__}, undone", and_load=False)
        twice.kept.close()
        twice.anew.close()
    assert twice.refused < twice.saves / 4
    assert twice.native > 4 * twice.saves and len(kept_decisions) > twice.saves / 3, "hardly anything was kept"


def opcodes(skeleton: Skeleton, obj: Any) -> Any:
    """The pickle of an object and the columns of its storages; the error if it is refused."""
    table = StorageTable(map(str, range(100)))
    try:
        return skeleton.opcodes(obj, table), table.views.columns()[:4], [s._cdata for s in table.views.storages]
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("number", range(len(VALUES) + 1))
def test_the_native_pickler_writes_what_python_writes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value alone: where one is not plain, Python pickles all that is around it."""
    value = [*VALUES, REFUSED][number]
    shared = torch.ones(3)
    objects = [value, [value, value], {"a": value, "b": (value, shared)}, {"b": {"c": value}, "d": [shared, shared]}]
    kept = Skeleton()
    written = [opcodes(skeleton, obj) for obj in objects for skeleton in (Skeleton(), kept, kept)]
    monkeypatch.setattr(pickles, "_VOCABULARY", NoVocabulary())
    kept = Skeleton()
    assert written == [opcodes(skeleton, obj) for obj in objects for skeleton in (Skeleton(), kept, kept)]


def test_what_python_pickles_is_pickled_anew_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors, and everything around them."""
    monkeypatch.setattr(pickles, "_VOCABULARY", NoVocabulary())
    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(4).requires_grad_()]
    objects = [*({"a": tensor} for tensor in tensors), {"b": tensors[3]}, {"b": tensors[3], "c": 1}, {"b": tensors[0]}]
    kept = Skeleton()
    for obj in objects:
        for skeleton in (kept, kept):
            assert opcodes(skeleton, obj) == opcodes(Skeleton(), obj)
