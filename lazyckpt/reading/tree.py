"""A saved object as a tree of modules, tensors and values, with what each weighs in the file.

Names with dots are split, so that ``model["h.0.attn.weight"]`` stands in ``model / h / 0 / attn``. A storage is
counted where it is seen first, like a hard link in ``du``: the sums add up to what the file holds.

The object may come from a hostile pickle: shared and cyclic containers are opened once, nesting has a limit, and
no value is printed whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lazyckpt.formats.dtypes import DTYPES, Dtype
from lazyckpt.reading.skeleton import Opaque, Storage, Tensor, dtype_name, strides_of

MAX_DEPTH = 32
STYLES = {"module": "bold", "tensor": "", "value": "cyan"}  # of a row, by its kind
_MAX_CHARACTERS = 64 << 20  # of all paths
_MAX_TEXT = 60
_MAX_ITEMS = 6
_SMALL_ARRAY = "multiarray._reconstruct"  # how NumPy pickles an array with its bytes


@dataclass
class Node:
    """A row of the tree. ``nbytes`` counts what is below, too; ``note`` says how a tensor shares its memory; ``value``
    is what was saved, a ``Tensor`` if ``kind`` says so."""

    name: str
    path: str
    kind: Literal["module", "tensor", "value"]
    depth: int
    nbytes: int = 0
    tensors: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    text: str = ""
    note: str = ""
    tied_to: str | None = None
    storage: Storage | None = None
    value: Any = None
    children: list[Node] = field(default_factory=list)
    modules: dict[str, Node] = field(default_factory=dict)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


class Tree:
    """``root`` is the tree of ``obj``, which is made of what ``skeleton`` gives. ``join``: a module with one entry
    is one row with it.

    Raises ValueError if it cannot be shown.
    """

    def __init__(self, name: str, obj: Any, *, join: bool = True) -> None:
        self._opened: dict[int, str] = {}  # id of a container, alive as long as obj -> path
        self._storages: dict[
            Any, tuple[str, Any]
        ] = {}  # of a file and record: path of the first tensor there, its view
        self._room = _MAX_CHARACTERS
        self.root = Node(name, "", "module", 0)
        container = _contents(obj)
        if container:
            self._open(self.root, obj, container)
        else:
            self.root.children.append(self._node("(object)", "(object)", 1, obj))
        _sum(self.root)
        if join:
            join_single_children(self.root)

    def _open(self, parent: Node, obj: Any, container: Mapping[Any, Any]) -> None:
        self._opened[id(obj)] = parent.path or "the whole"
        for key, value in container.items():
            name = key if isinstance(key, str) else short(key)
            module = parent
            parts = key.split(".") if isinstance(key, str) else []
            if len(parts) > 1 and all(parts) and parent.depth + len(parts) < MAX_DEPTH:
                *outer, name = parts
                for part in outer:
                    module = self._module(module, part)
            node = self._node(name, self._path(module, name), module.depth + 1, value)
            module.children.append(node)
            if node.kind == "module":
                module.modules.setdefault(name, node)

    def _path(self, parent: Node, name: str) -> str:
        """Raises ValueError if all paths together are too long: one long name above many short ones is."""
        path = f"{parent.path}.{name}" if parent.path else name
        self._room -= len(path) + len(name)
        if self._room < 0:
            raise ValueError("its names are too long, or too many")
        return path

    def _module(self, parent: Node, name: str) -> Node:
        module = parent.modules.get(name)
        if module is None:
            module = parent.modules[name] = Node(name, self._path(parent, name), "module", parent.depth + 1)
            parent.children.append(module)
        return module

    def _node(self, name: str, path: str, depth: int, value: Any) -> Node:
        if isinstance(value, Opaque) and (array := _numpy_array(value)) is not None:
            value = array
        if isinstance(value, Storage):
            dtype = value.dtype or DTYPES["uint8"]
            value = Tensor(dtype_name(dtype), (value.record.nbytes // dtype.itemsize,), 0, (1,), value, "storage")
        if isinstance(value, Tensor):
            return self._tensor(name, path, depth, value)
        container = _contents(value)
        if not container:
            return Node(name, path, "value", depth, text=short(value), value=value)
        if id(value) in self._opened:
            return Node(name, path, "value", depth, text=f"the same object as {self._opened[id(value)]}")
        if depth >= MAX_DEPTH:
            return Node(name, path, "value", depth, text="nested too deep to be shown")
        node = Node(name, path, "module", depth)
        if isinstance(value, Opaque):
            node.text = value.global_name.rpartition(".")[2].removeprefix("_rebuild_")
        self._open(node, value, container)
        return node

    def _tensor(self, name: str, path: str, depth: int, tensor: Tensor) -> Node:
        node = Node(name, path, "tensor", depth, 0, 1, tensor.dtype, tensor.shape, note=tensor.kind, value=tensor)
        if tensor.storage is None:
            return node
        node.storage, record = tensor.storage, tensor.storage.record
        place = tensor.storage.file, record.name
        view = (tensor.offset, tensor.shape, tensor.stride, tensor.dtype)
        first = self._storages.get(place)
        if first is None:
            self._storages[place] = (path, view)
            node.nbytes = record.nbytes
            if tensor.nbytes < record.nbytes and not tensor.kind:
                node.note = f"a view: {tensor.nbytes:,} bytes of {record.nbytes:,}"
        elif first[1] == view:
            node.tied_to = first[0]
            node.note = f"tied to {first[0]}"
        else:
            node.note = f"shares memory with {first[0]}"
        return node


def _contents(value: Any) -> Mapping[Any, Any]:
    """What is inside ``value`` if that is worth rows of its own, else nothing."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value)) if any(map(_is_nested, value)) else {}
    if not isinstance(value, Opaque):
        return {}
    state = value.state
    if isinstance(state, dict) and isinstance(state.get("_modules"), dict):  # a torch.nn.Module, saved whole
        parts = [state.get(part) for part in ("_parameters", "_buffers", "_modules")]
        return {k: v for part in parts if isinstance(part, dict) for k, v in part.items() if v is not None}
    if value.global_name.endswith(_SMALL_ARRAY):
        return {}
    # What an object has is shown whole; of what a function was given, only what has rows of its own.
    given = {key: item for key, item in enumerate(value.args) if _is_nested(item)}
    attributes = state if isinstance(state, dict) else {} if state is None else {"state": state}
    found = {**given, **dict(enumerate(value.members, len(value.args))), **value.entries, **attributes}
    return found if any(map(_is_nested, found.values())) else {}


def _is_nested(value: Any) -> bool:
    return isinstance(value, Tensor | Storage | Opaque) or (isinstance(value, Mapping | list | tuple) and bool(value))


def _numpy_array(value: Opaque) -> Tensor | None:
    """A NumPy array whose bytes are a record, as lazyckpt writes large ones: ndarray(shape, dtype, asarray(tensor))."""
    if value.global_name != "numpy.ndarray" or len(value.args) < 3:
        return None
    shape, dtype, memory = value.args[:3]
    tensor = memory.args[0] if isinstance(memory, Opaque) and memory.args else None
    if not isinstance(tensor, Tensor) or not isinstance(shape, tuple) or not isinstance(dtype, Opaque):
        return None
    kind = dtype.args[0] if dtype.args else None
    try:
        return Tensor(
            short(kind)[1:-1] if isinstance(kind, str) else "?",
            shape,
            tensor.offset,
            strides_of(shape, value.args[5:] == ("F",)),
            tensor.storage,
            "NumPy array",
        )
    except (TypeError, ValueError):
        return None


def _sum(node: Node) -> None:
    for child in node.children:
        _sum(child)
        node.nbytes += child.nbytes
        node.tensors += child.tensors


def join_single_children(node: Node) -> None:
    """A module with one entry is one row with it: ``h.0.attn`` instead of three rows of the same size."""
    for index, child in enumerate(node.children):
        while child.kind == "module" and len(child.children) == 1:
            only = child.children[0]
            only.name = f"{child.name}.{only.name}"
            child = only
        node.children[index] = child
        join_single_children(child)


def drawn_rows(node: Node, depth: int | None) -> Iterator[tuple[str, Node]]:
    """Every node to be shown but the root, behind the lines that draw the tree; so many levels."""
    return _drawn_rows(node, depth, "")


def _drawn_rows(node: Node, depth: int | None, above: str) -> Iterator[tuple[str, Node]]:
    if depth == 0:
        return
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        yield above + ("└─ " if last else "├─ "), child
        below = above + ("   " if last else "│  ")
        yield from _drawn_rows(child, None if depth is None else depth - 1, below)


def shown_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _items(value: Any) -> str:
    return f"{len(value):,} item" if len(value) == 1 else f"{len(value):,} items"


def short(value: Any, *, nested: bool = False) -> str:
    """A value in a few characters; what is inside a container inside a container is left out."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]!r}… {len(value):,} characters"
    if isinstance(value, bytes | bytearray):
        return repr(bytes(value)) if len(value) <= _MAX_TEXT // 4 else f"{len(value):,} bytes"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, int | float | complex | Dtype):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        left, right = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        few = ["…"] if nested and value else [short(item, nested=True) for item in itertools.islice(value, _MAX_ITEMS)]
        if len(value) > _MAX_ITEMS:
            few.append(f"… {_items(value)}")
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"{left}{', '.join(few)}{comma}{right}"
    if isinstance(value, Mapping):
        return f"{{… {_items(value)}}}" if value else "{}"
    if isinstance(value, Opaque) and value.global_name.endswith(_SMALL_ARRAY) and isinstance(value.state, tuple):
        return f"NumPy array {short(value.state[1]) if len(value.state) > 1 else '?'}"
    if isinstance(value, Opaque):
        inside = ", ".join(short(item, nested=True) for item in value.args[:_MAX_ITEMS]) if not nested else "…"
        return f"{value.global_name.rpartition('.')[2]}({inside})"
    return str(getattr(value, "global_name", type(value).__name__))
