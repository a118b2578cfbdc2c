"""Checks the fields of a manifest. All raise ValueError for a value that no manifest has."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

MANIFEST = "manifest.json"
MAX_NUMBER = 2**63 - 1  # a step, a sequence
Layout = Literal["state", "folder", "file"]
"""Of a checkpoint: that of a Checkpointer; or a folder or a file as a trainer has it saved, which only mirrors
describe."""


def layout(value: Any) -> Layout:
    if value not in get_args(Layout):
        raise ValueError(f"{value!r} is no layout of a checkpoint")
    found: Layout = value
    return found


def file_name(value: Any, layout: Layout) -> str:
    """The name of a file in the checkpoint's folder; with the layout "folder" it may lie in a subfolder."""
    parts = value.split("/") if isinstance(value, str) and layout == "folder" else [value]
    if value == MANIFEST or not all(isinstance(part, str) and is_plain_name(part) for part in parts):
        raise ValueError(f"{value!r} is no name of a file in this folder")
    value.encode()  # not half a character
    return str(value)


def is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def crc(value: Any) -> int:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{8}", value):
        raise ValueError(f"{value!r} is not a CRC-32")
    return int(value, 16)


def whole(value: Any, most: int = MAX_NUMBER) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a whole number")
    return value
