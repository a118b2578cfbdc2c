"""Redirects the files that a framework or a user's hook writes with safetensors into a staged folder.

``save_file`` returns at once, and the tensors are captured when the folder is saved, soon after. The file holds the
values that ``save_file`` was given, even if the hook swaps the weights back in between: inside ``safetensors_into``,
every operation of torch that writes to such a tensor first keeps its old values.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lazyckpt
from lazyckpt.gate.gate import gate
from lazyckpt.providers.ranges import overlaps
from lazyckpt.providers.wrappers import storages_in

# Where libraries have the function, beside its own module.
_NAMES = (
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)


class _File(NamedTuple):
    name: str  # that it was given first
    obj: Any
    metadata: Mapping[str, str] | None


class _Given(NamedTuple):
    """A tensor that ``save_file`` was given, with its version and its address at that time."""

    tensors: dict[str, torch.Tensor]
    key: str
    version: int
    address: int

    def changed(self) -> bool:
        """Whether it was written to, or got other memory, after its values could be kept."""
        tensor = self.tensors[self.key]
        return _version(tensor) != self.version or tensor.untyped_storage().data_ptr() != self.address


class Redirected:
    """The objects that go into a staged folder instead of into files under ``root``.

    The gate treats it as a pending copy: it keeps the values before an optimizer of another thread steps, and before a
    storage frees its memory.
    """

    def __init__(self, staged: lazyckpt.StagedFolder, root: str | os.PathLike[str]) -> None:
        self._staged = staged
        self._root = os.path.abspath(root)
        self._files: dict[bytes, _File] = {}  # by placeholder
        self._taken: dict[int, list[_Given]] = {}  # by storage: tensors that may still change
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage: an alias, and its original
        self._lock = threading.RLock()  # a second writer waits until the first has kept the values

    def name(self, file: Any) -> str | None:
        """Returns the name of ``file`` in the folder; None if it goes elsewhere."""
        path = os.path.abspath(file) if isinstance(file, str | os.PathLike) else ""
        return os.path.relpath(path, self._root) if path.startswith(self._root + os.sep) else None

    def add(self, name: str, obj: Any, metadata: Mapping[str, str] | None = None) -> None:
        """Makes ``obj`` the content of the file. A placeholder shows where a hook moves or copies it."""
        path = os.path.join(self._root, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        placeholder = f"lazyckpt writes this file when its folder is saved: {uuid.uuid4().hex}\n".encode()
        with open(path, "xb") as file:
            file.write(placeholder)
        self._files[placeholder] = _File(name, obj, metadata)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same memory, with a storage that begins and ends with it, like a clone's. In
        ``save_file`` it counts as a part of the original storage. ``tensor`` is contiguous."""
        begin = tensor.storage_offset() * tensor.itemsize
        storage = tensor.untyped_storage()[begin : begin + tensor.nbytes]
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())
        self._lent[_storage(alias)] = alias, tensor.detach()
        return alias

    def _original(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a lent tensor, or a view of one, shows of the original storage; any other tensor as it is."""
        if (lent := self._lent.get(_storage(tensor))) is None:
            return tensor.detach()
        _, original = lent
        if original.dtype is not tensor.dtype:
            return tensor.clone()
        offset = original.storage_offset() + tensor.storage_offset()
        return original.as_strided(tensor.shape, tensor.stride(), offset)

    def add_tensors(self, tensors: Any, filename: Any, metadata: Any) -> bool:
        """Takes the arguments of ``save_file``; returns False if safetensors must write the file or raise its error."""
        name = self.name(filename)
        # The staged folder tells the format by the name.
        if (
            name is None
            or not name.endswith(".safetensors")
            or not os.path.isdir(os.path.dirname(os.path.join(self._root, name)))
        ):
            return False
        if not _are_plain(tensors, metadata):
            return False
        if overlaps(tensors):
            return False
        taken = {key: self._original(tensor) for key, tensor in tensors.items()}  # these keep their memory
        self.add(name, taken, metadata)
        with self._lock:
            for key, tensor in taken.items():
                self._taken.setdefault(_storage(tensor), []).append(
                    _Given(taken, key, _version(tensor), tensor.untyped_storage().data_ptr())
                )
        return True

    def keep(self, storage: int) -> None:
        """Copies the tensors given to ``save_file`` into host memory, before their storage is written to."""
        if storage in self._lent:
            storage = _storage(self._lent[storage][1])
        with self._lock:
            for given in self._taken.get(storage, ()):
                given.tensors[given.key] = given.tensors[given.key].to("cpu", copy=True)
            self._taken.pop(storage, None)

    # the gate's protocol for a pending copy

    def wait(self, owner: object) -> None:
        self.wait_all()  # the owner may change any of the tensors

    def wait_all(self) -> None:
        for storage in list(self._taken):
            self.keep(storage)

    def wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        self.keep(int(storage._cdata))

    def give_verdict(self) -> None:
        pass  # no thread waits for this one

    def is_held(self) -> bool:
        return False  # no background thread needs the lock

    def stage(self) -> None:
        """Hands the staged folder every file whose placeholder is there, under the name that it has now.

        Raises TornSnapshotError if a tensor was written to where ``keep`` did not see it.
        """
        changed = {id(given.tensors): given.key for at in self._taken.values() for given in at if given.changed()}
        for name, file in self._files_left():
            if id(file.obj) in changed:
                raise lazyckpt.TornSnapshotError(
                    f"{changed[id(file.obj)]!r} in {name} was written to after save_file, by another thread. "
                    "Save the file when that is over, or give save_file a clone",
                    path=self._root,
                )
            path = os.path.join(self._root, name)
            os.unlink(path)
            if name.endswith(".safetensors") == file.name.endswith(".safetensors"):
                self._staged.add(name, file.obj, file.metadata)
            elif file.name.endswith(".safetensors"):  # the staged folder would write the other format
                safetensors.torch.save_file(file.obj, path, file.metadata)
            else:
                torch.save(file.obj, path)

    def _files_left(self) -> list[tuple[str, _File]]:
        """Finds the placeholders under ``root``, in the order in which they were written."""
        left: dict[bytes, list[str]] = {placeholder: [] for placeholder in self._files}
        sizes = set(map(len, left))
        for folder, _, names in os.walk(self._root) if left else ():
            for path in (os.path.join(folder, name) for name in sorted(names)):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_size in sizes:
                    with open(path, "rb") as file:
                        left.get(file.read(), []).append(os.path.relpath(path, self._root))
        return [(name, self._files[placeholder]) for placeholder, names in left.items() for name in names]


@contextlib.contextmanager
def safetensors_into(
    staged: lazyckpt.StagedFolder | None, root: str | os.PathLike[str], *namespaces: MutableMapping[str, Any]
) -> Iterator[Redirected | None]:
    """A context in which files that safetensors would write under ``root`` go into ``staged``, at the end; None
    redirects nothing. Also replaces ``save_file`` in ``namespaces``, whatever its name there."""
    if staged is None:
        yield None
        return
    redirected = Redirected(staged, root)
    add_tensors: Callable[..., bool] | None = redirected.add_tensors
    original = safetensors.torch.save_file

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if add_tensors is None or not add_tensors(tensors, filename, metadata):
            original(tensors, filename, metadata)

    places: list[tuple[MutableMapping[str, Any], str]] = [(vars(safetensors.torch), "save_file")]
    places += [(vars(module), name) for path, name in _NAMES if (module := sys.modules.get(path)) is not None]
    places += [(names, name) for names in namespaces for name, value in names.items() if value is original]
    replaced = [(names, name, names[name]) for names, name in places if name in names]
    try:
        try:
            for names, name, _ in replaced:
                names[name] = save_file
            gate.add(redirected)
            with torch.compiler.set_stance("force_eager"), _KeepsOldValues(redirected):
                yield redirected
        finally:
            gate.discard(redirected)
            for names, name, before in reversed(replaced):
                names[name] = before
        redirected.stage()
    finally:
        add_tensors = None  # a module that was first imported in here has our save_file for good


class _KeepsOldValues(TorchDispatchMode):
    """Sees every operation of torch on this thread, through ``.data`` and in other libraries too.

    Compiled functions run eagerly meanwhile, since their kernels write without an operation of torch.
    """

    supports_higher_order_operators = True

    def __init__(self, redirected: Redirected) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._redirected = redirected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # an operator of higher order, which may write to any of its arguments
            self._keep(tree_leaves((args, kwargs)))
        elif func._schema.is_mutable:
            for value in _written(func._schema.arguments, args, kwargs):
                self._keep(value)
        return func(*args, **kwargs)

    def _keep(self, value: Any) -> None:
        """Keeps the values of all storages in ``value``; of all files, if ``value`` does not show its storages."""
        for tensor in value if isinstance(value, list | tuple) else [value]:
            storages = [storage for level in storages_in([tensor]) for storage in level.identities]
            if isinstance(tensor, torch.Tensor) and not storages:
                self._redirected.wait_all()
            for storage in storages:
                self._redirected.keep(storage)


def _written(arguments: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yields the arguments that an operation writes to."""
    for at, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[at] if at < len(args) else kwargs.get(argument.name)


def _are_plain(tensors: Any, metadata: Any) -> bool:
    """Whether safetensors would write exactly what lazyckpt writes, and refuse nothing."""
    strings = metadata is None or all(isinstance(text, str) for pair in dict(metadata).items() for text in pair)
    return (
        strings
        and isinstance(tensors, dict)
        and all(
            isinstance(key, str)
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg())
            and tensor.is_contiguous()
            and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes
            for key, tensor in tensors.items()
        )
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
