"""Where the tests of devices run: on the fake driver, and on a real GPU where there is one.

LAZYCKPT_TEST_DEVICE=cpu rehearses on the host what a real GPU runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from gpu.machines import Fake, Machine, Real
from lazyckpt.reading import ranges


@pytest.fixture
def device() -> torch.device:
    """A real GPU, or the host in a rehearsal."""
    device = torch.device(os.environ.get("LAZYCKPT_TEST_DEVICE", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return device


@pytest.fixture
def real_gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("only a GPU has that")
    return device


@pytest.fixture
def new_process_engine() -> Iterator[None]:
    """`lazyckpt.save` and `load` keep one engine for the process, which must not outlive a fake driver."""
    ranges._engine_of.cache_clear()
    yield
    ranges._engine_of.cache_clear()


@pytest.fixture(params=["fake", "real"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if request.param == "fake":
        gpu = request.getfixturevalue("gpu")
        request.getfixturevalue("new_process_engine")  # later, so that it goes before the driver
        return Fake(gpu, monkeypatch)
    return Real(request.getfixturevalue("device"))


@pytest.fixture
def graphs(machine: Machine) -> None:
    """Skips where CUDA graphs are neither real nor played by the fake driver."""
    if isinstance(machine, Real) and not torch.cuda.is_available():
        pytest.skip("only a GPU has graphs")
    if isinstance(machine, Fake) and torch.backends.cuda.is_built():
        pytest.skip("torch's own graphs need a real GPU")
