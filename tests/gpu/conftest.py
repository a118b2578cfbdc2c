"""On which device these tests run: a GPU; or, as a rehearsal of those that can do without, what LAZYCKPT_TEST_DEVICE
says (`cpu`)."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    device = torch.device(os.environ.get("LAZYCKPT_TEST_DEVICE", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return device


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """For tests that look at the device itself."""
    if device.type != "cuda":
        pytest.skip("only a GPU has that")
    return device
