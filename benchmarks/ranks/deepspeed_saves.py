"""What `save_checkpoint()` costs a DeepSpeed training: with DeepSpeed's own checkpoint engines, and with lazyckpt.

The ranks are gloo processes on this machine that train one GPT with ZeRO. All arms save the state of the same
DeepSpeedEngine: they take turns in every round, in shuffled order, and a sync before each leaves no write-back of one
to the next. A sample is a step, the call, and the steps behind it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.latency import TIMEOUT_S
from benchmarks.paired import ArmFailed, Progress, interleaved, median, ratios, spread
from benchmarks.ranks.member import Member, run_ranks
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.workload import VOCABULARY, Gpt, width_for

KINDS = tuple((stage, dtype) for stage in (1, 2, 3) for dtype in ("bf16", "fp32"))
TOKENS = 8  # of each rank in a step: training that a save of these sizes cannot hide behind, on two cores
STEPS = 2  # behind a save
OURS, UNTAGGED, TORCH = "lazyckpt", "lazyckpt, tag_validation Ignore", "torch engine"
WRITERS = {"Fast engine, python": "python", "Fast engine, fast": "fast"}
OWN_GOAL, CALL_GOAL, CALL_GOAL_BYTES = 20.0, 10.0, 1_000_000_000
IN_A_CLONE = os.path.join(sys.prefix, "deepspeed")  # tests/requirements-deepspeed.txt


@dataclass(frozen=True)
class Task:
    directory: Path  # empty, and the same for all ranks
    kinds: Sequence[tuple[int, str]]  # the ZeRO stage and the dtype
    state_bytes: int  # of AdamW, in fp32
    writers: Mapping[str, str]
    pairs: int


@dataclass(frozen=True)
class Save:
    """One checkpoint. Of ranks that differ, the slowest."""

    call_s: float
    own_s: float  # in the checkpoint engine, and the wait of the next step for copies
    step_s: float  # of the steps behind it, without that wait, on the mean
    plain_s: float  # of the step before it
    durable_s: float | None  # None: the engine syncs nothing
    eager_bytes: int | None  # of all ranks, if lazy


@dataclass(frozen=True)
class Case:
    kind: str
    nbytes: int  # of the files
    samples: dict[str, list[Save]]
    failures: dict[str, str]


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    for state_bytes in dict.fromkeys((settings.state_bytes // 5, settings.disk_bytes)):
        task = Task(settings.directory / str(state_bytes), KINDS, state_bytes, WRITERS, settings.pairs)
        yield _table(run_ranks(_save, settings.ranks, task, progress), state_bytes, settings)


class _ViewsAsBytes:
    """The one operator of DeepSpeed's UtilsBuilder that its fast writer calls. DeepSpeed has it for GPUs only."""

    def load(self) -> _ViewsAsBytes:
        return self

    def cast_to_byte_tensor(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return given if given.nbytes <= 1 else given.flatten().view(torch.uint8)
        return list(map(self.cast_to_byte_tensor, given))


def _save(member: Member, task: Task) -> tuple[list[Case], str]:
    """Also the version of DeepSpeed."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error"}
    os.environ |= {"CROSS_RANK": "0", "CROSS_SIZE": "1"}  # by DeepSpeed's launcher; its Fast engine reads them
    if "fast" in task.writers.values():
        os.environ["DS_PIN_MEMORY_BACKEND"] = "native"  # the only one for CPUs
    if IN_A_CLONE not in sys.path:
        sys.path.append(IN_A_CLONE)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile it
    if "fast" in task.writers.values():
        sys.modules["deepspeed.io.fast_file_writer"].UtilsBuilder = _ViewsAsBytes
    cases = []
    for stage, dtype in task.kinds:
        contest = Contest(member, task, stage, dtype)
        try:
            cases.append(contest.run())
        finally:
            contest.close()
    return cases, deepspeed.__version__


class Contest:
    """One DeepSpeedEngine, and the checkpoint engines that save it in turns."""

    def __init__(self, member: Member, task: Task, stage: int, dtype: str) -> None:
        import deepspeed

        from lazyckpt.integrations.deepspeed import enable

        self._member, self._task = member, task
        self._kind = f"ZeRO {stage}, {dtype}"
        self._number = 0
        torch.manual_seed(0)
        model = Gpt(width_for(task.state_bytes, torch.float32))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": dtype == "bf16"},
        }
        self._engine: Any = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self._step()
        self._failures: dict[str, str] = {}
        self._engines: dict[str, Any] = {TORCH: self._engine.checkpoint_engine}
        self._saves_model = dict.fromkeys([TORCH, OURS, UNTAGGED], self._engine.save_non_zero_checkpoint)
        for name, writer in task.writers.items():
            try:
                self._engines[name] = member.together(partial(self._fast, writer))
                self._saves_model[name] = self._engine.save_non_zero_checkpoint
            except ArmFailed as failed:
                self._failures[name] = str(failed)
        self._engine.checkpoint_engine = self._engines[TORCH]
        self._ours = self._engines[OURS] = self._engines[UNTAGGED] = enable(self._engine)
        for engine in {id(engine): engine for engine in self._engines.values()}.values():
            engine.save = self._timed(engine.save)
        self._ours.save_checkpoint = self._timed_around(self._ours.save_checkpoint)
        self._own_s = 0.0
        self._nbytes = 0

    def run(self) -> Case:
        arms = {name: partial(self._sample, name) for name in self._engines}
        tell = partial(self._tell, self._member.tell)
        samples, failures = interleaved(arms, self._task.pairs, tell)
        return Case(self._kind, self._nbytes, samples, self._failures | failures)

    def close(self) -> None:
        self._ours.cleanup()
        self._engine.destroy()

    def _tell(self, tell: Progress, text: str) -> None:
        tell(f"{self._kind}, {text}")

    def _fast(self, writer: str) -> Any:
        """DeepSpeed's FastCheckpointEngine, as the JSON `"checkpoint": {"writer": …}` makes it."""
        from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config

        config = self._engine._config
        before, config.checkpoint_config = (
            config.checkpoint_config,
            get_checkpoint_config({"checkpoint": {"writer": {"type": writer, "data_parallel": "replica"}}}),
        )
        try:
            self._engine._configure_checkpointing()
        finally:
            config.checkpoint_config = before
        return self._engine.checkpoint_engine

    def _timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return save(*args, **kwargs)
            finally:
                self._own_s += time.perf_counter() - start

        return timed

    def _timed_around(self, save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Of lazyckpt's `save_checkpoint`, which calls DeepSpeed's."""

        def timed(write: Callable[[], Any]) -> Any:
            def timed_write() -> Any:
                start = time.perf_counter()
                try:
                    return write()
                finally:
                    self._own_s -= time.perf_counter() - start

            return self._timed(save_checkpoint)(timed_write)

        return timed

    def _sample(self, name: str) -> Save:
        folder = self._task.directory / "deepspeed"
        self._engine.checkpoint_engine = self._engines[name]
        self._engine.save_non_zero_checkpoint = self._saves_model[name]
        self._engine._config.checkpoint_tag_validation_enabled = name != UNTAGGED
        self._number += 1
        if self._member.rank == 0:
            os.sync()
        self._member.barrier()
        plain_s = self._step()
        save = self._member.together(lambda: self._saved(str(folder), plain_s))
        slowest = [max(times) for times in zip(*self._member.gather(save[:4]), strict=True)]
        durable_s, eager_bytes = zip(*self._member.gather(save[4:]), strict=True)
        tag = folder / f"step{self._number}"
        self._nbytes = sum(path.stat().st_size for path in tag.glob("*_states.pt*"))
        self._member.barrier()
        if self._member.rank == 0:
            shutil.rmtree(tag)
        lazy = self._engines[name] is self._ours
        return Save(*slowest, max(durable_s) if lazy else None, sum(eager_bytes) if lazy else None)

    def _saved(self, folder: str, plain_s: float) -> tuple[float, float, float, float, float, int]:
        """The fields of a Save, of this rank."""
        self._own_s = 0.0
        start = time.perf_counter()
        self._engine.save_checkpoint(folder, tag=f"step{self._number}")
        call_s = time.perf_counter() - start
        step_s = fmean([self._step() for _ in range(STEPS)])
        if self._engine.checkpoint_engine is not self._ours:
            return call_s, self._own_s, step_s, plain_s, 0.0, 0
        handle = self._ours.last_save
        handle.result(timeout=TIMEOUT_S)
        metrics = handle.metrics
        gate_s = metrics.gate_blocked_s
        return call_s, self._own_s + gate_s, step_s - gate_s / STEPS, plain_s, metrics.durable_s, metrics.eager_bytes

    def _step(self) -> float:
        """Takes a training step; returns its seconds."""
        start = time.perf_counter()
        tokens = torch.randint(VOCABULARY, (1, TOKENS + 1))
        loss = self._engine(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(loss.flatten(0, 1), tokens[:, 1:].flatten())
        self._engine.backward(loss)
        self._engine.step()
        return time.perf_counter() - start


def _table(told: tuple[list[Case], str], state_bytes: int, settings: Settings) -> Table:
    cases, version = told
    table = Table(
        f"save_checkpoint() of {state_bytes / 1e9:.2f} GB of AdamW state on {settings.ranks} ranks",
        [
            "ZeRO, engine",
            "GB",
            "call, ms",
            "torch ÷ it",
            "own, ms",
            "torch ÷ it",
            "step",
            "durable, s",
            "eager, MB",
            "goal",
        ],
    )
    for case in cases:
        torchs = case.samples[TORCH]
        for name in dict.fromkeys([*case.samples, *case.failures]):
            if name in case.failures:
                table.missing(f"{case.kind}: {name}", case.failures[name])
                continue
            saves = case.samples[name]
            call_over = ratios([save.call_s for save in torchs], [save.call_s for save in saves])
            own_over = ratios([save.own_s for save in torchs], [save.own_s for save in saves])
            durable = [save.durable_s for save in saves if save.durable_s is not None]
            eager = [save.eager_bytes for save in saves if save.eager_bytes is not None]
            table.add(
                f"{case.kind}: {name}",
                f"{case.nbytes / 1e9:.2f}",
                spread([1e3 * save.call_s for save in saves], 1),
                spread(call_over, 1),
                spread([1e3 * save.own_s for save in saves], 1),
                spread(own_over, 1),
                spread([save.step_s / save.plain_s for save in saves]),
                spread(durable),
                f"{median(eager) / 1e6:.2f}" if eager else "-",
                _goal(median(call_over), median(own_over), case.nbytes) if eager else "-",
            )
    table.notes += [
        f"DeepSpeed {version}, {settings.pairs} rounds; of the ranks, the slowest. Call: `save_checkpoint()`. Own: the "
        "part of it in the checkpoint engine, not in DeepSpeed's barriers and state_dicts; with lazyckpt also what the "
        "next step waited for copies.",
        f"Step: the {STEPS} steps behind the call, without that wait, over the step before it. Durable: from the call "
        "on. The torch engine and the python writer sync nothing, so they leave the disk's time to the kernel.",
    ]
    return table


def _goal(call: float, own: float, nbytes: int) -> str:
    goals = [("own", own, OWN_GOAL)]
    if nbytes >= CALL_GOAL_BYTES:
        goals.append(("call", call, CALL_GOAL))
    return ", ".join(f"{name} ≥ {goal:g}: {'met' if found >= goal else 'missed'}" for name, found, goal in goals)
