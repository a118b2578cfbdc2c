"""How much memory the staging buffer may take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def available_memory_bytes() -> int:
    """Returns the memory that this process may still take.

    That is the free memory of the machine, within the limits of the process's cgroups and address space (``ulimit
    -v``)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        available = min(available, limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return max(min([available, *_cgroup_headroom_bytes()]), 0)


def _cgroup_headroom_bytes() -> Iterator[int]:
    """Yields the memory left in each cgroup above this process. The page cache counts as free, since the kernel gives
    it up."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                cache = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
                yield int((folder / limit).read_text()) - int((folder / usage).read_text()) + cache
            except (OSError, ValueError):
                pass  # no such limit here, or "max"
            if folder == root:
                break


def auto_ring_bytes(chunk_bytes: int) -> int:
    """Returns the most that ``host_buffer_bytes="auto"`` takes: a quarter of the memory available to this rank."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = available_memory_bytes() // 4 // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
    return max(share, 2 * chunk_bytes) // chunk_bytes * chunk_bytes
