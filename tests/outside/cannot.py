"""Which of torch's tests cannot pass with our storage, and why. ``make outside`` fails if the list is not true."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    why: str
    error: str  # a regular expression that the failure must match
    tests: tuple[str, ...]


_E2E = "e2e/test_e2e_save_and_load.py::TestE2ESaveAndLoad"

CANNOT = (
    Reason(
        "It saves beside a file of its own. LazyStorageWriter replaces nothing but an empty folder.",
        "exists. A checkpoint replaces nothing but an empty folder",
        ("test_format_utils.py::TestFormatUtils::test_torch_save_to_dcp",),
    ),
    Reason(
        "It saves into a folder that holds a checkpoint.",
        "exists. A checkpoint replaces nothing but an empty folder",
        (f"{_E2E}::test_overwrite",),
    ),
    Reason(
        "The state holds an io.BytesIO. LazyStorageReader refuses it unless weights_only=False.",
        r"UnsupportedFormatError[\s\S]*Unsupported global: GLOBAL _io\.BytesIO",
        (
            *(f"{_E2E}::test_e2e_compile_{c}_model_type{n}" for c in (False, True) for n in range(3)),
            f"{_E2E}::test_e2e_async_cached_cache_staged_state_dict_False",
        ),
    ),
)
