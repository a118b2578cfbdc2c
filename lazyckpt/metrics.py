"""Where the time of a checkpoint went (DataStates-LLM, table III)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

PLAN_PHASES = ("gather_s", "decide_s", "layout_s", "watch_s", "eager_copy_s", "hand_over_s")  # their sum is plan_s


class ChunkEvent(NamedTuple):
    """One chunk of a checkpoint on its way; times in seconds since the engine was given the checkpoint."""

    file: int
    offset: int
    nbytes: int
    copy_begin_s: float
    copy_end_s: float
    write_begin_s: float
    write_end_s: float
    ring_wait_s: float
    """The wait for room in the ring before its copy."""


@dataclass
class CheckpointMetrics:
    """The breakdown of one checkpoint. Final when its handle is done and the optimizer has stepped since;
    docs/metrics.md says how to read it.

    ``bytes`` is what this process wrote; ``copied_bytes``, the bytes of tensors that it copied for that;
    ``eager_bytes``, what ``save()`` copied before it returned.

    What the training thread waited for:

    - ``in_flight_wait_s``: save() waited because ``max_in_flight`` checkpoints were not durable yet
    - ``plan_s``: save() walked the state, pickled what changed, laid the file out
    - ``eager_wait_s``: save() waited for the eager bytes for which the buffer had no room
    - ``save_blocked_s``: all of save(), the three above included
    - ``gate_blocked_s``: the optimizer steps that followed waited for copies (or, with
      ``durability="before_step"``, for the disk)

    The phases of ``plan_s``, which is their sum:

    - ``gather_s``: collected the tensors of the state, pickled the rest
    - ``decide_s``: decided which storages are lazy
    - ``layout_s``: laid the files out and cut them into chunks
    - ``watch_s``: had the kernel watch the pages of lazy storages
    - ``eager_copy_s``: copied the eager bytes for which the buffer had room
    - ``hand_over_s``: registered the snapshot at the gate, gave the save to the background

    What happened in the background, in seconds since save() was called:

    - ``captured_s``: the last byte was copied; nothing reads the training state any more
    - ``written_s``: the last byte was written
    - ``synced_s``: fdatasync of all files returned
    - ``durable_s``: the folder had its final name and that was durable

    Parts of that: in ``readback_s`` the files were read back (0 without ``verify_after_write``). In ``verdict_s``, with
    everything else done, it waited until lazyckpt knew that nothing had written to lazily copied state (0 with a page
    witness; see docs/consistency.md).

    How busy it was: ``copy_s`` is time spent copying, all threads added; ``ring_wait_s`` the time in which there was
    something to copy but no room in the ring; ``write_s`` from the first write to the last; ``commit_s`` from
    the last write to durable.
    """

    step: int | None = None
    bytes: int = 0
    copied_bytes: int = 0
    eager_bytes: int = 0
    storages: int = 0
    chunks: int = 0

    in_flight_wait_s: float = 0.0
    plan_s: float = 0.0
    gather_s: float = 0.0
    decide_s: float = 0.0
    layout_s: float = 0.0
    watch_s: float = 0.0
    eager_copy_s: float = 0.0
    hand_over_s: float = 0.0
    eager_wait_s: float = 0.0
    save_blocked_s: float = 0.0
    gate_blocked_s: float = 0.0

    captured_s: float = 0.0
    written_s: float = 0.0
    synced_s: float = 0.0
    durable_s: float = 0.0
    readback_s: float = 0.0
    verdict_s: float = 0.0

    copy_s: float = 0.0
    ring_wait_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0

    timeline: list[ChunkEvent] = field(default_factory=list, repr=False)

    @property
    def blocked_s(self) -> float:
        """All that this checkpoint kept the training thread waiting."""
        return self.save_blocked_s + self.gate_blocked_s
