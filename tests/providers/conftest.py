"""One Checkpointer for many tests of what it pickles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lazyckpt
from lazyckpt.providers.objects import StateProvider


class Holder(StateProvider):
    """Tracks whatever it holds at the moment."""

    value: Any = None
    bare = False

    def state(self) -> Any:
        return self.value if self.bare else {"value": self.value, "constant": 1}

    def load_state(self, state: Any) -> None:
        self.value = state["value"]


class Saver:
    """One Checkpointer for many tests, and the file that its last save made."""

    def __init__(self, folder: Path) -> None:
        self.ckpt = lazyckpt.Checkpointer(folder, keep_last=2, chunk_bytes=64 << 10, host_buffer_bytes=1 << 20)
        self.holder = Holder()
        self.ckpt.track(x=self.holder)
        self.count = 0

    def save(self, value: Any, *, bare: bool = False) -> Path:
        self.holder.value, self.holder.bare = value, bare
        self.count += 1
        return self.ckpt.save(self.count).result(timeout=30) / "state.pt"


@pytest.fixture(scope="module")
def saver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saver]:
    """See ``Saver``."""
    saver = Saver(tmp_path_factory.mktemp("objects"))
    yield saver
    saver.ckpt.close()
