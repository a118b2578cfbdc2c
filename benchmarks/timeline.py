"""DataStates-LLM, fig. 15: one checkpoint of a training and its largest tensors, as ``lazyckpt trace`` draws them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.arms.lazy import LazyCkpt
from benchmarks.workload import Training
from lazyckpt.errors import ConfigError
from lazyckpt.tools.trace import read_trace

STEPS = 4
CHUNK_BYTES = 4 << 20  # so that a large tensor has many


def timeline(training: Training, directory: Path, output: Path) -> str:
    """Trains some steps with a checkpoint in each; ``output`` with the suffix .json is their trace, with .png the
    picture of the last but one. Returns a note about them."""
    trace = output.with_suffix(".json")
    trace.unlink(missing_ok=True)
    directory.mkdir()
    arm = LazyCkpt(training, directory, ring=1.0, chunk_bytes=CHUNK_BYTES, trace=trace)
    try:
        for step in range(1, STEPS + 1):
            arm.save(step)
            training.compute()
            training.optimizer.step()
        arm.drain()
    finally:
        arm.close()
    picture = output.with_suffix(".png")
    try:
        from lazyckpt.tools.timeline import draw

        draw(read_trace(trace).checkpoint(STEPS - 1), picture)
    except ConfigError as error:
        return f"Timeline of a checkpoint and its largest tensors: {trace.name}; no picture: {error}"
    return f"Timeline of a checkpoint and its largest tensors: {picture.name}, {trace.name}."
