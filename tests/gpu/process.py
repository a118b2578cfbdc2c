"""A training in a process of its own, for test_process.py: python process.py DEVICE FOLDER ALLOCATOR [END]

It steps right after every save and checks each file. With END it begins one more save, into end.pt beside expected.pt,
and ends in that way while the device is busy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import lazyckpt
from gpu.machines import Real, Training, save_at_every_step


def main() -> None:
    device, folder, allocator, *end = sys.argv[1:]
    training = Training(Real(torch.device(device)))
    if device == "cuda":
        assert torch.cuda.get_allocator_backend() == allocator
    save_at_every_step(training, 4, Path(folder))
    print("right", flush=True)
    if not end:
        return
    saver = lazyckpt.Saver()
    torch.save(training.state(), Path(folder, "expected.pt"))
    training.machine.keep_busy()
    saver.save(training.state(), Path(folder, "end.pt"))
    if end == ["sys.exit()"]:
        sys.exit()
    if end == ["an exception"]:
        raise RuntimeError("the end")
    if end == ["os._exit()"]:
        os._exit(0)
    training.step()


if __name__ == "__main__":
    main()
