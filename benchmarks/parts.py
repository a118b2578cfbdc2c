"""The parts of a run, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks import (
    disk,
    frameworks,
    goodput,
    growth,
    latency,
    memory,
    mirrors,
    papers,
    planning,
    restore,
    train,
    verdict,
    witness,
)
from benchmarks.arms import KINDS, ArmKind
from benchmarks.paired import Progress
from benchmarks.ranks import deepspeed_saves, replica_saves, replicas
from benchmarks.ranks import tables as ranks
from benchmarks.ranks.arms import ARMS
from benchmarks.report import Table
from benchmarks.settings import Settings


@dataclass(frozen=True)
class Part:
    about: str
    measure: Callable[[Settings, Progress], Iterator[Table]]
    quick: bool = False  # in the run without --full, too
    packages: tuple[str, ...] = ("torch", "lazyckpt")  # whose versions the report quotes, besides those of the arms
    arms: Mapping[str, ArmKind] = field(default_factory=lambda: KINDS)  # that it knows


def _frameworks(settings: Settings, progress: Progress) -> Iterator[Table]:
    # Half of it in the full run, so that seven pairs of ten arms stay within minutes; a tenth in the quick one.
    yield frameworks.measure(
        pairs=settings.pairs,
        checkpoints=settings.steps // 2,
        state_bytes=settings.state_bytes // (2 if settings.full else 10),
        directory=settings.directory,
        progress=progress,
    )


# Engines that return before the checkpoint is written.
PEERS = {name: ARMS[name] for name in ("lazyckpt", "dcp-async-thread", "dcp-async-process", "torch_checkpointing")}

PARTS = {
    "train": Part("a checkpoint at every step, every engine", train.measure, quick=True),
    "memory": Part("peak memory of the same", memory.measure, quick=True),
    "frameworks": Part(
        "in Lightning, Accelerate and transformers",
        _frameworks,
        quick=True,
        packages=("torch", "lazyckpt", *frameworks.TRAINERS),
    ),
    "latency": Part("how soon save() returns", latency.measure, quick=True),
    "disk": Part("durable writes without training", disk.measure, quick=True),
    "restore": Part("into live parameters, from a cold and a warm page cache", restore.measure, quick=True),
    "ranks": Part("a sharded job on several ranks, every engine that can save it", ranks.measure, arms=ARMS),
    "goodput": Part("useful steps of a training that is killed again and again", goodput.measure, arms=goodput.ARMS),
    "replicas": Part("one state restored on several ranks that all hold it", replicas.measure),
    "replicated-save": Part("what save() costs ranks that all hold and write one state", replica_saves.measure),
    "deepspeed": Part("save_checkpoint() of DeepSpeed's engines and of lazyckpt", deepspeed_saves.measure),
    "mirrors": Part("what mirrors cost a training, and restores from an object store", mirrors.measure),
    "planning": Part("what save() plans, beside state_dict()", planning.measure, arms=PEERS),
    "witness": Part("what the page witness adds to save() and to the next step", witness.measure),
    "verdict": Part("how long a checkpoint waits for a verdict, and how many do", verdict.measure),
    "models": Part("over model size (DataStates-LLM, fig. 7-9)", papers.over_models),
    "interval": Part("over the checkpoint interval (DataStates-LLM, fig. 13)", papers.over_interval),
    "phases": Part("where the time goes (DataStates-LLM, table III)", papers.phases),
    "buffers": Part("over the I/O buffer, single and double (FastPersist, fig. 7)", papers.over_buffers),
    "accumulation": Part("over gradient accumulation (FastPersist, fig. 11)", papers.over_accumulation),
    "threads": Part("over copy threads, bf16 and fp32 (PCcheck, fig. 5-6)", papers.over_threads),
    "tensors": Part("over the number of tensors", growth.over_tensors),
    "sizes": Part("over the size of the state, and of one tensor (DataStates-LLM, fig. 14)", growth.over_sizes),
    "knobs": Part("over chunk size, ring and checkpoints in flight", growth.over_knobs),
}
