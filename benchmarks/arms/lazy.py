"""lazyckpt itself, as a user would call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.arms.base import Arm
from benchmarks.workload import Training

CHUNK_BYTES = 16 << 20


class LazyCkpt(Arm):
    """`ring` is the ring's size as a fraction of the state; the full ring has room for the eager bytes too. `knobs` are
    further fields of lazyckpt's Config.

    The gate stands inside `optimizer.step()`, so `before_step` has nothing to do; the loop's clock sees it
    all the same. It keeps `keep_last` checkpoints and pays for deleting the others, which no other arm does.
    """

    def __init__(
        self, training: Training, directory: Path, *, ring: float | None = None, keep_last: int = 2, **knobs: Any
    ) -> None:
        super().__init__(training, directory)
        import lazyckpt

        if ring is not None:
            state_bytes = sum(t.nbytes for t in training.tensors().values())
            chunk_bytes = knobs.get("chunk_bytes", CHUNK_BYTES)
            spare_bytes = 2 * chunk_bytes if ring >= 1 else 0
            ring_bytes = max(2, -(-int(ring * state_bytes) // chunk_bytes)) * chunk_bytes + spare_bytes
            knobs["host_buffer_bytes"] = ring_bytes
        self._checkpointer = lazyckpt.Checkpointer(directory, keep_last=keep_last, **knobs)
        self._checkpointer.track(model=training.model, optimizer=training.optimizer)
        self._handles: list[Any] = []
        self.metrics: list[Any] = []  # of the checkpoints that were drained

    def save(self, step: int) -> None:
        self._handles.append(self._checkpointer.save(step))

    def drain(self) -> None:
        for handle in self._handles:
            handle.result(timeout=600)
            self.metrics.append(handle.metrics)
        self._handles.clear()

    def restore(self) -> None:
        """The newest checkpoint, in place."""
        self._checkpointer.restore()

    def resume(self) -> int:
        return int(self._checkpointer.restore() or 0)

    def discard(self) -> None:
        """Nothing to do: the catalog keeps two, and is not to be deleted under a living checkpointer."""

    def close(self) -> None:
        self._checkpointer.close()
