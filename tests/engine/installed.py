"""Uses lazyckpt as it is installed, in the current folder, and prints whether io_uring writes."""

import pathlib
import sys

import torch

import lazyckpt
import lazyckpt.integrations
from lazyckpt import _engine

assert pathlib.Path(lazyckpt.__file__).is_relative_to(sys.prefix), lazyckpt.__file__
assert pathlib.Path(_engine.__file__).is_relative_to(sys.prefix), _engine.__file__
assert _engine.FAULTS is False
try:
    _engine.Engine(ring_bytes=8192, chunk_bytes=4096, io_depth=1, copy_threads=1, fault="write:1:EIO")
except OSError as error:
    assert "fault" in str(error)
else:
    raise AssertionError("a release build injects faults")
lazyckpt.save({"x": torch.arange(100_000)}, "a.pt")
assert torch.equal(lazyckpt.load("a.pt")["x"], torch.arange(100_000))
assert torch.equal(torch.load("a.pt")["x"], torch.arange(100_000))
model = torch.nn.Linear(300, 300)
with lazyckpt.Checkpointer("run") as checkpointer:
    checkpointer.track(model=model)
    checkpointer.save(1)
with lazyckpt.Checkpointer("run") as checkpointer:
    checkpointer.track(model=model)
    assert checkpointer.restore() == 1
print("works", _engine.probe(".")["io_uring"])
