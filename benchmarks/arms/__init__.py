"""Every arm by name, in the order of the report. Peers are imported only when their arm is made."""

from __future__ import annotations

from functools import partial

from benchmarks.arms.base import Arm, ArmKind
from benchmarks.arms.dcp import Dcp, DcpAsync
from benchmarks.arms.floor import FloorArm
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.arms.lightning import Lightning
from benchmarks.arms.synchronous import NoCheckpoint, Safetensors, TorchSave
from benchmarks.arms.torch_checkpointing import TorchCheckpointing
from benchmarks.arms.torchsnapshot import TorchSnapshot

NONE = ArmKind("none", NoCheckpoint)

KINDS = {
    kind.name: kind
    for kind in [
        ArmKind("floor", partial(FloorArm, ring=1.0)),
        ArmKind("lazyckpt", partial(LazyCkpt, ring=1.0), "lazyckpt"),
        ArmKind("floor-quarter", partial(FloorArm, ring=0.25)),
        ArmKind("lazyckpt-quarter", partial(LazyCkpt, ring=0.25), "lazyckpt"),
        ArmKind("lazyckpt-before-step", partial(LazyCkpt, ring=1.0, durability="before_step"), "lazyckpt"),
        ArmKind("lazyckpt-posix", partial(LazyCkpt, ring=1.0, io_backend="posix"), "lazyckpt"),
        ArmKind("lazyckpt-buffered", partial(LazyCkpt, ring=1.0, direct_io=False), "lazyckpt"),
        ArmKind("lazyckpt-verified", partial(LazyCkpt, ring=1.0, verify_after_write=True), "lazyckpt"),
        ArmKind("torch.save", TorchSave, "torch"),
        ArmKind("safetensors", Safetensors, "safetensors"),
        ArmKind("lightning", partial(Lightning, asynchronous=False), "lightning"),
        ArmKind("lightning-async", partial(Lightning, asynchronous=True), "lightning"),
        ArmKind("torchsnapshot", TorchSnapshot, "torchsnapshot"),
        ArmKind("dcp", Dcp, "torch"),
        ArmKind("dcp-async-thread", partial(DcpAsync, process=False), "torch"),
        ArmKind("dcp-async-process", partial(DcpAsync, process=True), "torch"),
        ArmKind("torch_checkpointing", TorchCheckpointing, "torch_checkpointing"),
    ]
}

# Of every engine its best, for experiments over something else.
BEST = ("floor", "lazyckpt", "torch.save", "torchsnapshot", "dcp-async-thread", "torch_checkpointing")
QUICK = ("floor", "lazyckpt", "floor-quarter", "lazyckpt-quarter", "torch.save")

__all__ = ["BEST", "KINDS", "NONE", "QUICK", "Arm", "ArmKind"]
