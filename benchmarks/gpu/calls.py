"""The two calls of the day: one checks that copies are right, one measures how fast they are."""

from __future__ import annotations

import sys

from benchmarks.gpu.stages import Day, number

REAL, TRAINING = "tests/gpu/test_real.py::test_", "tests/gpu/test_training.py::test_"
CORE = (  # the most telling first
    TRAINING + "after_a_wait_on_the_host_any_stream_may_write",
    REAL + "without_the_gate_checkpoints_are_torn",
    REAL + "a_thousand_steps_right_after_a_save",
    TRAINING + "a_step_right_after_every_save",
    REAL + "the_device_waits_and_not_the_host",
    REAL + "copies_overlap_with_computing",
    REAL + "the_training_stream_does_not_wait_for_lazy_copies",
    REAL + "a_graph_is_captured_while_copies_are_under_way",
    TRAINING + "a_forked_child_leaves_the_device_alone",
    REAL + "load_straight_to_the_device",
    REAL + "restore_of_many_small_tensors",
    REAL + "nothing_is_allocated_on_the_device",
    REAL + "smaller_copies_and_views_take_no_memory_of_the_device",
    TRAINING + "steps_of_a_graph_that_is_gated_are_lazy",
    TRAINING + "a_ring_that_cannot_be_pinned",
)
PROCESSES = ("tests/gpu/test_process.py",)
REST = ("tests/gpu/test_training.py",)
NOT_AGAIN = "".join(f" and not {test.rpartition('::test_')[2]}" for test in CORE if test.startswith(TRAINING))
COMPILED = " and not compiled"  # minutes of a compiler, after all others
PEERS = "lazyckpt,dcp-async-thread,torch.save,torch_checkpointing"
FACTS = """nvidia-smi; nvidia-smi -q | grep -iE 'cc mode|confidential|link gen|link width|addressing' | sort -u
free -g; ulimit -l; df -h /dev/shm /tmp .; lscpu | grep -E 'Model name|NUMA'; git rev-parse HEAD
cat /sys/kernel/mm/transparent_hugepage/enabled; {python} -m lazyckpt doctor {folder}"""


def right(day: Day) -> None:
    day.stage("facts", 40, ["sh", "-c", FACTS.format(python=sys.executable, folder=day.tmpfs)])
    tables = day.part("smoke", "bits", 25, 1, day.tmpfs)
    for key in ("bits", "restored", "pinned", "batched", "first save", "save", "step", "eager", "restore many"):
        day.check(key, number(tables, key, "value"))
    tables = day.part("smoke", "waits", 25, 1, day.tmpfs)
    for key in ("torn", "launch", "launch pinning", "fork", "close"):
        day.check(key, number(tables, key, "value"))
    day.tests("core", 150, CORE)
    day.tests("processes", 100, PROCESSES)
    tables = day.part("copies", "peak", 30, 4, day.tmpfs)
    day.check("peak", number(tables, "torch, pinned", "GB/s"))
    day.check("engine", number(tables, "lazyckpt", "of the peak"))
    day.check("checksummed", number(tables, "lazyckpt, and checksummed", "GB/s"))
    day.check("item", number(tables, "lazyckpt copies", "slowest"))
    day.tests("rest", 90, REST, NOT_AGAIN + COMPILED)
    day.tests("compiled", 90, REST, " and compiled")


def fast(day: Day) -> None:
    tables = day.part("training", "pairs", 65, 4, day.tmpfs)
    day.check("tmpfs", number(tables, "lazyckpt", "time over none"))
    day.check("blocked", number(tables, "lazyckpt", "blocked, ms"))
    tables = day.part("training", "peers", 105, 4, day.tmpfs, PEERS)
    for key, peer in (("dcp", "dcp-async-thread"), ("torch.save", "torch.save")):
        day.check(key, number(tables, peer, "time over none"))
        day.check(f"{key} blocked", number(tables, peer, "times lazyckpt's"))
    tables = day.part("training", "disk", 40, 2, day.disk, "lazyckpt,torch.save")
    day.check("disk", number(tables, "lazyckpt", "time over none"))
    tables = day.part("training", "large", 30, 24, day.tmpfs)
    rows = tables[0]["rows"] if tables else []
    day.check("large", float(rows[0][1]) if rows else None)
    tables = day.part("restore", "restore", 25, 6, day.disk)
    day.check("restore", number(tables, "lazyckpt restore, in place", "of the disk"))


CALLS = {"right": right, "fast": fast}
