"""Every arm by name, in the order of the report. Peers are imported only when their arm is made."""

from __future__ import annotations

from functools import partial

from benchmarks.arms.base import Arm, ArmKind
from benchmarks.arms.dcp import DcpAsync
from benchmarks.arms.floor import FloorArm
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.arms.lightning import LightningAsync
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
        ArmKind("torch.save", TorchSave, "torch"),
        ArmKind("safetensors", Safetensors, "safetensors"),
        ArmKind("lightning-async", LightningAsync, "lightning"),
        ArmKind("torchsnapshot", TorchSnapshot, "torchsnapshot"),
        ArmKind("dcp-async-thread", partial(DcpAsync, process=False), "torch"),
        ArmKind("dcp-async-process", partial(DcpAsync, process=True), "torch"),
        ArmKind("torch_checkpointing", TorchCheckpointing, "torch_checkpointing"),
    ]
}

QUICK = ("floor", "lazyckpt", "floor-quarter", "lazyckpt-quarter", "torch.save")

__all__ = ["KINDS", "NONE", "QUICK", "Arm", "ArmKind"]
