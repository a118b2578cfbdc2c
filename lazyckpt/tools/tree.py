"""Arranges a saved object as a tree of modules, tensors and values, with the bytes of each.

Names are split at dots: ``model["h.0.attn.weight"]`` becomes ``model / h / 0 / attn / weight``. Like ``du`` with hard
links, the tree counts a storage where it first appears, so the sums add up to the size of the file's contents.

The object may come from a hostile pickle. The tree opens a shared or cyclic container once, limits the depth, and
shortens every value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeVar

from lazyckpt.conversion.inert import InertObject, InertStorage, InertTensor, dtype_name, strides_of
from lazyckpt.formats.dtypes import DTYPES, Dtype

MAX_DEPTH = 32
Kind = Literal["module", "tensor", "value"]
_MAX_CHARACTERS = 64 << 20  # all paths together
_MAX_TEXT = 60
_MAX_ITEMS = 6
_SMALL_ARRAY = "multiarray._reconstruct"  # the function by which NumPy pickles an array with its bytes


@dataclass
class Node:
    """A module, a tensor or a value in a saved object.

    Attributes:
        name: Its key.
        path: The keys that lead to it, joined by dots.
        kind: "module", "tensor" or "value".
        depth: The number of keys in ``path``; 0 at the root.
        nbytes: Bytes in the file, of all children too. A storage counts where it first appears.
        tensors: How many tensors it holds.
        dtype: Element type of a tensor, such as "float32".
        shape: Shape of a tensor.
        text: A value, shortened; the class of an object with children.
        note: How a tensor shares its memory, its type if not a plain tensor, or the files that hold its parts.
        tied_to: The path of the tensor that this one is another name of.
        storage: The file and record that hold a tensor's storage, or its shards.
        value: The saved object, as ``read_inert`` returns it.
        stats: Statistics of a tensor (``tools.stats.Stats``), if requested.
        children: The entries of a module.
    """

    name: str
    path: str
    kind: Kind
    depth: int
    nbytes: int = 0
    tensors: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    text: str = ""
    note: str = ""
    tied_to: str | None = None
    storage: InertStorage | None = None
    value: Any = None
    stats: Any = None
    children: list[Node] = field(default_factory=list)

    def __repr__(self) -> str:
        about = (
            f"{self.dtype} {shown_shape(self.shape)}"
            if self.kind == "tensor"
            else self.text or f"{self.tensors} tensors"
        )
        return f"Node({self.path!r}, {self.kind}, {about}, {self.nbytes} bytes)"

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


class Tree:
    """Builds the tree of ``obj``, as ``read_inert`` returned it; ``root`` is its top.

    Raises ValueError if its paths take too much memory.
    """

    def __init__(self, name: str, obj: Any) -> None:
        self._opened: dict[int, str] = {}  # id of a container, which lives as long as obj -> its path
        self._modules: dict[tuple[int, str], Node] = {}  # (id of the parent, name) -> module
        self._storages: dict[Any, tuple[str, Any]] = {}  # (file, record) -> path and view of its first tensor
        self._room = _MAX_CHARACTERS
        self.root = Node(name, "", "module", 0)
        container = _contents(obj)
        if container:
            self._open(self.root, obj, container)
        else:
            self.root.children.append(self._node("(object)", "(object)", 1, obj))
        _sum(self.root)

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
                self._modules.setdefault((id(module), name), node)

    def _path(self, parent: Node, name: str) -> str:
        """Raises ValueError if all paths together are too long, as with one long name above many short ones."""
        path = f"{parent.path}.{name}" if parent.path else name
        self._room -= len(path) + len(name)
        if self._room < 0:
            raise ValueError("its names are too long, or too many")
        return path

    def _module(self, parent: Node, name: str) -> Node:
        module = self._modules.get((id(parent), name))
        if module is None:
            module = Node(name, self._path(parent, name), "module", parent.depth + 1)
            self._modules[id(parent), name] = module
            parent.children.append(module)
        return module

    def _node(self, name: str, path: str, depth: int, value: Any) -> Node:
        if isinstance(value, InertObject) and (array := _numpy_array(value)) is not None:
            value = array
        if isinstance(value, InertStorage):
            dtype = value.dtype or DTYPES["uint8"]
            value = InertTensor(dtype_name(dtype), (value.record.nbytes // dtype.itemsize,), 0, (1,), value, "storage")
        if isinstance(value, InertTensor):
            return self._tensor(name, path, depth, value)
        container = _contents(value)
        if not container:
            return Node(name, path, "value", depth, text=short(value), value=value)
        if id(value) in self._opened:
            return Node(name, path, "value", depth, text=f"the same object as {self._opened[id(value)]}")
        if depth >= MAX_DEPTH:
            return Node(name, path, "value", depth, text="nested too deep to be shown")
        node = Node(name, path, "module", depth)
        if isinstance(value, InertObject):
            node.text = value.global_name.rpartition(".")[2].removeprefix("_rebuild_")
        self._open(node, value, container)
        return node

    def _tensor(self, name: str, path: str, depth: int, tensor: InertTensor) -> Node:
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
            if node.storage.shards is not None and not tensor.kind:
                node.note = str(node.storage.shards)
            elif tensor.nbytes < record.nbytes and not tensor.kind:
                node.note = f"a view: {tensor.nbytes:,} bytes of {record.nbytes:,}"
        elif first[1] == view:
            node.tied_to = first[0]
            node.note = f"tied to {first[0]}"
        else:
            node.note = f"shares memory with {first[0]}"
        return node


def _contents(value: Any) -> Mapping[Any, Any]:
    """Returns the contents of ``value`` if they deserve rows of their own, else nothing."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value)) if any(map(_is_nested, value)) else {}
    if not isinstance(value, InertObject):
        return {}
    state = value.state
    if isinstance(state, dict) and isinstance(state.get("_modules"), dict):  # a torch.nn.Module, saved whole
        parts = [state.get(part) for part in ("_parameters", "_buffers", "_modules")]
        return {k: v for part in parts if isinstance(part, dict) for k, v in part.items() if v is not None}
    if value.global_name.endswith(_SMALL_ARRAY):
        return {}
    # Show all attributes of an object, but only the nested arguments of a function.
    given = {key: item for key, item in enumerate(value.args) if _is_nested(item)}
    attributes = state if isinstance(state, dict) else {} if state is None else {"state": state}
    found = {**given, **dict(enumerate(value.members, len(value.args))), **value.entries, **attributes}
    return found if any(map(_is_nested, found.values())) else {}


def _is_nested(value: Any) -> bool:
    return isinstance(value, InertTensor | InertStorage | InertObject) or (
        isinstance(value, Mapping | list | tuple) and bool(value)
    )


def _numpy_array(value: InertObject) -> InertTensor | None:
    """Recognizes a large array as lazyckpt writes it, its bytes in a record: ndarray(shape, dtype, asarray(tensor))."""
    if value.global_name != "numpy.ndarray" or len(value.args) < 3:
        return None
    shape, dtype, memory = value.args[:3]
    tensor = memory.args[0] if isinstance(memory, InertObject) and memory.args else None
    if not isinstance(tensor, InertTensor) or not isinstance(shape, tuple) or not isinstance(dtype, InertObject):
        return None
    kind = dtype.args[0] if dtype.args else None
    try:
        return InertTensor(
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


NodeT = TypeVar("NodeT", bound=Any)  # with a name, a kind and children of its own type


def rows(node: NodeT, depth: int | None, level: int = 1) -> Iterator[tuple[int, str, NodeT]]:
    """Yields the level, label and node of each entry below ``node``, parents first, ``depth`` levels or all.

    A module with one child shares its row: ``h.0.attn`` instead of three rows of the same size.
    """
    for child in node.children if depth is None or level <= depth else ():
        label = child.name
        while child.kind == "module" and len(child.children) == 1:
            (child,) = child.children
            label += f".{child.name}"
        yield level, label, child
        yield from rows(child, depth, level + 1)


def shown_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def short(value: Any, *, nested: bool = False) -> str:
    """Shows a value in a few characters, without the contents of containers inside a container."""
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
        few = ["…"] if nested and value else [short(item, nested=True) for item in islice(value, _MAX_ITEMS)]
        if len(value) > _MAX_ITEMS:
            few.append(f"… {_items(value)}")
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"{left}{', '.join(few)}{comma}{right}"
    if isinstance(value, Mapping):
        return f"{{… {_items(value)}}}" if value else "{}"
    if not isinstance(value, InertObject):
        return str(getattr(value, "global_name", type(value).__name__))
    if value.global_name.endswith(_SMALL_ARRAY) and isinstance(value.state, tuple):
        return f"NumPy array {short(value.state[1]) if len(value.state) > 1 else '?'}"
    inside = "…" if nested else ", ".join(short(item, nested=True) for item in value.args[:_MAX_ITEMS])
    return f"{value.global_name.rpartition('.')[2]}({inside})"


def _items(value: Any) -> str:
    return f"{len(value):,} item{'s' * (len(value) != 1)}"
