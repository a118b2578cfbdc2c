"""Saves with too little memory: ``python saves.py FOLDER``, with scarce.cc preloaded; forks for each line of its input.

A line is the number of the first allocation that fails, and how many do, counted from where ``save()`` is called until
its handle is done. The answer is a JSON object: ``outcome``, what was told and where; ``allocations``, how many there
were; ``error``, its text. Whoever gets none learns the exit code of the child.

Each child trains, saves step 1, steps, saves step 2 with too little memory, steps, and saves step 3 with enough.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # optimizers would import it, a second for each child

import lazyckpt
from lazyckpt.catalog import Catalog

LIMIT_S = 10  # of a save
LOST = "lost by concurrent.futures"
libc = ctypes.CDLL(None)
libc.scarce_seen.restype = ctypes.c_long


def trial(folder: Path, first: int, count: int) -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    saved: dict[int, torch.Tensor] = {}

    def step(number: int) -> None:
        model(torch.ones(1, 64)).square().sum().backward()
        optimizer.step()
        saved[number] = model[0].weight.detach().clone()

    answer: dict[str, Any] = {}
    with lazyckpt.Checkpointer(folder, host_buffer_bytes=1 << 16, chunk_bytes=1 << 14) as checkpointer:
        checkpointer.track(model=model, optimizer=optimizer)
        step(1)
        checkpointer.save(1).result(LIMIT_S)
        step(2)
        where = "save"
        error: BaseException | None = None
        libc.scarce_arm(ctypes.c_long(first), ctypes.c_long(count))
        try:
            handle = checkpointer.save(2)
            where = "handle"
            handle.add_done_callback(lambda _: libc.scarce_stop())
            handle.result(LIMIT_S)
        except (lazyckpt.LazyCkptError, MemoryError) as caught:
            error = caught
        libc.scarce_stop()
        answer["allocations"] = libc.scarce_seen()
        if error is None:
            answer["outcome"] = "saved"
        else:
            answer |= {"outcome": f"{type(error).__name__} of {where}", "error": str(error)}
            if isinstance(error, lazyckpt.SaveError):
                assert error.step == 2 and error.path == folder / "step-00000002", "an error without its place"
        step(3)  # training goes on
        try:
            checkpointer.save(3).result(LIMIT_S)
        except lazyckpt.SaveError as told:  # what save() was not able to say itself
            assert "step 2" in str(told), f"another error than that of step 2: {told}"
            answer["outcome"] += ", told by the next"
            checkpointer.save(3).result(LIMIT_S)
        checkpointer._saver.drain()
        assert checkpointer._saver.engine.ring_used_bytes == 0, "the staging buffer is held"
    check(folder, saved, error is None)
    return answer


def check(folder: Path, saved: dict[int, torch.Tensor], acknowledged: bool) -> None:
    catalog = Catalog(folder)
    found = {c.step: c.path for c in catalog.scan()}
    assert not catalog.broken, "something half has a final name"
    assert found.keys() >= ({1, 2, 3} if acknowledged else {1, 3}), f"lost: only {sorted(found)} are there"
    for step, path in found.items():
        assert torch.equal(lazyckpt.load(path)["model"]["0.weight"], saved[step]), f"step {step} is wrong"


def lost(write: int) -> NoReturn:
    """A thread of ThreadPoolExecutor has had no memory for its own bookkeeping: it drops the task that it has taken,
    and whoever waits for that waits for ever."""
    os.write(write, json.dumps({"outcome": LOST}).encode())
    os._exit(0)


def main(root: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for number, line in enumerate(sys.stdin):
        first, count = map(int, line.split())
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            logging.getLogger("concurrent.futures").addFilter(
                lambda _, write=write: lost(write)
            )  # it says so, if it can
            threading.excepthook = lambda _, write=write: lost(write)
            faulthandler.enable()
            faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)  # whoever waits for ever
            try:
                answer = trial(root / str(number), first, count)
            except BaseException as error:
                answer = {"outcome": "broken", "error": "".join(traceback.format_exception(error))}
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # The exit code of the watchdog is 1: a lock, say, that Condition.__enter__ has taken and did not return.
        died = {"outcome": LOST if code == 1 else "died", "error": f"exit code {code}"}
        print(text or json.dumps(died), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
