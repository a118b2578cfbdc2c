"""Saves with too little memory: ``python saves.py FOLDER``, with scarce.cc preloaded; forks for each line of its input.

A line is the number of the first allocation that fails, and how many do, counted from where ``save()`` is called until
its handle is done; "all", or "engine" where only those of the engine's threads count; the I/O backend. The answer is a
JSON object: ``outcome``, what was told and where; ``allocations``, how many there were; ``error``, its text. Whoever
gets none learns the exit code of the child.

Each child trains, saves step 1, steps, saves step 2 with too little memory, steps, and saves step 3 with enough.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import scarce
import torch
import torch._dynamo  # optimizers would import it, a second for each child

import lazyckpt
from lazyckpt.capture.gate import gate
from lazyckpt.pipeline.handle import in_flight
from lazyckpt.storage.catalog import Catalog

LIMIT_S = 10  # of a save
ERRORS = (MemoryError, RuntimeError)  # LazyCkptError is one, too
NO_LOCK = ("can't allocate lock", "cannot release un-acquired lock")


def stop(_: Any) -> None:
    scarce.stop()


def trial(folder: Path, first: int, count: int, threads: str, backend: str) -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    saved: dict[int, torch.Tensor] = {}

    def step(number: int) -> None:
        model(torch.ones(1, 64)).square().sum().backward()
        optimizer.step()
        saved[number] = model[0].weight.detach().clone()

    answer: dict[str, Any] = {}
    small = {"host_buffer_bytes": 1 << 16, "chunk_bytes": 1 << 12}
    with lazyckpt.Checkpointer(folder, **small, io_backend=backend) as checkpointer:
        checkpointer.track(model=model, optimizer=optimizer)
        step(1)
        checkpointer.save(1).result(LIMIT_S)
        step(2)
        where = "save"
        error: BaseException | None = None
        open_files = scarce.open_files()
        scarce.arm(first, count, threads)
        try:
            handle = checkpointer.save(2)
            where = "handle"
            handle.add_done_callback(stop)
            handle.result(LIMIT_S)
        except ERRORS as caught:  # there may still be no memory here, not even to make this tuple
            error = caught
        scarce.stop()
        if type(error) is RuntimeError:
            assert str(error) in NO_LOCK, f"another error: {error}"
        if where == "handle":
            handle.exception(LIMIT_S)  # is done, whatever was said above
        answer["allocations"] = scarce.seen()
        acknowledged = error is None
        if acknowledged:
            answer["outcome"] = "saved"
        else:
            answer |= {"outcome": f"{type(error).__name__} of {where}", "error": str(error)}
            if isinstance(error, lazyckpt.SaveError):
                assert error.step == 2 and error.path == folder / "step-00000002", "an error without its place"
        handle = error = None  # they hold frames, and these what was open
        step(3)  # training goes on
        try:
            checkpointer.save(3).result(LIMIT_S)
        except lazyckpt.SaveError as told:  # what save() was not able to say itself
            assert "step 2" in str(told), f"another error than that of step 2: {told}"
            answer["outcome"] += ", told by the next"
            checkpointer.save(3).result(LIMIT_S)
        checkpointer._saver.drain()
        gc.collect()
        assert checkpointer._saver.engine.ring_used_bytes == 0, "the staging buffer is held"
        assert not in_flight and not gate._pending, "something of the save that failed is kept"
        if count == 1:  # of several, one may have been for Python to close a file that it could not make an object of
            assert scarce.open_files() == open_files, f"left open, of {scarce.open_files()}"
    check(folder, saved, acknowledged)
    return answer


def check(folder: Path, saved: dict[int, torch.Tensor], acknowledged: bool) -> None:
    catalog = Catalog(folder)
    found = {c.step: c.path for c in catalog.scan()}
    assert not catalog.broken, "something half has a final name"
    assert found.keys() >= ({1, 2, 3} if acknowledged else {1, 3}), f"lost: only {sorted(found)} are there"
    for step, path in found.items():
        assert torch.equal(lazyckpt.load(path)["model"]["0.weight"], saved[step]), f"step {step} is wrong"


def main(root: Path) -> None:
    torch.set_num_threads(1)
    torch.frombuffer = scarce.spared(torch.frombuffer)  # ends the process otherwise
    warnings.simplefilter("ignore")
    for number, line in enumerate(sys.stdin):
        first, count, threads, backend = line.split()
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            faulthandler.enable()
            faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)  # whoever waits for ever
            try:
                answer = trial(root / str(number), int(first), int(count), threads, backend)
            except BaseException as error:
                answer = {"outcome": "broken", "error": "".join(traceback.format_exception(error))}
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # That of the watchdog is 1.
        print(text or json.dumps({"outcome": "died", "error": f"exit code {code}"}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
