"""The ways in which a program may duplicate an object: every pickle protocol, cloudpickle and deepcopy."""

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


_PICKLES = {f"protocol {protocol}": _pickled(protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)}
DUPLICATES = {**_PICKLES, "cloudpickle": _cloudpickled, "deepcopy": copy.deepcopy}
