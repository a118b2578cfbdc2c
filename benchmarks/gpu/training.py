"""End to end: training on the GPU with a checkpoint at every step, over the same with none; one large checkpoint; where
the time of one goes (DataStates-LLM, table III).

In every round all arms and none take a turn each, in shuffled order; their ratios are of the same round.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import KINDS, NONE, Arm, ArmKind
from benchmarks.arms.base import fsync_tree
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.gpu.part import Part, main
from benchmarks.paired import median, ratios, rounds, spread
from benchmarks.report import Table
from benchmarks.train import WARM_UP_STEPS, durable_seconds, run_block
from benchmarks.workload import Training
from lazyckpt import CheckpointMetrics

STEPS = 3  # in a block
ROUNDS = 9  # at most
COMPUTE_OVER_DURABLE = 1.25  # the disk can just keep up
PROBE_BYTES = 512_000_000
SEQUENCES = {"cuda": 64, "cpu": 2}


def measure_pairs(part: Part) -> None:
    """Blocks of every arm, until the time is over."""
    state_bytes = part.fitting_bytes(in_memory=4, on_disk=6)
    # Of the time, half is for peers that are slower; three rounds are to fit into the rest.
    per_checkpoint_s = part.left_s / 2 / (3 * (len(part.arms) + 1) * STEPS) / COMPUTE_OVER_DURABLE
    rate = _durable_rate(part.directory, min(state_bytes, PROBE_BYTES))
    contest = Contest(part, int(min(state_bytes, rate * per_checkpoint_s)))
    try:
        order = [NONE.name, *part.arms]
        for names in [order, *rounds(order, ROUNDS - 1)]:
            for name in names:
                contest.turn(name)
                part.publish(contest.tables())
            if not contest.fits(NONE.name):
                break
        part.publish([*contest.tables(), *_breakdown(part, contest)])
    finally:
        contest.close()


class Contest:
    """The arms, the training job they share, and their blocks so far."""

    def __init__(self, part: Part, state_bytes: int) -> None:
        self._part = part
        self.training = Training(state_bytes, SEQUENCES[part.device.type], part.device)
        self.state_bytes = sum(t.nbytes for t in self.training.tensors().values())
        self.arms: dict[str, Arm] = {}
        self._failures: dict[str, str] = {}
        self._seconds: dict[str, list[float | None]] = {}  # of a block, by round; None: there was no time for it
        self._blocked_s: dict[str, list[float]] = {}
        self._longest_s: dict[str, float] = {}
        self._next_step = 1
        self._enter(NONE)
        self._enter(KINDS["lazyckpt"])
        if "lazyckpt" not in self.arms:
            raise RuntimeError(self._failures["lazyckpt"])
        self.durable_s = min(durable_seconds(self.arms["lazyckpt"], self._step()) for _ in range(2))
        self.compute_s = self._calibrate(COMPUTE_OVER_DURABLE * self.durable_s)

    def turn(self, name: str) -> None:
        """One block of an arm, if it is in and the time is enough. Peers come in at their first turn: what was measured
        before is out of danger."""
        if name not in self.arms and name not in self._failures:
            self._enter(KINDS[name])
        if name not in self.arms:
            return
        times = self._seconds.setdefault(name, [])
        if not self.fits(name):
            times.append(None)
            return
        start = time.monotonic()
        arm = self.arms[name]
        try:
            with time_limit(10 * self._longest_s[name] + 10):
                block = run_block(self.training, arm, STEPS, self._step(STEPS))
                arm.discard()
        except Exception as error:
            self._out(name, error)
            return
        os.sync()
        times.append(block.seconds)
        self._blocked_s.setdefault(name, []).append(sum(block.blocked_s) / STEPS)
        self._longest_s[name] = max(self._longest_s[name], time.monotonic() - start)

    def fits(self, name: str) -> bool:
        return self._part.left_s > 1.3 * self._longest_s[name] + 0.05 * self._part.seconds

    def tables(self) -> list[Table]:
        where = f"{self.state_bytes / 1e9:.2f} GB of AdamW state, {self._part.directory}"
        table = Table(
            f"Training on {self._part.device.type} with a checkpoint at every step ({where})",
            ["arm", "time over none", "blocked, ms", "times lazyckpt's", "blocks"],
        )
        nones = self._seconds.get(NONE.name, [])
        ours = median(self._blocked_s.get("lazyckpt", []))
        for name in self._part.arms:
            if name in self._failures:
                table.missing(name, self._failures[name])
                continue
            both = [
                (seconds, none)
                for seconds, none in zip(self._seconds.get(name, []), nones, strict=False)
                if seconds is not None and none is not None
            ]
            over_none = ratios([seconds for seconds, _ in both], [none for _, none in both])
            blocked = self._blocked_s.get(name, [])
            table.add(
                name,
                spread(over_none),
                spread([1e3 * s for s in blocked], 1),
                f"{median(blocked) / ours:.1f}" if blocked and ours > 0 else "-",
                str(self.blocks(name)),
            )
        table.notes += [
            f"A block is {STEPS} cycles of save, forward + backward ({self.compute_s:.2f} s, "
            f"{self.training.micro_batches} micro-batches of {self.training.sequences} sequences) and step, then drain "
            f"and sync. Computing lasts {COMPUTE_OVER_DURABLE} times as long as lazyckpt took to make one checkpoint "
            f"durable with nothing beside it ({self.durable_s:.2f} s).",
            "Blocked: the call, what it waits for, the wait before the optimizer begins; on the training stream of a "
            "GPU. Mean of a block, per checkpoint.",
        ]
        return [table]

    def blocks(self, name: str) -> int:
        return len(self._blocked_s.get(name, []))

    def close(self) -> None:
        for arm in self.arms.values():
            arm.close()

    def _enter(self, kind: ArmKind) -> None:
        """Makes an arm and lets it warm up; one that fails is out, with its reason."""
        if self._part.left_s < 0.2 * self._part.seconds and kind.name not in (NONE.name, "lazyckpt"):
            self._failures[kind.name] = "no time was left to warm it up"
            return
        directory = self._part.directory / kind.name
        directory.mkdir()
        try:
            with time_limit(max(30.0, self._part.left_s / 3)):
                arm = self.arms[kind.name] = kind.make(self.training, directory)
                start = time.monotonic()
                run_block(self.training, arm, WARM_UP_STEPS, self._step(WARM_UP_STEPS))
                arm.discard()
                self._longest_s[kind.name] = time.monotonic() - start
        except Exception as error:
            self._out(kind.name, error)
        os.sync()

    def _out(self, name: str, error: Exception) -> None:
        # The last line: peers with a child process put its whole traceback into the message.
        self._failures[name] = f"{type(error).__name__}: {error}".splitlines()[-1].strip()
        if (arm := self.arms.pop(name, None)) is not None:
            with contextlib.suppress(Exception), time_limit(10):
                arm.close()

    def _calibrate(self, compute_s: float) -> float:
        """Accumulates gradients for so long; returns the seconds it takes."""
        start = time.perf_counter()
        self.training.compute()
        self.training.micro_batches = max(1, round(compute_s / (time.perf_counter() - start)))
        start = time.perf_counter()
        self.training.compute()
        return time.perf_counter() - start

    def _step(self, count: int = 1) -> int:
        first, self._next_step = self._next_step, self._next_step + count
        return first


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread if it takes longer: a peer that hangs is out, and the others go on."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, stop)
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)
        signal.signal(signal.SIGALRM, handler)


def _durable_rate(directory: Path, nbytes: int) -> float:
    """Bytes a second that lazyckpt writes there, from the host."""
    import lazyckpt

    data = torch.rand(nbytes // 4)
    seconds = []
    for _ in range(2):  # the first makes the ring
        start = time.perf_counter()
        lazyckpt.save({"data": data}, directory / "probe.pt")
        seconds.append(time.perf_counter() - start)
    (directory / "probe.pt").unlink()
    return nbytes / min(seconds)


# where the time goes


def _breakdown(part: Part, contest: Contest) -> list[Table]:
    arm = contest.arms.get("lazyckpt")
    if not isinstance(arm, LazyCkpt) or not contest.blocks("lazyckpt"):
        return []
    while_computing = arm.metrics[-STEPS * contest.blocks("lazyckpt") :]
    table = Table("Breakdown of one checkpoint, seconds", ["operation", "torch.save", "lazyckpt"])
    theirs = _torch_save_breakdown(contest.training, part.directory / "breakdown")

    def ours(field: Callable[[CheckpointMetrics], float]) -> str:
        return f"{median([field(m) for m in while_computing]):.4f}"

    table.add("metadata, serialize", f"{theirs[0]:.4f}", ours(lambda m: m.plan_s))
    table.add("device -> host", f"{theirs[1]:.4f}", ours(lambda m: m.captured_s - m.plan_s))
    table.add("host -> file", f"{theirs[2]:.4f}", ours(lambda m: m.durable_s - m.captured_s))
    table.add("blocks training", f"{sum(theirs):.4f}", ours(lambda m: m.blocked_s))
    table.notes.append(
        "torch.save one after the other: tensors to the host, pickled into nothing, written and synced. lazyckpt: "
        f"medians of {len(while_computing)} checkpoints while training computes; device -> host has the checksums in "
        "it, host -> file is what comes after the last byte has been copied: most of the writing is done by then."
    )
    return [table]


class _Nothing:
    """A file that forgets."""

    def write(self, data: bytes) -> int:
        return len(data)

    def flush(self) -> None:
        pass


def _torch_save_breakdown(training: Training, directory: Path) -> tuple[float, float, float]:
    """Seconds to serialise, to copy to the host and to write, durably."""
    directory.mkdir()
    start = time.perf_counter()
    on_host = _to_host(training.state())
    copied = time.perf_counter()
    torch.save(on_host, _Nothing())  # type: ignore[arg-type]
    serialised = time.perf_counter()
    torch.save(on_host, directory / "state.pt")
    fsync_tree(directory)
    written = time.perf_counter()
    serialise_s = serialised - copied
    return serialise_s, copied - start, max(0.0, written - serialised - serialise_s)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_host(inner) for key, inner in value.items()}
    return value


def measure_large(part: Part) -> None:
    """One checkpoint of all that fits, while training computes."""
    state_bytes = part.fitting_bytes(in_memory=1.5, on_disk=1.2)
    training = Training(state_bytes, SEQUENCES[part.device.type], part.device)
    (part.directory / "large").mkdir()
    arm = LazyCkpt(training, part.directory / "large", ring=1.0, keep_last=1)
    table = Table(
        "One large checkpoint",
        ["state, GB", "blocked, ms", "captured, s", "durable, s", "GB/s to durable", "restored in place, s"],
    )
    try:
        training.micro_batches = 4
        training.compute()
        training.optimizer.step()  # seen to step, its state is lazy
        start = time.perf_counter()
        block = run_block(training, arm, 1, 1)
        run_s = time.perf_counter() - start
        metrics = arm.metrics[-1]
        table.add(
            f"{metrics.bytes / 1e9:.1f}",
            f"{1e3 * block.blocked_s[0]:.1f}",
            f"{metrics.captured_s:.2f}",
            f"{metrics.durable_s:.2f}",
            f"{metrics.bytes / metrics.durable_s / 1e9:.2f}",
            "-",
        )
        table.notes.append(
            f"To {part.directory}; the first save of its run: the ring is faulted in and pinned meanwhile "
            f"({run_s:.1f} s in all). Restored from there, with a warm cache."
        )
        part.publish([table])
        start = time.perf_counter()
        arm.restore()
        training.synchronize()
        table.rows[0][-1] = f"{time.perf_counter() - start:.2f}"
        part.publish([table])
    finally:
        arm.close()


if __name__ == "__main__":
    main({**dict.fromkeys(("pairs", "peers", "disk"), measure_pairs), "large": measure_large})
