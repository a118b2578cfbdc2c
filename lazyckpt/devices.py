"""Asks torch about devices, for the engine: where bytes are, and which streams their copies must follow.

The engine copies from host memory and from CUDA devices. torch copies the rest to the host: memory of other devices
(mps, xpu), and CUDA memory where the engine finds no driver.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable
from typing import Any

import torch

from lazyckpt import _engine

HOST = -1
ELSEWHERE = -2

data_ptr = torch.UntypedStorage.data_ptr


def locate(
    storages: Iterable[torch.UntypedStorage], where: list[torch.device], engine: _engine.Engine
) -> list[int] | None:
    """Returns the CUDA device of each storage, attached to ``engine``, or HOST or ELSEWHERE; None if all are in host
    memory.

    ``where`` is the device of each: asking the storages takes six times as long as all of this. Raises OSError if a
    device cannot be attached.
    """
    numbers = {}
    for device in set(where):
        if device.type == "cpu":
            numbers[device] = HOST
        elif device.type == "cuda" and engine.attach(device.index):
            numbers[device] = device.index
        else:
            numbers[device] = ELSEWHERE
    return list(map(numbers.__getitem__, where)) if any(number != HOST for number in numbers.values()) else None


def sources(
    storages: list[torch.UntypedStorage], pointers: Iterable[int], located: list[int] | None
) -> tuple[array[int], array[int] | None, array[int] | None, list[torch.UntypedStorage], list[int]]:
    """Returns the arguments of the engine's ``begin()``: pointers, devices and streams; the storages that the
    pointers point to; and the CUDA devices. ``pointers`` are those that torch tells, ``located`` is what ``locate``
    returned for these storages."""
    if located is None:
        return array("Q", pointers), None, None, storages, []
    held = storages
    if ELSEWHERE in located:
        elsewhere = {id(s): s for s, device in zip(storages, located, strict=True) if device == ELSEWHERE}
        copies = {at: on_host(storage) for at, storage in elsewhere.items()}  # one, also of many parts
        held = [copies.get(id(storage), storage) for storage in storages]
    devices = array("q", [max(device, HOST) for device in located])
    cuda = sorted(set(devices) - {HOST})
    return array("Q", map(data_ptr, held)), devices, current_streams(cuda), held, cuda


def target(map_location: Any, engine: _engine.Engine) -> int:
    """Returns the CUDA device, attached to ``engine``, that a whole file is loaded to.

    Returns HOST if there is none that the engine can write to. torch then copies, or raises the error."""
    with contextlib.suppress(RuntimeError, OSError):
        device = torch.device(map_location) if isinstance(map_location, str | torch.device) else None
        if device is not None and device.type == "cuda" and torch.cuda.is_available():
            index = torch.cuda.current_device() if device.index is None else device.index
            if index < torch.cuda.device_count() and engine.attach(index):
                return index
    return HOST


def new_storage(nbytes: int, device: int) -> torch.UntypedStorage:
    """Returns uninitialized memory on a device that ``target`` found."""
    return torch.UntypedStorage(nbytes, device="cpu" if device == HOST else f"cuda:{device}")


def address(tensor: torch.Tensor) -> int:
    """Returns the address of the tensor's first element, on any device."""
    return data_ptr(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()


def on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Returns the storage, or a copy of it in host memory, made after the work of the current stream."""
    return storage if storage.device.type == "cpu" else storage.cpu()


def current_streams(devices: Iterable[int]) -> array[int]:
    """Returns this thread's current streams for the engine: device, handle, device, handle, …"""
    return array("Q", [n for d in devices for n in (d, torch.cuda.current_stream(d).cuda_stream)])


def capturing() -> bool:
    """Whether this thread's current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
