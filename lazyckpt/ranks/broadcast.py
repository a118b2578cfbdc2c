"""Broadcasts over training's process groups, which are idle while all ranks restore.

Large tensors travel from their place into their place; small ones, and those on a device that the group does not serve,
travel together through a buffer. No rank waits for a lost one longer than ``rank_timeout_s``, see lookout.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from lazyckpt import waits
from lazyckpt.config import MIB
from lazyckpt.ranks.lookout import Lookout
from lazyckpt.ranks.rounds import RankLost, StoreLost

LARGE_BYTES = MIB  # copying less into a buffer costs less than a broadcast of its own
PIECE_BYTES = 8 * MIB  # of one broadcast; in larger ones gloo is slower, as each rank passes on what it has whole
_ALIGNED = 16  # bytes, in a buffer: a multiple of the size of any element
# Broadcasts at once. gloo works on them even when this process has given up, and destroy_process_group() waits for it.
# With one, the rank that sees the failure has none left, leaves, and so ends those of the others.
_AT_ONCE = {"cpu": 1, "cuda": 8}


class Undelivered(Exception):
    """A broadcast failed. The next exchange of the ranks fails, too, and says why."""


def served(devices: Iterable[torch.device]) -> torch.device | None:
    """The device between which the default group moves tensors that are on these: a CUDA device with NCCL, the host
    with gloo. None: only by a way that is slower than to read them."""
    backends = dict(pair.partition(":")[::2] for pair in distributed.get_backend_config().split(","))
    kinds = {device.type: device for device in devices}
    if kinds.keys() - {"cpu", "cuda"}:
        return None
    if "cuda" in kinds:
        return kinds["cuda"] if backends.get("cuda") == "nccl" else None
    return torch.device("cpu") if backends.get("cpu") == "gloo" else None


class _Flight(NamedTuple):
    work: Any
    buffer: torch.Tensor
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]  # once it has arrived: into which tensor, and from where


# What gloo may still work on after this process has given up. If gloo's thread dropped the last reference to a tensor,
# it would need the GIL, and torch 2.6 holds the GIL while destroy_process_group() waits for that thread. Not the work:
# it keeps the connections open, and the other ranks wait until they are closed.
_given_up: deque[torch.Tensor] = deque(maxlen=_AT_ONCE["cpu"])


class Broadcasts:
    """Broadcasts that one rank takes part in. All ranks of the group start the same ones, in the same order."""

    def __init__(self, lookout: Lookout, device: torch.device, group: Any = None) -> None:
        """``device``: from ``served``. ``group``: a process group; None is the default one."""
        self.lookout = lookout
        self._device = device
        self._group = group
        self._rank = distributed.get_rank()
        self._flights: deque[_Flight] = deque()

    @torch.no_grad()
    def start(self, root: int, tensors: Iterable[torch.Tensor]) -> None:
        """Sends the bytes of ``tensors`` from rank ``root`` to all, in place. On all ranks they have the same sizes.
        They may be of any dtype and strides, and on any device. Raises Undelivered, as ``finish`` does."""
        small: list[torch.Tensor] = []
        nbytes = 0
        for tensor in tensors:
            if tensor.nbytes >= LARGE_BYTES:
                self._send_large(root, tensor)
                continue
            small.append(tensor)
            nbytes += _room(tensor)
            if nbytes >= PIECE_BYTES:
                self._send_small(root, small, nbytes)
                small, nbytes = [], 0
        if nbytes:
            self._send_small(root, small, nbytes)

    @torch.no_grad()
    def finish(self, left: int = 0) -> None:
        """Waits until all have arrived but the last ``left``."""
        while len(self._flights) > left:
            flight = self._flights[0]
            self._await(flight.work)
            self._flights.popleft()
            for tensor, part in flight.copies:
                tensor.copy_(part)
        if not left and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _send_large(self, root: int, tensor: torch.Tensor) -> None:
        whole = tensor.contiguous()
        content = bytes_of(whole)
        for begin in range(0, tensor.nbytes, PIECE_BYTES):
            piece = content[begin : begin + PIECE_BYTES]
            buffer, copies = piece, []
            if piece.device != self._device:
                buffer = piece.to(self._device) if root == self._rank else torch.empty_like(piece, device=self._device)
                copies = [(piece, buffer)]
            if whole is not tensor and begin + PIECE_BYTES >= tensor.nbytes:
                copies.append((tensor, whole))
            self._send(root, buffer, copies)

    def _send_small(self, root: int, tensors: list[torch.Tensor], nbytes: int) -> None:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        copies = list(zip(tensors, _parts(buffer, tensors), strict=True))
        if root == self._rank:
            for tensor, part in copies:
                part.copy_(tensor)
        self._send(root, buffer, copies)

    def _send(self, root: int, buffer: torch.Tensor, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.finish(_AT_ONCE[self._device.type] - 1)
        self._flights.append(_Flight(self._begin(root, buffer), buffer, () if root == self._rank else copies))

    def _begin(self, root: int, buffer: torch.Tensor) -> Any:
        try:
            return distributed.broadcast(buffer, root, group=self._group, async_op=True)
        except RuntimeError as error:
            self._fail(error)
            raise Undelivered from None

    def _await(self, work: Any) -> None:
        pause_s = waits.BROADCAST_FIRST_LOOK_S
        try:
            while not work.is_completed():
                self.lookout.look()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, waits.BROADCAST_LAST_LOOK_S)
            work.wait()
        except (RuntimeError, RankLost, StoreLost) as error:
            self._fail(error)
            raise Undelivered from None

    def _fail(self, error: Exception) -> None:
        _given_up.extend(flight.buffer for flight in self._flights)
        self._flights.clear()
        self.lookout.give_up(error)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in place."""
    storage = tensor.untyped_storage()
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return bytes_at(storage, begin, tensor.nbytes)


def bytes_at(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """A part of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (nbytes,))  # type: ignore[call-overload, no-any-return]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _parts(buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The parts of the buffer, as tensors like these."""
    begin = 0
    for tensor in tensors:
        yield buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        begin += _room(tensor)
