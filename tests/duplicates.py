"""The ways in which a program may duplicate an object: two pickle protocols, cloudpickle and deepcopy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest


def _pickled(protocol: int) -> Callable[[Any], Any]:
    return lambda obj: pickle.loads(pickle.dumps(obj, protocol))


def _cloudpickled(obj: Any) -> Any:
    return pickle.loads(pytest.importorskip("cloudpickle").dumps(obj))


_PICKLES = {f"protocol {protocol}": _pickled(protocol) for protocol in (0, pickle.HIGHEST_PROTOCOL)}
DUPLICATES = {**_PICKLES, "cloudpickle": _cloudpickled, "deepcopy": copy.deepcopy}
