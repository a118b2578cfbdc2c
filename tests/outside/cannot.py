"""Which of torch's tests cannot pass with our storage, and why. ``make outside`` fails if the list is not true."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    why: str
    error: str  # a regular expression that the failure must match
    tests: tuple[str, ...]


CANNOT = (
    Reason(
        "It saves beside a file of its own. LazyStorageWriter replaces nothing but an empty folder.",
        "exists. A checkpoint replaces nothing but an empty folder",
        ("test_format_utils.py::TestFormatUtils::test_torch_save_to_dcp",),
    ),
)
