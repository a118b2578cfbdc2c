"""The floor: the barest pipeline over the same tensors. See `benchmarks/floor/floor.cc`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.arms.base import Arm
from benchmarks.floor import Floor, FloorUnavailable
from benchmarks.workload import Training

MAX_IN_FLIGHT = 2  # as lazyckpt's default


class FloorArm(Arm):
    """`ring` is the ring's size as a fraction of the state."""

    def __init__(self, training: Training, directory: Path, *, ring: float) -> None:
        super().__init__(training, directory)
        if training.device.type != "cpu":
            raise FloorUnavailable("it copies host memory only")
        self._ranges = [(t.data_ptr(), t.nbytes) for t in training.tensors().values()]
        self._floor = Floor(int(ring * sum(nbytes for _, nbytes in self._ranges)))

    def save(self, step: int) -> None:
        self._floor.drain(MAX_IN_FLIGHT - 1)
        self._floor.save(self.path(step), self._ranges)

    def before_step(self) -> None:
        self._floor.wait()

    def drain(self) -> None:
        self._floor.drain()

    def close(self) -> None:
        self._floor.close()
