"""``lazyckpt bench``: measures a disk, and predicts the time of a checkpoint on it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

from lazyckpt.cli.output import columns, print_json, progress, say, show
from lazyckpt.cli.parameters import AsJson, path_argument
from lazyckpt.tools.units import count, duration, plain, size

_SIZES = (10**9, 10**10, 10**11)  # bytes of the checkpoints to predict


def bench(
    directory: Annotated[Path, path_argument("[DIR]", "Where checkpoints will go.")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """Measure this disk and what lazyckpt reaches of it; predict how long a checkpoint takes.

    Raw is the disk's ceiling: a file written or read past the page cache (O_DIRECT), eight requests of 8 MiB at once,
    without copies or checksums. Writes end when they are durable. A restore reads into existing tensors, as
    Checkpointer.restore() does. lazyckpt.load allocates memory, which the system must find and clear.

    Takes some seconds, and removes what it wrote.
    """
    from lazyckpt.tools import bench as tool  # imports torch, which takes seconds

    with progress() as report:
        found = tool.bench(directory, report)
    keys = {"durable_s": tool.WRITE, "restored_s": tool.RESTORE, "loaded_s": tool.LOAD}
    expected = [
        {"bytes": nbytes, **{key: nbytes / found.median[way] for key, way in keys.items()}} for nbytes in _SIZES
    ]
    if as_json:
        about: dict[str, Any] = {"directory": directory, "o_direct": found.o_direct, "bytes": found.bytes}
        about["bytes_per_s"] = {
            way: {"median": found.median[way], "all": all_} for way, all_ in found.bytes_per_s.items()
        }
        print_json(about | {"expected": expected})
        return
    rounds = count(len(found.bytes_per_s[tool.WRITE]), "round")
    say((plain(directory), "bold"), f"  {rounds} of {size(found.bytes)}")
    if not found.o_direct:
        say(("no O_DIRECT here: everything uses the page cache, and reads come from memory", "yellow"))
    table = columns("", "median", "least", "most", "of raw", right=("median", "least", "most", "of raw"))
    for way, raw in tool.RAW_OF.items():
        rates = found.bytes_per_s[way]
        share = statistics.median(ours / theirs for ours, theirs in zip(rates, found.bytes_per_s[raw], strict=True))
        numbers = [f"{rate / 1e9:.2f} GB/s" for rate in (found.median[way], min(rates), max(rates))]
        table.add_row(way, *numbers, f"{share:.0%}" if way != raw else "")
    show(table)
    for seconds in expected:
        told = ", ".join(f"{key.removesuffix('_s')} in {duration(seconds[key])}" for key in keys)
        say(f"a checkpoint of {seconds['bytes'] // 10**9} GB: {told}")
