"""Exports the metrics of checkpoints to monitoring systems: ``Checkpointer(on_done=Prometheus())``."""

from __future__ import annotations

from typing import Any

from lazyckpt.errors import SaveError
from lazyckpt.metrics import CheckpointMetrics

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # histogram buckets


class Prometheus:
    """Collects metrics in a registry of ``prometheus_client``, which the caller serves or pushes ::

        prometheus_client.start_http_server(8000)
        Checkpointer("runs/a", on_done=Prometheus())

    ``registry`` defaults to prometheus_client's own. One exporter serves any number of Checkpointers; a second in the
    same registry raises ValueError. Raises ImportError without prometheus_client.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise ImportError("lazyckpt.exporters.Prometheus needs: pip install 'lazyckpt[prometheus]'") from error
        there: dict[str, Any] = {"registry": REGISTRY if registry is None else registry}
        self._ended = Counter("lazyckpt_checkpoints", "Checkpoints that ended.", ["result"], **there)
        self._bytes = Counter("lazyckpt_durable_bytes", "Bytes of durable checkpoints.", **there)
        self._blocked = Histogram(
            "lazyckpt_blocked_seconds", "Time that training waited for a checkpoint.", buckets=_SECONDS, **there
        )
        self._durable = Histogram(
            "lazyckpt_durable_seconds", "Time from the call of save() until durable.", buckets=_SECONDS, **there
        )
        self._step = Gauge("lazyckpt_last_durable_step", "Step of the newest durable checkpoint.", **there)
        self._time = Gauge("lazyckpt_last_durable_timestamp_seconds", "When it became durable.", **there)
        self._registry = registry
        if registry is None:
            _default.append(self)
        for result in ("durable", "failed"):
            self._ended.labels(result)  # create the series, or no alert sees the first failure

    def __deepcopy__(self, memo: dict[int, Any]) -> Prometheus:
        return self  # prometheus_client refuses a second one with the same names

    def __reduce__(self) -> tuple[Any, ...]:
        if self._registry is not None:
            raise TypeError(
                "a Prometheus exporter with a registry of its own cannot be pickled; make one in the other process"
            )
        return _of_this_process, ()

    def __call__(self, metrics: CheckpointMetrics, error: SaveError | None) -> None:
        self._blocked.observe(metrics.blocked_s)
        if error is not None:
            self._ended.labels("failed").inc()
            return
        self._ended.labels("durable").inc()
        self._bytes.inc(metrics.bytes)
        self._durable.observe(metrics.durable_s)
        self._time.set_to_current_time()
        if metrics.step is not None:
            self._step.set(metrics.step)


_default: list[Prometheus] = []  # at most one, in prometheus_client's own registry


def _of_this_process() -> Prometheus:
    return _default[0] if _default else Prometheus()
