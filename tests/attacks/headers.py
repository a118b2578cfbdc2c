"""safetensors files whose header says more than there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attacks import attack, register


def file_of(folder: Path, header: bytes | dict[str, Any], data: bytes = bytes(12), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def hostile(
    name: str,
    sentence: str,
    header: bytes | dict[str, Any],
    data: bytes = bytes(12),
    length: int | None = None,
    harmless: str = "",
) -> None:
    register(lambda folder: file_of(folder, header, data, length), f"headers.{name}", sentence, harmless=harmless)


def told(shape: Any = (3,), offsets: Any = (0, 12), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


hostile(
    "header_of_2_to_63",
    "A header of 2^63 bytes: negative for a reader of signed numbers.",
    {"a": told()},
    length=2**63,
)
hostile(
    "header_of_2_to_64",
    "A header of 2^64 - 1 bytes: with the eight in front of it, seven.",
    {"a": told()},
    length=2**64 - 1,
)
hostile(
    "header_beyond_the_file",
    "A header of 99 MB, which is allowed, in a file of 100 bytes.",
    {"a": told()},
    length=99_000_000,
)


@attack
def sparse_header(folder: Path) -> Path:
    """A header of 2^40 bytes that is a hole in the file."""
    path = folder / "x.safetensors"
    with path.open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little") + b"{")
        file.truncate((1 << 40) + 8)
    return path


@attack(large="the file is that large")
def sparse_tensor_of_a_terabyte(folder: Path) -> Path:
    """All is as it should be, but for the hole of 2^42 bytes that is to be loaded."""
    path = file_of(folder, {"a": told([1 << 42], [0, 1 << 42], "U8")}, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 42))
    return path


hostile("nested_json", "A million brackets, for parsers that recurse.", b'{"a":' + b"[" * 1_000_000)
hostile("nested_json_that_closes", "The same, well-formed.", b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}")


@attack
def duplicate_tensor(folder: Path) -> Path:
    """One name twice: scanners look at the first, loaders take the last."""
    one = json.dumps(told()).encode()
    return file_of(folder, b'{"a":%s,"a":%s}' % (one, one))


hostile(
    "duplicate_field",
    "One field of a tensor twice.",
    b'{"a":{"dtype":"F32","shape":[3],"shape":[1],"data_offsets":[0,12]}}',
)


@attack
def duplicate_by_escape(folder: Path) -> Path:
    """The same name, once as it is and once escaped."""
    one = json.dumps(told([1], [0, 4])).encode()
    two = json.dumps(told([2], [4, 12])).encode()
    return file_of(folder, b'{"a":%s,"\\u0061":%s}' % (one, two))


hostile(
    "negative_offset",
    "A tensor in front of the data: the header, or what lies before the buffer.",
    {"a": told(offsets=[-12, 0])},
)
hostile("negative_shape", "Two negative dimensions have a positive product.", {"a": told([-3, -1])})
hostile("overflowing_shape", "2^32 x 2^32 elements are none, in 64 bits.", {"a": told([2**32, 2**32], [0, 0])}, b"")
hostile(
    "overflowing_empty_shape",
    "No elements, by a zero at the end, behind a product that overflows.",
    {"a": told([2**62, 2**62, 0], [0, 0])},
    b"",
)
hostile(
    "overflowing_empty_strides",
    "No elements, by a zero in front, and strides that overflow.",
    {"a": told([0, 2**62, 2**62], [0, 0])},
    b"",
)
hostile("shape_beyond_its_bytes", "A gigabyte of elements in twelve bytes.", {"a": told([2**28])})
hostile("tensors_on_top_of_each_other", "A thousand tensors of the same bytes.", {f"a{n}": told() for n in range(1000)})
hostile("tensor_beyond_the_file", "Offsets behind the end.", {"a": told([2**30], [0, 2**32])})
hostile("hidden_bytes", "Bytes that belong to no tensor.", {"a": told()}, bytes(12) + b"#!/bin/sh\n")
hostile(
    "a_hundred_thousand_dimensions",
    "The product of 200,000 numbers of 62 bits takes minutes.",
    b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,12]}}' % b",".join([b"%d" % 2**62] * 200_000),
)
hostile(
    "dimensions_of_one",
    "A shape with 200,000 dimensions of one element is as long as it claims, and no tensor.",
    b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % b",".join([b"1"] * 200_000),
    bytes(4),
    harmless="torch holds such tensors; inspect does not show them",
)
hostile(
    "number_of_five_thousand_digits",
    "Numbers whose decimal digits take quadratic time.",
    b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,12]}}' % (b"9" * 5000),
)
hostile(
    "fractions_and_booleans",
    "3.0 and true are numbers, to lenient readers.",
    b'{"a":{"dtype":"F32","shape":[3.0,true],"data_offsets":[0,12]}}',
)
hostile(
    "not_a_number",
    "Python's parser knows NaN and Infinity, JSON does not.",
    b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,NaN]}}',
)
hostile(
    "utf_16", "A header in another encoding, which a scanner does not see.", json.dumps({"a": told()}).encode("utf-16")
)
hostile("broken_utf_8", "A name that is no text.", b'{"\xff\xfe":%s}' % json.dumps(told()).encode())
hostile(
    "half_a_character",
    "A name with a lone surrogate, which cannot be printed or written.",
    b'{"a\\ud800":%s}' % json.dumps(told()).encode(),
)
hostile(
    "escapes_in_a_name",
    "A tensor whose name clears the screen, turns text around and renames the window.",
    {"\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\x7f": told(), "__metadata__": {"\x1b[31m": "\x1b]52;c;YQ==\x07"}},
    harmless="a name may be any text; it is escaped where it is shown",
)
hostile("unknown_dtype_with_escapes", "A dtype that is named in the error message.", {"a": told(dtype="\x1b[2J")})
hostile("metadata_that_is_a_tensor", "The reserved name as a tensor.", {"__metadata__": told()})
hostile("long_names", "A name of two megabytes, in an error message.", {"a" * 2_000_000: told([4])})


@attack
def pickle_instead_of_a_header(folder: Path) -> Path:
    """A pickle under a name that promises to be safe."""
    path = folder / "x.safetensors"
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x05\0\0\0false\x85R.")
    return path
