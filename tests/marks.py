"""Marks for tests that need more than the oldest torch that lazyckpt supports."""

from __future__ import annotations

import pytest
import torch

FSDP2 = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="torch trains no FSDP2 on CPUs yet")
OFFSETS = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_checkpoint_offset"), reason="torch does not tell offsets yet"
)
