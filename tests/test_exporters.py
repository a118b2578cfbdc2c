"""Reports of a checkpoint: the hook, the log, and Prometheus through its own library."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.exporters import Prometheus, TensorBoard, WandB


def test_the_hook_hears_of_every_checkpoint_and_of_failures(tmp_path: Path) -> None:
    told: list[Any] = []
    with lazyckpt.Saver(on_done=lambda *news: told.append(news)) as saver:
        handles = [saver.save(torch.ones(10), tmp_path / f"{i}.pt") for i in range(2)]
        saver.wait()
        with pytest.raises(lazyckpt.SerializationError):
            saver.save(lambda: None, tmp_path / "b.pt")
    *durable, (_, failed) = told
    assert [m for m, _ in durable] == [handle.metrics for handle in handles]
    assert all(error is None and m.durable_s > 0 and m.save_blocked_s > 0 for m, error in durable)
    assert isinstance(failed, lazyckpt.SerializationError)


def test_a_hook_that_raises_is_a_warning(tmp_path: Path) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("oh")

    with lazyckpt.Saver(on_done=broken) as saver, pytest.warns(UserWarning, match="on_done raised KeyError"):
        handle = saver.save(torch.ones(10), tmp_path / "a.pt")
        assert handle.result(30).exists()
        saver.wait()
    with pytest.raises(lazyckpt.ConfigError, match="on_done"):
        lazyckpt.Saver(on_done="print")


def test_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lazyckpt"), lazyckpt.Saver() as saver:
        saver.save(torch.ones(10), tmp_path / "a.pt", blocking=True)
        with pytest.raises(lazyckpt.SerializationError):
            saver.save(lambda: None, tmp_path / "b.pt")
    durable, failed = caplog.records
    assert durable.levelname == "INFO" and str(tmp_path / "a.pt") in durable.message and "is durable" in durable.message
    assert failed.levelname == "WARNING" and "b.pt" in failed.message


def test_prometheus(tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    exporter = Prometheus(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"run": "", **labels})  # type: ignore[no-any-return]

    assert value("lazyckpt_checkpoints_total", result="failed") == 0
    before = time.time()
    with lazyckpt.Checkpointer(tmp_path / "a", on_done=exporter) as ckpt, lazyckpt.Saver(on_done=exporter) as saver:
        ckpt.track(x=torch.ones(10))
        handles = [ckpt.save(7), ckpt.save(9), saver.save(torch.ones(3), tmp_path / "b.pt")]
        with pytest.raises(lazyckpt.SerializationError):
            saver.save(lambda: None, tmp_path / "c.pt")
        saver.wait()
    metrics = [handle.metrics for handle in handles]
    assert value("lazyckpt_checkpoints_total", result="durable") == 3
    assert value("lazyckpt_checkpoints_total", result="failed") == 1
    assert value("lazyckpt_durable_bytes_total") == sum(m.bytes for m in metrics)
    assert value("lazyckpt_durable_seconds_sum") == pytest.approx(sum(m.durable_s for m in metrics))
    assert value("lazyckpt_blocked_seconds_count") == 4
    assert value("lazyckpt_last_durable_step") == 9
    assert before <= (value("lazyckpt_last_durable_timestamp_seconds") or 0) <= time.time()
    assert b"lazyckpt_durable_seconds_bucket" in prometheus_client.generate_latest(registry)


def test_a_second_exporter_shares_the_series_and_runs_are_told_apart(tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    for run in ("a", "b", "b"):
        with lazyckpt.Saver(on_done=Prometheus(registry, run=run)) as saver:
            saver.save(torch.ones(10), tmp_path / "x.pt", step=3)
    ended = [registry.get_sample_value("lazyckpt_checkpoints_total", {"run": r, "result": "durable"}) for r in "ab"]
    assert ended == [1, 2]


class Recorder:
    """What the exporters call of a ``SummaryWriter`` and of a run of W&B."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append({name: value, "checkpoint/step": step})

    def log(self, told: dict[str, float]) -> None:
        self.told.append(told)

    def flush(self) -> None: ...

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("checkpoint/*", "checkpoint/step")


@pytest.mark.parametrize("exporter", [TensorBoard, WandB])
def test_curves(exporter: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    with lazyckpt.Checkpointer(tmp_path, on_done=exporter(recorder), on_error="warn") as ckpt:
        ckpt.track(x={"tensor": torch.ones(10)})
        metrics = ckpt.save(7, blocking=True).metrics
        durable = dict(pair for told in recorder.told for pair in told.items())
        recorder.told.clear()
        ckpt.track(replace=True, x={"a lambda": lambda: None})
        with pytest.warns(UserWarning):
            ckpt.save(8)
    assert 0 < durable.pop("checkpoint/blocked_ms") <= metrics.blocked_s * 1e3
    assert durable == {
        "checkpoint/durable_s": metrics.durable_s,
        "checkpoint/eager_mb": metrics.eager_bytes / 1e6,
        "checkpoint/mb": metrics.bytes / 1e6,
        "checkpoint/step": 7,
    }
    assert recorder.told == [{"checkpoint/failed": 1, "checkpoint/step": 8}]


def test_tensorboard_itself(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with lazyckpt.Saver(on_done=TensorBoard(tmp_path / "curves")) as saver:
        saver.save(torch.ones(10), tmp_path / "x.pt", step=3)
    found = events.EventAccumulator(str(tmp_path / "curves"))
    found.Reload()
    assert [scalar.step for scalar in found.Scalars("checkpoint/durable_s")] == [3]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'lazyckpt\[prometheus\]'"):
        Prometheus()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoard("curves")
