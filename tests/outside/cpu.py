"""Lets torch's tests run without GPUs, as far as they can: most ask for them without a need.

A test that asks for some number of GPUs runs anyway. ``.cuda()`` does nothing, a tensor for "cuda" is made on the CPU,
FSDP 1 is told to stay there, and gloo stands in for NCCL. Tests that still cannot run fail with torch's storage, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed._tensor import common_dtensor


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return call(*args, **kwargs)


def install() -> None:
    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = _as_it_is
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    FSDP.__init__ = functools.partialmethod(FSDP.__init__, device_id=torch.device("cpu"))
    init = common_dtensor.DTensorTestBase.init_pg
    common_dtensor.DTensorTestBase.init_pg = lambda self, *_, **__: init(self, False, "gloo")


def begin() -> None:
    """Applies to tensors that this thread makes from now on."""
    _OnTheCpu().__enter__()


def _as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test
