"""The state of every global random number generator that a training run draws from.

Python's ``random``, NumPy's legacy global generator, torch's CPU generator and each CUDA device. Generators
that the user creates are objects of their own, saved by whoever owns them (data_loader.py: a DataLoader's).
"""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch

from lazyckpt.errors import RestoreError
from lazyckpt.warn import warn


def capture_rng() -> dict[str, Any]:
    """The state of the global generators now: tensors and plain objects, fit for ``weights_only=True``.

    - ``python``: ``{"version", "words": int64[625], "gauss_next"}``
    - ``numpy``: ``{"key": int64[624], "pos", "has_gauss", "cached_gaussian"}``; None if the process never
      imported ``numpy.random``, which is not done here for its sake
    - ``torch``: the CPU generator, uint8[n]
    - ``cuda``: one uint8[n] for each device; empty while CUDA is not initialised

    The tensors are the caller's own, no later draw changes them. Nothing is drawn, no device is synchronised.
    """
    version, words, gauss_next = random.getstate()
    cuda = torch.cuda.is_initialized()
    return {
        "python": {"version": version, "words": _words(words), "gauss_next": gauss_next},
        "numpy": _capture_numpy(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back to a state from ``capture_rng``; all of them or, on an error, none.

    The tensors may be on any device. On a machine with another number of CUDA devices those that both have
    are restored, with a warning. Raises ``RestoreError`` for a state that is malformed.
    """
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
            raise ValueError(f"torch's is {_describe(state['torch'])} instead of {_describe(here)}")
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
        raise ValueError(f"{whose} words are {_describe(words)}")
    return len(words)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


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


def _words(values: Any) -> torch.Tensor:
    """32-bit words as a tensor: a storage record instead of 625 integers in the pickle. The array halves the time."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)
