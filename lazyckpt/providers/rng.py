"""The state of every global random number generator that a training run draws from.

Python's ``random``, NumPy's legacy global generator, torch's CPU generator and each CUDA device. Generators
that the user creates are objects of their own, saved by their owners (data_loader.py saves a DataLoader's).
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from typing import Any

import torch

from lazyckpt.errors import RestoreError
from lazyckpt.providers.objects import describe
from lazyckpt.warn import warn


class RandomStates:
    """The states of the global random number generators: Python's, NumPy's, torch's on the CPU and on CUDA devices.

    For code that saves objects with ``state_dict()`` and ``load_state_dict()`` itself, such as
    ``fabric.save(path, {"model": model, "random": lazyckpt.RandomStates()})``. A Checkpointer saves them by itself.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain objects, which load with ``weights_only=True``. Draws no number."""
        return capture_rng()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts every generator back; all of them or, with a RestoreError for a malformed state, none."""
        restore_rng(state)


def capture_rng() -> dict[str, Any]:
    """The state of the global generators now: tensors of the caller's own and plain objects, for ``weights_only=True``.

    ``numpy`` is None if the process never imported ``numpy.random``, and ``cuda`` has a tensor for each device, none
    while CUDA is not initialised. Nothing is drawn, no device is synchronised."""
    version, words, gauss_next = random.getstate()
    # A storage record instead of 625 integers in the pickle. The array halves the time.
    tensor = torch.frombuffer(array("q", words), dtype=torch.int64)
    return {
        "python": {"version": version, "words": tensor, "gauss_next": gauss_next},
        "numpy": _capture_numpy(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


class KeptMemory:
    """Lets the random states of each save have the memory of those before, so that a save finds all storages of its
    checkpoint where the last one found them (capture/decision.py). A save may take them twice: rank 1 gathers the file
    that all ranks write, and one of its own."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[torch.Tensor, torch.UntypedStorage]]] = {}

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a state from ``capture_rng`` with its host tensors in kept memory, where nothing holds that any
        more."""
        taken = {**state, "python": {**state["python"], "words": self._take("python", state["python"]["words"])}}
        if state["numpy"] is not None:
            taken["numpy"] = {**state["numpy"], "key": self._take("numpy", state["numpy"]["key"])}
        taken["torch"] = self._take("torch", state["torch"])
        return taken

    def _take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        of_name = self._kept.setdefault(name, [])
        for kept in of_name:
            if _references_to(kept) == _ALONE and _are_alike(kept[0], tensor):
                # No operation of torch: in inference mode, or under a mode of the user's, it would do something else.
                ctypes.memmove(kept[0].data_ptr(), tensor.data_ptr(), tensor.nbytes)
                return kept[0]
        of_name.append(_with_storage(tensor))
        del of_name[:-_MOST_KEPT]
        return tensor


_MOST_KEPT = 2


def _references_to(kept: tuple[Any, ...]) -> list[int]:
    return [sys.getrefcount(each) for each in kept]


def _with_storage(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.UntypedStorage]:
    return tensor, tensor.untyped_storage()


_ALONE = _references_to(_with_storage(torch.empty(1)))  # where nothing else holds them


def _are_alike(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    return kept.dtype == tensor.dtype and kept.shape == tensor.shape


def restore_rng(state: dict[str, Any]) -> None:
    """Puts every generator back to a state from ``capture_rng``; all of them or, on an error, none.

    On a machine with another number of CUDA devices those that both have are restored, with a warning. Raises
    ``RestoreError`` for a state that is malformed."""
    check_rng(state)
    before = capture_rng()
    try:
        _apply(state)
    except Exception as error:
        _apply(before)
        raise _misfit(error) from error


def check_rng(state: Any) -> None:
    """Raise ``RestoreError`` for a state of another kind. Reads no contents of tensors, and changes no generator."""
    try:
        python, of_numpy, cuda = state["python"], state["numpy"], state["cuda"]
        words = _count_words(python["words"], "Python's")
        random.Random().setstate((python["version"], (0,) * words, python["gauss_next"]))
        if of_numpy is not None:
            _check_numpy(of_numpy)
        here = torch.get_rng_state()
        if state["torch"].dtype != here.dtype or state["torch"].shape != here.shape:
            raise ValueError(f"torch's is {describe(state['torch'])} instead of {describe(here)}")
        if not all(isinstance(of_device, torch.Tensor) and of_device.dtype == torch.uint8 for of_device in cuda):
            raise TypeError("a CUDA device's is no tensor of bytes")
    except Exception as error:
        raise _misfit(error) from error


def _check_numpy(state: dict[str, Any]) -> None:
    """Refuses a state that NumPy would refuse, or would accept although it points outside its words."""
    if (words := _count_words(state["key"], "NumPy's")) != 624:
        raise ValueError(f"NumPy's has {words} words instead of 624")
    if type(state["pos"]) is not int or not 0 <= state["pos"] <= 624:
        raise ValueError(f"NumPy's has the position {state['pos']!r} in 624 words")
    if state["has_gauss"] not in (0, 1) or not isinstance(state["cached_gaussian"], float):
        raise ValueError("NumPy's has a cached number that is none")


def _count_words(words: torch.Tensor, whose: str) -> int:
    if words.dtype != torch.int64 or words.dim() != 1:
        raise ValueError(f"{whose} words are {describe(words)}")
    return len(words)


def _misfit(error: Exception) -> RestoreError:
    return RestoreError(
        f"the saved RNG state does not fit ({type(error).__name__}: {error}); no generator was changed. "
        "Restore from another checkpoint, or leave the RNG out and seed it anew."
    )


def _apply(state: dict[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
    if state["numpy"] is not None:
        _apply_numpy(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    _apply_cuda(state["cuda"])


def _capture_numpy() -> dict[str, Any] | None:
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    state = numpy_random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        warn(
            f"np.random's global bit generator was replaced by {state['bit_generator']}; "
            "its state is not part of the checkpoint: track your own numpy Generator instead."
        )
        return None
    return {
        "key": torch.frombuffer(state["state"]["key"].astype("int64"), dtype=torch.int64),
        "pos": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "cached_gaussian": float(state["gauss"]),
    }


def _apply_numpy(state: dict[str, Any]) -> None:
    try:
        import numpy as np
    except ImportError:
        warn("the checkpoint has a NumPy RNG state, but NumPy is not installed here.")
        return
    key = np.array(state["key"].tolist(), dtype=np.uint32)
    np.random.set_state(("MT19937", key, state["pos"], state["has_gauss"], state["cached_gaussian"]))


def _apply_cuda(states: list[torch.Tensor]) -> None:
    if not states:
        return
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices != len(states):
        warn(
            f"the checkpoint has the RNG state of {len(states)} CUDA device(s), this machine has {devices}: "
            f"{min(devices, len(states))} restored, random numbers on the others will differ."
        )
    if devices:
        # Otherwise torch would only queue the states, and a capture would miss them.
        torch.cuda.init()
    for device, state in enumerate(states[:devices]):
        torch.cuda.set_rng_state(state.cpu(), device)
