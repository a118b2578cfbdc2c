"""Exports the metrics of checkpoints to monitoring systems: ``Checkpointer(on_done=Prometheus())``."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, ClassVar

from lazyckpt.errors import SaveError
from lazyckpt.metrics import CheckpointMetrics

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # histogram buckets


def scalars(metrics: CheckpointMetrics) -> dict[str, float]:
    """The values of a durable checkpoint for curves, under the names that the integrations log."""
    return {
        "checkpoint/blocked_ms": metrics.blocked_s * 1e3,
        "checkpoint/durable_s": metrics.durable_s,
        "checkpoint/eager_mb": metrics.eager_bytes / 1e6,
        "checkpoint/mb": metrics.bytes / 1e6,
    }


class TensorBoard:
    """Draws curves over the training step ::

        Checkpointer("runs/a", on_done=TensorBoard("runs/a/tensorboard"))

    Takes a folder, or the ``SummaryWriter`` of the training. Failed checkpoints are the curve ``checkpoint/failed``.
    Raises ImportError without tensorboard.
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, str | os.PathLike):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("lazyckpt.exporters.TensorBoard needs: pip install tensorboard") from error
            writer = SummaryWriter(os.fspath(writer))
        self._writer = writer
        self._failed = 0

    def __call__(self, metrics: CheckpointMetrics, error: SaveError | None) -> None:
        if error is not None:
            self._failed += 1
            self._writer.add_scalar("checkpoint/failed", self._failed, metrics.step)
        else:
            for name, value in scalars(metrics).items():
                self._writer.add_scalar(name, value, metrics.step)
        self._writer.flush()


class WandB:
    """Logs to a run of Weights & Biases ::

        Checkpointer("runs/a", on_done=WandB(wandb.init(project="p")))

    Curves are drawn over ``checkpoint/step``: checkpoints become durable after training has logged later steps.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._failed = 0
        run.define_metric("checkpoint/*", step_metric="checkpoint/step")

    def __call__(self, metrics: CheckpointMetrics, error: SaveError | None) -> None:
        self._failed += error is not None
        told = {"checkpoint/failed": self._failed} if error is not None else scalars(metrics)
        self._run.log({**told, "checkpoint/step": metrics.step})


class Prometheus:
    """Collects metrics in a registry of ``prometheus_client``, which the caller serves or pushes ::

        prometheus_client.start_http_server(8000)
        Checkpointer("runs/a", on_done=Prometheus(run="a"))

    ``run`` is a label of every series, for several Checkpointers in one process. ``registry`` defaults to
    prometheus_client's own. Raises ImportError without prometheus_client.
    """

    def __init__(self, registry: Any = None, *, run: str = "") -> None:
        self._series = _Series.of(registry)
        self._registry = registry
        self._run = run
        for result in ("durable", "failed"):
            self._series.ended.labels(run, result)  # create the series, or no alert sees the first failure

    def __deepcopy__(self, memo: dict[int, Any]) -> Prometheus:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._registry is not None:
            raise TypeError(
                "a Prometheus exporter with a registry of its own cannot be pickled; make one in the other process"
            )
        return _prometheus, (self._run,)

    def __call__(self, metrics: CheckpointMetrics, error: SaveError | None) -> None:
        series, run = self._series, self._run
        series.blocked.labels(run).observe(metrics.blocked_s)
        if error is not None:
            series.ended.labels(run, "failed").inc()
            return
        series.ended.labels(run, "durable").inc()
        series.bytes.labels(run).inc(metrics.bytes)
        series.durable.labels(run).observe(metrics.durable_s)
        series.time.labels(run).set_to_current_time()
        if metrics.step is not None:
            series.step.labels(run).set(metrics.step)


class _Series:
    """The series of one registry, which takes each name once."""

    _known: ClassVar[weakref.WeakKeyDictionary[Any, _Series]] = weakref.WeakKeyDictionary()
    _lock = threading.Lock()

    @classmethod
    def of(cls, registry: Any) -> _Series:
        """The series of ``registry``, made at the first call. Raises ImportError without prometheus_client."""
        try:
            from prometheus_client import REGISTRY
        except ImportError as error:
            raise ImportError("lazyckpt.exporters.Prometheus needs: pip install 'lazyckpt[prometheus]'") from error
        there = REGISTRY if registry is None else registry
        with cls._lock:
            if there not in cls._known:
                cls._known[there] = cls(there)
            return cls._known[there]

    def __init__(self, registry: Any) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        run, there = ["run"], {"registry": registry}
        self.ended = Counter("lazyckpt_checkpoints", "Checkpoints that ended.", ["run", "result"], **there)
        self.bytes = Counter("lazyckpt_durable_bytes", "Bytes of durable checkpoints.", run, **there)
        self.blocked = Histogram(
            "lazyckpt_blocked_seconds", "Time that training waited for a checkpoint.", run, buckets=_SECONDS, **there
        )
        self.durable = Histogram(
            "lazyckpt_durable_seconds", "Time from the call of save() until durable.", run, buckets=_SECONDS, **there
        )
        self.step = Gauge("lazyckpt_last_durable_step", "Step of the newest durable checkpoint.", run, **there)
        self.time = Gauge("lazyckpt_last_durable_timestamp_seconds", "When it became durable.", run, **there)


def _prometheus(run: str) -> Prometheus:
    return Prometheus(run=run)
