"""A Saver that keeps what it made of the state before writes the bytes of one that plans anew, without native code.

conftest.py makes each decision that is kept anew, too, and compares it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from moves import MOVES
from tracked_training import Tagged, Training

import lazyckpt
from lazyckpt import _engine
from lazyckpt.capture.decision import Decision
from lazyckpt.pipeline.safetensors_cache import SafetensorsCache
from lazyckpt.providers import pickles
from lazyckpt.providers.base import TensorViews
from lazyckpt.providers.pickles import Skeleton
from trials import TORTURE

pytestmark = [
    pytest.mark.usefixtures("small_tensors_are_lazy"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(3600 if TORTURE else 300),
]

Way = Callable[[lazyckpt.Saver, Training, Path], lazyckpt.SaveHandle]


def as_lightning_does(saver: lazyckpt.Saver, training: Training, path: Path) -> lazyckpt.SaveHandle:
    """A new dict at each call."""
    checkpoint = {
        "epoch": 3,
        "state_dict": training.model.state_dict(),
        "optimizer_states": [training.optimizer.state_dict(), training.foreign.state_dict()],
        "lr_schedulers": [training.scheduler.state_dict()],
        "callbacks": {"EMA": training.average.state_dict()},
        "extra": training.extra,
    }
    return saver.save(checkpoint, path, blocking=True)


def as_trainers_do(saver: lazyckpt.Saver, training: Training, path: Path) -> lazyckpt.SaveHandle:
    """A folder of several files."""
    with saver.stage(path) as staged:
        staged.add("model.safetensors", training.model.state_dict(), {"format": "pt"})
        staged.add("ema/model.safetensors", training.average.module.state_dict())
        staged.add("optimizer.bin", training.optimizer.state_dict())
        staged.add("scheduler.bin", training.scheduler.state_dict())
        staged.add("custom_checkpoint_0.pkl", training.extra)
        return staged.save(blocking=True)


class NoVocabulary:
    """Takes the place of the native pickler, and pickles nothing."""

    def pickle(self, *_: Any) -> None:
        return None


@contextlib.contextmanager
def planned_anew(saver: lazyckpt.Saver) -> Iterator[None]:
    """Makes a save plan as the first one of a process does, and without native code. Only the keys of storages stay."""
    for archive in (saver._archives, *saver._staged_archives.values()):
        keys = list(archive.skeleton._kept.keys)
        archive.skeleton = Skeleton()
        archive.skeleton._kept = TensorViews(keys=keys)
        archive.added, archive._layout, archive.safetensors = [], None, SafetensorsCache()
    saver.launcher.decisions._kept.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickles, "_VOCABULARY", NoVocabulary())
        _engine.ask_tensors_always(True)
        try:
            yield
        finally:
            _engine.ask_tensors_always(False)


def written(way: Way, saver: lazyckpt.Saver, training: Training, path: Path) -> Any:
    """The bytes of every file; what the error says if the state is refused."""
    try:
        way(saver, training, path)
    except lazyckpt.LazyCkptError as error:
        return f"{type(error).__name__}: {error}".replace(str(path), "…")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    contents = {str(file.relative_to(path)): file.read_bytes() for file in files}
    path.unlink() if path.is_file() else shutil.rmtree(path)
    return contents


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each safetensors file: whether what was kept held."""
    held: list[bool] = []
    before = SafetensorsCache.again

    def noted(self: SafetensorsCache, tensors: Any) -> TensorViews | None:
        found = before(self, tensors)
        held.append(found is not None)
        return found

    monkeypatch.setattr(SafetensorsCache, "again", noted)
    return held


@pytest.mark.long(first=1)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("way", [as_lightning_does, as_trainers_do])
def test_what_a_saver_keeps_changes_no_byte(
    way: Way, seed: int, tmp_path: Path, kept_decisions: list[Decision], again: list[bool]
) -> None:
    training = Training(seed)
    saves = 0
    knobs: dict[str, Any] = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 1 << 20}

    def compare(what: str) -> None:
        nonlocal saves
        saves += 1
        now = written(way, kept, training, tmp_path / "kept")
        with planned_anew(anew):
            expected = written(way, anew, training, tmp_path / "anew")
        assert now == expected, what

    with (
        torch.serialization.safe_globals([Tagged]),
        lazyckpt.Saver(**knobs) as kept,
        lazyckpt.Saver(**knobs) as anew,
    ):
        for saver in (kept, anew):
            saver.watch(training.model)
        for move in training.random.sample(MOVES, len(MOVES)):
            undo = move(training)
            training.step()
            compare(move.__name__)
            training.step()
            compare(f"a step after {move.__name__}")
            if undo is not None:
                undo()
                compare(f"{move.__name__}, undone")
    assert len(kept_decisions) > saves / 4, "hardly any decision was kept"
    assert way is as_lightning_does or sum(again) > saves / 2, "hardly any file of safetensors was kept"


@pytest.mark.parametrize("way", [as_lightning_does, as_trainers_do])
def test_what_stays_the_same_is_kept(
    way: Way, tmp_path: Path, kept_decisions: list[Decision], again: list[bool]
) -> None:
    training = Training(0)
    with lazyckpt.Saver() as saver:
        for number in range(5):
            if number == 2:  # owners of other tests have not stepped, as the second save finds
                kept_decisions.clear()
                again.clear()
            training.step()
            written(way, saver, training, tmp_path / "saved")
    assert len(kept_decisions) == 3
    assert again == ([] if way is as_lightning_does else [True] * 6)


def test_a_safetensors_file_is_kept_for_the_same_facts(tmp_path: Path, again: list[bool]) -> None:
    """The order of names is none of them."""
    path = tmp_path / "a.safetensors"
    memory = torch.zeros(8).numpy()
    with lazyckpt.Saver() as saver:

        def save(metadata: dict[str, str] | None = None, **tensors: torch.Tensor) -> None:
            with saver.stage(tmp_path / "folder") as staged:
                staged.add(path.name, tensors, metadata)
                staged.save(blocking=True)
            with safetensors.safe_open(tmp_path / "folder" / path.name, "pt") as file:
                assert (file.metadata() or {}).items() >= (metadata or {}).items()
                assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())

        save(a=torch.ones(8), b=torch.zeros(8, dtype=torch.float64))
        save(b=torch.ones(8, dtype=torch.float64), a=torch.full((8,), 2.0))
        save({"step": "1"}, a=torch.ones(8), b=torch.zeros(8, dtype=torch.float64))
        save({"step": "2"}, a=torch.ones(8), b=torch.zeros(8, dtype=torch.float64))
        assert again == [False, True, True, True]
        save(a=torch.ones(8, dtype=torch.float64), b=torch.zeros(8))
        save(a=torch.ones(8, dtype=torch.float64), b=torch.zeros(16)[::2])
        save(a=torch.ones(8, dtype=torch.float64), b=torch.zeros(16)[::2])
        save(a=torch.ones(8), b=torch.ones(8))
        assert again[4:] == [False] * 4
        with pytest.raises(lazyckpt.SaveError, match="share memory"):
            save(a=torch.from_numpy(memory), b=torch.from_numpy(memory))
        with pytest.raises(lazyckpt.SaveError, match="takes a dict of names"):
            save(a=torch.ones(8), b=1)  # type: ignore[arg-type]
