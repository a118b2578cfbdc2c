"""The constants of the model, each with its source; an argument of ``python -m benchmarks.scale`` changes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.ranks_simulation import FOLDER_US, ROUND_TRIP_US, SERVICE_US

_ENGINES = "[engines](benchmarks.md#engines)"
_GPU = "[an H100](benchmarks.md#on-a-gpu)"
_RANKS = "[two ranks](benchmarks.md#many-ranks)"
_RESTORE = "[restore](benchmarks.md#restore-into-live-parameters), cold"
MEASURED, PAPER, ASSUMED = "measured", "paper", "assumed"


def _constant(value: float, kind: str, source: str) -> Any:
    return field(default=value, metadata={"kind": kind, "source": source})


@dataclass(frozen=True)
class Constants:
    """Rates are GB/s, times seconds."""

    # The cluster
    gpus_per_node: float = _constant(8, ASSUMED, "as in an H100 node")
    link_gbps: float = _constant(53.7, MEASURED, f"{_GPU}, copies while the gate waits; of each GPU")
    node_gbps: float = _constant(10.0, PAPER, "DataStates-LLM: the most that a node of Polaris writes")
    shared_gbps: float = _constant(650.0, PAPER, "DataStates-LLM: the file system of Polaris, all nodes together")
    network_gbps: float = _constant(10.0, ASSUMED, "into each node, while ranks that restore share their parts")
    straggler: float = _constant(0.15, MEASURED, f"{_ENGINES}: log-normal; durable writes of 1.99 to 2.49 GB/s")
    rank_mtbf_h: float = _constant(50_700, PAPER, "Llama 3: 16,384 GPUs, 419 unexpected interruptions in 54 days")
    restart_s: float = _constant(180.0, ASSUMED, "the failure is found, processes start; without the load")
    # lazyckpt
    lazy_blocked_s: float = _constant(0.0079, MEASURED, f"{_GPU}, 1.16 GB in 400 tensors, disk")
    lazy_slowdown: float = _constant(0.01, MEASURED, "the same run: by this part training is slower during writes")
    lazy_writer_gbps: float = _constant(2.43, MEASURED, f"{_ENGINES}; the disk was the limit")
    lazy_reader_gbps: float = _constant(2.14, MEASURED, f"{_RESTORE}; the disk was the limit")
    lazy_file_s: float = _constant(0.0025, MEASURED, "[one tensor](benchmarks.md#how-the-cost-grows) of 1 MiB")
    # DCP's async_save with a thread
    dcp_blocked_s: float = _constant(0.0161, MEASURED, f"{_RANKS}, 0.54 GB")
    dcp_slowdown: float = _constant(0.01, ASSUMED, "as lazyckpt; on two cores it is 1.8 times that of lazyckpt")
    dcp_writer_gbps: float = _constant(0.80, MEASURED, _ENGINES)
    dcp_reader_gbps: float = _constant(0.53, MEASURED, _RESTORE)
    dcp_agree_s: float = _constant(0.352, MEASURED, f"{_RANKS}: plan and commit; taken for any number of ranks")
    # torch.save
    torch_writer_gbps: float = _constant(0.68, MEASURED, _ENGINES)
    torch_reader_gbps: float = _constant(0.65, MEASURED, _RESTORE)
    # The commit of lazyckpt
    message_us: float = _constant(SERVICE_US, ASSUMED, "[simulated commit](internals/ranks.md#cost): the store's work")
    round_trip_us: float = _constant(ROUND_TRIP_US, ASSUMED, "the same")
    folder_us: float = _constant(FOLDER_US, ASSUMED, "the same: a rename and an fsync")
    messages: float = _constant(10.3, MEASURED, "the same, from 8 to 16,384 ranks: messages of a rank")


OURS = Constants()
# FastPersist (003): 8 DGX-2, each with 16 V100 and 8 NVMe SSDs of its own. torch.save reaches 3 % of a node there.
DGX2 = replace(OURS, gpus_per_node=16, link_gbps=12.0, node_gbps=24.8, shared_gbps=math.inf, torch_writer_gbps=0.74)
# DataStates-LLM (001): Polaris, nodes with 4 A100.
POLARIS = replace(OURS, gpus_per_node=4, link_gbps=25.0)
