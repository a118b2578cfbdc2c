"""``Restored``: the step that ``restore()`` returns, and what was restored."""

from __future__ import annotations

from typing import Any

from lazyckpt.stores.store import AnyPath


class Restored(int):
    """The step of the checkpoint that was restored: an int, which also says what ``restore()`` did.

    Copied or pickled, it is a plain int.

    Attributes:
        path: The folder of the checkpoint; of one in a mirror, its URL as text.
        parts: The names of the tracked state that was restored.
        missing: Requested state that the checkpoint lacks, so it stays as it was: the name of a part, or
            "model.head.bias" for an entry of a module. Empty unless ``strict=False``.
        unexpected: State that is in the checkpoint and not tracked, named likewise.
    """

    path: AnyPath
    parts: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __new__(
        cls, step: int, path: AnyPath, parts: tuple[str, ...], missing: tuple[str, ...], unexpected: tuple[str, ...]
    ) -> Restored:
        restored = super().__new__(cls, step)
        restored.path, restored.parts, restored.missing, restored.unexpected = path, parts, missing, unexpected
        return restored

    @property
    def step(self) -> int:
        """The step, as a plain int."""
        return int(self)

    def __repr__(self) -> str:
        rest = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"Restored({int(self)}, {rest})"

    __str__ = int.__repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)
