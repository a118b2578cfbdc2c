"""What each figure of the day should be on an H100 SXM, and what refutes a claim of the documents."""

from __future__ import annotations

from dataclasses import dataclass

NO_LIMIT = float("inf")


@dataclass(frozen=True)
class Expected:
    what: str
    expected: str
    low: float = 0.0  # outside of low..high the claim is refuted
    high: float = NO_LIMIT
    refutes: str = ""  # what a failure means; empty: the sentence itself is wrong

    @property
    def is_exact(self) -> bool:
        """Whether the figure also holds on a CPU: figures of correctness do, figures of speed do not."""
        return self.low == self.high

    def verdict(self, value: float) -> str:
        return "ok" if self.low <= value <= self.high else "REFUTED"


YES = "1"
EXPECTED = {
    # right
    "bits": Expected("five saves hold the right bits, a step right behind each", YES, 1, 1),
    "restored": Expected("restored bits are right", YES, 1, 1),
    "torn": Expected("eager bytes torn by a side stream after wait_captured()", "0", 0, 0),
    "pinned": Expected("the ring is pinned", YES, 1, 1, "pinning is refused here; copies pass the small buffer"),
    "batched": Expected("the driver takes batches", YES, 1, 1, "doctor says why; small tensors go one by one"),
    "first save": Expected("first save blocks, ms (buffer prepared after the first step)", "10-60", high=150),
    "save": Expected("later saves block, ms (8,000 storages)", "15-50", high=60),
    "step": Expected("the step behind them takes the host, ms", "5-25", high=40, refutes="the driver's queue is full"),
    "eager": Expected("eager share of the bytes", "< 0.1", high=0.1),
    "restore many": Expected("restore in place of 8,000 storages, ms", "50-300", high=600),
    "launch": Expected("slowest launch with nothing beside it, ms", "< 1", high=5, refutes="the machine, not lazyckpt"),
    "launch pinning": Expected("slowest launch while 4 GiB are pinned, ms", "2-12", high=20),
    "fork": Expected("fork with 4 GiB pinned, ms", "1-30", high=100),
    "close": Expected("close() beside 0.3 s of work, ms", "350-800", high=2000),
    "passed": Expected("tests passed", "all", 1),
    "failed": Expected("tests failed", "0", 0, 0),
    "peak": Expected("pinned copies by torch, GB/s", "50-56", 45, 60, "the virtual machine, not lazyckpt"),
    "engine": Expected("the engine over that, %", "95-100", 93, 110),
    "checksummed": Expected("with CRC by 2 threads, GB/s", "19-23", 15),
    "item": Expected(".item() beside copies, slowest, ms", "0.5-1.5", high=3),
    # fast
    "tmpfs": Expected("training with a save at every step over none, tmpfs", "0.98-1.05", high=1.06),
    "disk": Expected("the same on the disk", "1.00-1.08", high=1.1),
    "blocked": Expected("one save of 400 tensors blocks, ms", "4-9", high=12),
    "dcp": Expected("DCP async with a reused stager over none", "1.1-1.6", refutes="say so where it is below ours"),
    "dcp blocked": Expected("DCP async blocks, times lazyckpt's", "2-10", 1),
    "torch.save": Expected("torch.save and fsync over none", "2-4", 1),
    "torch.save blocked": Expected("torch.save blocks, times lazyckpt's", "100-300", 50),
    "large": Expected("the first save of 24 GB blocks, ms", "500-2000", high=2500, refutes="the warm-up is useless"),
    "restore": Expected("restore in place, % of the raw disk", "92-100", 88, 115),
}
