"""torch's tensors on the fake devices. torch has no CUDA here: its CPU tensors stand for tensors on a device
(lazyckpt/devices.py is told so). A save copies device memory, which kernels of the test fill on the training
stream, in place of those torch would launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import torch

from fake_cuda import FakeCuda
from lazyckpt import _engine, devices


class Gpu:
    """Which tensors are on which device, and what their memory holds: one byte, all over."""

    def __init__(self, driver: FakeCuda) -> None:
        self.driver = driver
        self.streams = {0: 0, 1: 0}
        self.captured = False
        self._memory: dict[int, tuple[int, int, torch.UntypedStorage]] = {}  # by _cdata: device, pointer
        self._bytes: dict[int, int] = {}

    def place(self, tensors: Iterable[torch.Tensor], device: int = 0) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._memory:
                pointer = self.driver.device_malloc(device, storage.nbytes())
                self._memory[storage._cdata] = device, pointer, storage
                self.driver.write(pointer, bytes(storage.nbytes()))
                self._bytes[storage._cdata] = 0

    def kernel(self, tensors: Iterable[torch.Tensor], byte: int) -> None:
        """Writes to tensors, in the order of the training stream."""
        tensors = list(tensors)
        for device, stream in self.streams.items():
            if writes := self.ranges(tensors, device, byte):
                self.driver.kernel(stream, writes, device=device)
        for identity in {tensor.untyped_storage()._cdata for tensor in tensors} & self._bytes.keys():
            self._bytes[identity] = byte

    def ranges(self, tensors: Iterable[torch.Tensor], device: int, byte: int) -> list[tuple[int, int, int]]:
        places = [(self._memory.get(t.untyped_storage()._cdata), t.untyped_storage().nbytes()) for t in tensors]
        return [(place[1], nbytes, byte) for place, nbytes in places if place is not None and place[0] == device]

    def not_placed(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [t for t in tensors if t.untyped_storage()._cdata not in self._memory]

    def content(self, tensor: torch.Tensor) -> bytes:
        place = self._memory.get(tensor.untyped_storage()._cdata)
        return raw(tensor) if place is None else self.driver.read(place[1], tensor.nbytes)

    def picture(self, state: Any) -> Any:
        """The bytes of every tensor in a state, as they will be when the streams are done."""
        if isinstance(state, torch.Tensor):
            byte = self.byte(state)
            return raw(state) if byte is None else bytes([byte]) * state.nbytes
        if isinstance(state, dict):
            return {key: self.picture(value) for key, value in state.items()}
        return [self.picture(value) for value in state] if isinstance(state, list) else state

    def byte(self, tensor: torch.Tensor) -> int | None:
        """What a tensor on a device will hold all over, when its stream is done."""
        return self._bytes.get(tensor.untyped_storage()._cdata)

    # lazyckpt.devices

    def locate(
        self, storages: Iterable[torch.UntypedStorage], where: list[torch.device], engine: _engine.Engine
    ) -> list[int] | None:
        found = [self._memory[s._cdata][0] if s._cdata in self._memory else devices.HOST for s in storages]
        for device in set(found) - {devices.HOST}:
            assert engine.attach(device)
        return found if any(device != devices.HOST for device in found) else None

    def target(self, map_location: Any, engine: _engine.Engine) -> int:
        device = None if map_location is None else torch.device(map_location).index
        assert device is None or engine.attach(device)
        return devices.HOST if device is None else device

    def new_storage(self, nbytes: int, device: int) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(nbytes)
        if device != devices.HOST and nbytes:
            self.place([torch.empty(0, dtype=torch.uint8).set_(storage)], device)
        return storage

    def data_ptr(self, storage: torch.UntypedStorage) -> int:
        place = self._memory.get(storage._cdata)
        return storage.data_ptr() if place is None else place[1]

    def current_streams(self, ordinals: Iterable[int]) -> array[int]:
        return array("Q", [n for d in ordinals for n in (d, self.streams[d])])

    def on_host(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        place = self._memory.get(storage._cdata)
        if place is None:
            return storage
        self.driver.synchronize()
        copy = torch.frombuffer(bytearray(self.driver.read(place[1], storage.nbytes())), dtype=torch.uint8)
        return copy.untyped_storage()

    def give_back(self) -> None:
        """Frees all of it, once nothing of it is used any more."""
        self.driver.synchronize()
        for _, pointer, _ in self._memory.values():
            self.driver.device_free(pointer)
        self._memory.clear()
        self._bytes.clear()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
