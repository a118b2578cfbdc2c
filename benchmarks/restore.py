"""Restore: a checkpoint's bytes in parameters that live already, from a cold and from a warm page cache.

All arms of a table take turns in every round, in shuffled order. The raw read is the floor library's own loop over
lazyckpt's file: the same chunks, depth and O_DIRECT, into memory that is there. lazyckpt and torch.load read that file,
too; a disk is not equally fast everywhere, and safetensors and torch.distributed.checkpoint need files of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.disk import RAW, TENSORS, rates_table, timed
from benchmarks.floor import CHUNK_BYTES, Floor
from benchmarks.paired import Progress, interleaved
from benchmarks.report import Table
from benchmarks.settings import Settings


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    with Floor(4 * CHUNK_BYTES, copy_threads=0) as floor, _arms(settings, floor) as (arms, nbytes):
        for cache, prepare, how in (
            ("a cold", drop_caches, drop_caches()),
            ("a warm", os.sync, "every arm has read its file before; the raw read is from the disk all the same"),
        ):
            seconds, failures = interleaved(
                arms, settings.pairs, lambda text, cache=cache: progress(f"{cache} cache: {text}"), prepare=prepare
            )
            title = f"Restore of {nbytes / 1e9:.2f} GB into live parameters from {cache} page cache"
            table = rates_table(title, seconds, failures, nbytes)
            table.notes.append(f"Before each: {how}.")
            yield table


@contextmanager
def _arms(settings: Settings, floor: Floor) -> Iterator[tuple[dict[str, Callable[[], float]], int]]:
    """The Checkpointer stays, as the raw loop does: to fault the pages of a new ring in is no part of reading."""
    import lazyckpt

    sizes = [settings.disk_bytes // TENSORS // 4] * TENSORS
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(n, device=settings.device)) for n in sizes)
    expected = [parameter.detach().clone() for parameter in model]
    directory = settings.directory

    def timed_and_checked(read: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            with torch.no_grad():
                for parameter in model:
                    parameter.zero_()
            with timed() as elapsed:
                read()
                if settings.device.type == "cuda":
                    torch.cuda.synchronize(settings.device)
            if not all(map(torch.equal, model, expected)):
                raise ValueError("the parameters are not those that were saved")
            return elapsed[0]

        return seconds

    with lazyckpt.Checkpointer(directory / "checkpoints") as checkpointer:
        checkpointer.track(model=model)
        file = checkpointer.save(1, blocking=True).result() / "state.pt"
        arms: dict[str, Callable[[], float]] = {
            RAW: lambda: floor.raw_read(file),
            "lazyckpt restore": timed_and_checked(checkpointer.restore),
            "lazyckpt.load, copy": timed_and_checked(lambda: model.load_state_dict(lazyckpt.load(file)["model"])),
            "torch.load, copy": timed_and_checked(lambda: model.load_state_dict(torch.load(file)["model"])),
            "torch.load(mmap), copy": timed_and_checked(
                lambda: model.load_state_dict(torch.load(file, mmap=True)["model"])
            ),
            "safetensors load_file, copy": timed_and_checked(
                _if_installed(_safetensors, model, directory / "model.safetensors")
            ),
            "dcp load, in place": timed_and_checked(_dcp(model, directory / "dcp")),
        }
        yield arms, sum(t.nbytes for t in expected)


def _if_installed(
    make: Callable[[torch.nn.Module, Path], Callable[[], object]], model: torch.nn.Module, path: Path
) -> Callable[[], object]:
    try:
        return make(model, path)
    except ImportError as error:
        reason = str(error)

    def missing() -> object:
        raise ImportError(reason)

    return missing


def _safetensors(model: torch.nn.Module, path: Path) -> Callable[[], object]:
    from safetensors.torch import load_file, save_file

    save_file(model.state_dict(), path)
    return lambda: model.load_state_dict(load_file(path))


def _dcp(model: torch.nn.Module, path: Path) -> Callable[[], object]:
    from torch.distributed import checkpoint as dcp

    dcp.save(model.state_dict(), checkpoint_id=path)
    return lambda: dcp.load(model.state_dict(), checkpoint_id=path)


def drop_caches() -> str:
    """Empty the page cache; returns how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return "nothing (dropping the page cache needs root)"
    return "page cache dropped by /proc/sys/vm/drop_caches"
