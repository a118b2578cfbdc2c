"""Changes a valid file in one to four places: a field of a zip record, an opcode or argument of the pickle (packed
again, so that its checksum is right), a value of a JSON header, or any byte."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import random
import zipfile
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

EDGES = [0, 1, 2, 3, 7, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63]
EDGES.append(2**64 - 1)
_NAMES = [
    "os system", "builtins eval", "builtins bytearray", "builtins set", "builtins complex", "collections OrderedDict",
    "collections Counter", "_codecs encode", "torch Size", "torch device", "torch FloatStorage", "torch LongStorage",
    "torch.storage UntypedStorage", "torch Tensor", "torch float32", "torch uint16", "torch.nn.parameter Parameter",
    "torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter", "torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_qtensor",
    "torch._utils _rebuild_nested_tensor", "torch._utils _rebuild_meta_tensor_no_storage",
    "torch._utils _rebuild_wrapper_subclass", "torch._tensor _rebuild_from_type_v2",
    "torch.serialization _get_layout", "torch per_channel_affine", "numpy ndarray", "numpy dtype",
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 10**30, 2**63, "", "F32", "U8", "\x1b[2J", "\ud800", [], [[]], {}, [0, 12], [12, 0],
    [2**62, 2**62, 0], [-1], "9" * 50,
]  # fmt: skip


def seeds() -> dict[str, bytes]:
    """Small valid files."""
    base = torch.arange(12.0)
    trees = {
        "plain": {"a": base, "b": base[2:8:2], "c": torch.ones(2, 3, dtype=torch.bool), "d": [1, "x", (2.5, None)]},
        "parts": {"p": torch.nn.Parameter(base[:4]), "u": torch.ones(2, dtype=torch.uint16), "e": torch.empty(0)},
        "sparse": {"s": torch.eye(3).to_sparse(), "r": torch.eye(3).to_sparse_csr(), "y": b"bytes", "z": {1, 2}},
    }
    found = {}
    for name, tree in trees.items():
        out = io.BytesIO()
        torch.save(tree, out)
        found[f"{name}.pt"] = out.getvalue()
    tensors = {"a": base, "b": torch.ones(2, 2, dtype=torch.int8), "c": torch.empty(0, 3)}
    found["x.safetensors"] = safetensors.torch.save(tensors, {"format": "pt"})
    return found


def mutate(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 4)):
        kinds: list[Callable[[bytes, random.Random], bytes]] = [_bytes]
        if content.startswith(b"PK"):
            kinds += [_zip_field, _pickle, _pickle, _records]
        else:
            kinds += [_header, _header, _header]
        try:
            content = rng.choice(kinds)(content, rng)
        except Exception:
            content = _bytes(content, rng)  # earlier changes broke it too much to parse
    return content


def _number(rng: random.Random) -> int:
    return max(0, rng.choice(EDGES) + rng.choice((0, 0, 0, -1, 1)))


def _bytes(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return rng.choice(
        (
            lambda: content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
            lambda: content[:at],
            lambda: content[:at] + rng.randbytes(rng.randint(1, 20)) + content[at:],
            lambda: content[:at] + content[at + rng.randint(1, 20) :],
        )
    )()


_FIELDS = {  # offset and width of the numbers in each zip structure
    b"PK\3\4": [(4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)],
    b"PK\1\2": [(8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2), (38, 4), (42, 4)],
    b"PK\5\6": [(4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)],
    b"PK\7\x08": [(4, 4), (8, 4), (12, 4)],
}


def _zip_field(content: bytes, rng: random.Random) -> bytes:
    magic = rng.choice(list(_FIELDS))
    places = [at for at in range(len(content)) if content.startswith(magic, at)]
    at, (offset, width) = rng.choice(places), rng.choice(_FIELDS[magic])
    at += offset
    before = int.from_bytes(content[at : at + width], "little")
    value = rng.choice((_number(rng), before + 1, before - 1, before ^ 1 << rng.randrange(8 * width)))
    return content[:at] + (value % (1 << 8 * width)).to_bytes(width, "little") + content[at + width :]


def _pack(entries: list[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def _unpack(content: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(info.file_size for info in archive.infolist()) > 1 << 20:
            raise ValueError("large")
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def _records(content: bytes, rng: random.Random) -> bytes:
    entries = _unpack(content)
    index = rng.randrange(len(entries))
    name, data = entries[index]
    change = rng.randrange(5)
    if change == 0:
        entries[index] = name, _bytes(data, rng)
    elif change == 1:
        entries[index] = rng.choice(entries)[0], data
    elif change == 2:
        entries[index] = _bytes(name.encode(), rng).decode("latin-1"), data
    elif change == 3:
        del entries[index]
    else:  # words of a storage: indices of sparse tensors, sizes
        at = 8 * rng.randrange(max(1, len(data) // 8))
        entries[index] = name, data[:at] + (_number(rng) % 2**64).to_bytes(8, "little") + data[at + 8 :]
    return _pack(entries)


def _pickle(content: bytes, rng: random.Random) -> bytes:
    entries = _unpack(content)
    (index,) = (i for i, (name, _) in enumerate(entries) if name.endswith("/data.pkl"))
    entries[index] = entries[index][0], _opcodes(entries[index][1], rng)
    return _pack(entries)


def mutate_pickle(data: bytes, rng: random.Random) -> bytes:
    """``data`` with one byte or one opcode changed."""
    if rng.random() < 0.3:
        return _bytes(data, rng)
    try:
        return _opcodes(data, rng)
    except ValueError:
        return _bytes(data, rng)  # it no longer parses


def _opcodes(data: bytes, rng: random.Random) -> bytes:
    places = [place for _, _, place in pickletools.genops(data)]
    ops = [data[begin:end] for begin, end in zip(places, [*places[1:], len(data)], strict=True)]
    at = rng.randrange(len(ops))
    change = rng.randrange(6)
    if change == 0:
        ops[at] = _integer(rng)
    elif change == 1:
        globals_at = [i for i, op in enumerate(ops) if op.startswith(pickle.GLOBAL)]
        ops[rng.choice(globals_at or [at])] = b"c" + rng.choice(_NAMES).replace(" ", "\n").encode() + b"\n"
    elif change == 2:
        del ops[at]
    elif change == 3:
        other = rng.randrange(len(ops))
        ops[at], ops[other] = ops[other], ops[at]
    elif change == 4:
        begin = rng.randrange(len(ops))
        ops[at:at] = ops[begin : begin + rng.randint(1, 12)] * rng.randint(1, 3)
    else:
        plain = b"R b \x81 )\x81 \x85 \x86 \x87 ( t u s a e Q 0 2 N \x88 ] } ) h\0 q\1 \x93".split(b" ")
        ops.insert(at, rng.choice(plain))
    return b"".join(ops)


def _integer(rng: random.Random) -> bytes:
    value = rng.choice((1, -1)) * _number(rng)
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + data


def _header(content: bytes, rng: random.Random) -> bytes:
    nbytes = int.from_bytes(content[:8], "little")
    tree = json.loads(content[8 : 8 + nbytes])
    data = content[8 + nbytes :]
    place: Any = tree
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
            place = place[key]
            continue
        break
    change = rng.randrange(4)
    if change == 0:
        place[key] = rng.choice(_VALUES)
    elif change == 1 and type(place[key]) is int:
        place[key] += rng.choice((-4, -1, 1, 4))
    elif change == 2 and isinstance(place, dict):
        place[rng.choice(("a", "b", "new", "__metadata__"))] = place.pop(key)
    else:
        place[key] = _number(rng)
    text = json.dumps(tree).encode()
    length = len(text) if rng.random() < 0.9 else _number(rng) % 2**64
    return length.to_bytes(8, "little") + text + data
