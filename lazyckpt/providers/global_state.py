"""The tracked state under names that are the same on every rank: those of torch.distributed.checkpoint.

    model.layers.0.weight                     an entry of a module's ``state_dict()``
    optimizer.state.layers.0.weight.exp_avg   state of an optimizer, by the name of its parameter in the tracked modules
    optimizer.param_groups.0.lr
    scheduler.last_epoch
    rng.3, loader.3                           each rank's own state, by rank

Nested dicts and lists become dotted names, as ``flatten_state_dict`` of torch makes them; the path of each name is kept
(``planner_data``). A dict with keys that are no strings, an empty container and a tuple stay one object, so that
nothing of them is lost.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from lazyckpt import _engine
from lazyckpt.errors import ConfigError
from lazyckpt.providers.fsdp import is_fully_sharded
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.naming import tensors_in
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.optimizer import OptimizerProvider, groups_of, is_as_torchs
from lazyckpt.providers.restorable import UnrestorableError
from lazyckpt.providers.training import LoaderProvider, RngProvider

Path = tuple[str | int, ...]

_SIMPLE = frozenset((int, float, bool, str, type(None)))
# Words that wrappers put into the names of parameters, but not into those of the state dict.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class Leaves(Protocol):
    """A state as its leaves: tensors, DTensors and objects, by path."""

    own: Container[str | int]
    """The first words of the paths whose state differs from rank to rank."""

    def leaves(self) -> dict[Path, Any]:
        """Asks for the state as it is now. Raises ConfigError for a DTensor inside an object."""


class TrackedState:
    """The tracked state of a Checkpointer."""

    def __init__(self, parts: Mapping[str, StateProvider], rank: int, names: NameCache) -> None:
        self.own: Container[str | int] = frozenset(name for name, part in parts.items() if is_own(part))
        self._parts = parts
        self._rank = rank
        self._names = names

    def leaves(self) -> dict[Path, Any]:
        """Also raises UnrestorableError for state that ``restore()`` would not take back."""
        return global_state(self._parts, self._rank, self._names, refuse=True)


class StateDict:
    """A state dict that is the same on all ranks, but for the shards of its DTensors. Its names are those that this
    version of torch.distributed.checkpoint gives it, and looks for when it loads."""

    own: Container[str | int] = ()

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def leaves(self) -> dict[Path, Any]:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        try:
            flat, paths = flatten_state_dict(dict(self._state))
        except ValueError as error:
            raise ConfigError(f"two entries of the state get one name: {error}") from error
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                _refuse_hidden_shards(name, value)
        return {paths[name]: value for name, value in flat.items()}


class Chunk(NamedTuple):
    """The part of a tensor that this rank holds."""

    local: torch.Tensor
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    size: tuple[int, ...]  # of the whole tensor
    group: Any  # see shares.Held
    replica: int
    replicas: int


@functools.lru_cache(maxsize=1 << 17)
def name_of(path: Path) -> str:
    return ".".join(map(str, path))


def holds_shards(part: StateProvider) -> bool:
    """Whether a part has a DTensor, so that several ranks hold the state together. Quick for modules and optimizers;
    of anything else it asks the state."""
    if "torch.distributed.tensor" not in sys.modules or not torch.distributed.is_initialized():
        return False
    if isinstance(part, ModuleProvider):
        return any(map(is_dtensor, part.obj.parameters())) or is_fully_sharded(part.obj)
    if isinstance(part, OptimizerProvider):
        return any(is_dtensor(parameter) for group in groups_of(part.obj) for parameter in group["params"])
    return not is_own(part) and any(map(is_dtensor, global_state({"": part}, 0).values()))


def is_own(part: StateProvider) -> bool:
    """Whether the state of a part differs from rank to rank: random states and positions of loaders."""
    return isinstance(part, RngProvider | LoaderProvider)


class NameCache:
    """The names of the parameters of all tracked modules, from save to save. Holds no tensor."""

    def __init__(self) -> None:
        self._facts: Any = None
        self._names: dict[int, str] = {}

    def names(self, parts: Mapping[str, StateProvider], states: Mapping[str, Any]) -> dict[int, str]:
        """As ``parameter_names``. ``states`` are those of the parts: while the modules have the same parameters under
        the same names there, nothing is asked again."""
        modules = [name for name, part in parts.items() if isinstance(part, ModuleProvider)]
        if not all(_shows_parameters(parts[name]) for name in modules):
            return parameter_names(parts)
        facts = [(name, list(states[name]), list(map(id, states[name].values()))) for name in modules]
        if facts != self._facts:
            self._facts, self._names = facts, parameter_names(parts)
        return self._names


def global_state(
    parts: Mapping[str, StateProvider], rank: int, cache: NameCache | None = None, *, refuse: bool = False
) -> dict[Path, Any]:
    """The leaves of the tracked state: tensors, DTensors and objects, by path. Raises ConfigError for a DTensor inside
    an object; with ``refuse``, UnrestorableError for what its part would not take back."""
    states = {name: part.state() if is_own(part) else _state_of(part) for name, part in parts.items()}
    names = (cache or NameCache()).names(parts, states)
    leaves: dict[Path, Any] = {}
    for name, part in parts.items():
        state = states[name]
        if refuse:
            try:
                part.refuse_untakable(state)
            except UnrestorableError as error:
                raise error.inside(name) from None
        if is_own(part):
            leaves[name, str(rank)] = state
            continue
        if isinstance(part, OptimizerProvider) and is_as_torchs(part.obj, state):
            state = _by_name(state, part.obj, names)
        for path in _engine.add_leaves((name,), state, leaves):
            _refuse_hidden_shards(name_of(path), leaves[path])
    return leaves


def _state_of(part: StateProvider) -> Any:
    if isinstance(part, ModuleProvider) and _shows_parameters(part):
        return part.obj.state_dict(keep_vars=True)  # to detach a DTensor takes 15 us
    return part.state()


def _shows_parameters(part: StateProvider) -> bool:
    """Whether the state of a module can have its parameters themselves."""
    return type(part) is ModuleProvider and type(part.obj).state_dict is torch.nn.Module.state_dict


def parameter_names(parts: Mapping[str, StateProvider]) -> dict[int, str]:
    """The names of the parameters of all tracked modules, by ``id``. With several modules that have equal names, these
    begin with the name of the part."""
    modules = {name: part.obj for name, part in parts.items() if isinstance(part, ModuleProvider)}
    found: dict[int, tuple[str, str]] = {}
    for part, module in modules.items():
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), (part, _plain(name)))
    names = [name for _, name in found.values()]
    apart = len(set(names)) < len(names)
    return {key: f"{part}.{name}" if apart else name for key, (part, name) in found.items()}


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def indices_of(optimizer: Any, names: dict[int, str]) -> dict[str, int]:
    """The numbers that ``optimizer.state_dict()`` gives its parameters, by their names. A parameter that is in no
    tracked module keeps its number as its name."""
    parameters = [parameter for group in groups_of(optimizer) for parameter in group["params"]]
    return {names.get(id(parameter), str(number)): number for number, parameter in enumerate(parameters)}


def _by_name(state: dict[str, Any], optimizer: Any, names: dict[int, str]) -> dict[str, Any]:
    """The state of an optimizer by names instead of numbers, as ``get_optimizer_state_dict`` has it."""
    by_number = {number: name for name, number in indices_of(optimizer, names).items()}
    return {
        **state,
        "state": {by_number.get(number, str(number)): value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [by_number.get(number, str(number)) for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def by_number(state: dict[str, Any], optimizer: Any, names: dict[int, str]) -> dict[str, Any]:
    """Undoes ``_by_name`` for an optimizer of the same parameters."""
    indices: dict[Any, int] = dict(indices_of(optimizer, names))
    return {
        **state,
        "state": {indices.get(name, name): value for name, value in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [indices.get(name, name) for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def is_simple(value: Any) -> bool:
    """Whether a value is one number or text, or a list or tuple of such."""
    return type(value) in _SIMPLE or (type(value) in (list, tuple) and _SIMPLE.issuperset(map(type, value)))


def _refuse_hidden_shards(name: str, value: Any) -> None:
    """Raises ConfigError for a DTensor inside an object: every rank would save another one."""
    for inside, tensor in tensors_in(value, name) if not is_simple(value) else ():
        if is_dtensor(tensor):
            raise ConfigError(
                f"cannot save {inside}: a DTensor inside a {type(value).__name__}; keep DTensors in dicts with "
                "string keys, or in lists"
            )


def unflatten(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The nested dicts and lists whose leaves these are, in any order. Raises ValueError for paths that contradict each
    other, and for lists with gaps."""
    root: dict[Any, Any] = {}
    made: dict[int, tuple[dict[Any, Any], Any]] = {id(root): ({}, None)}  # container -> what holds it, and its key
    for path, value in leaves.items():
        here = root
        for step in path[:-1]:
            if step not in here:
                here[step] = {}
                made[id(here[step])] = here, step
            elif id(here[step]) not in made:
                raise ValueError(f"{name_of(path)} is inside another entry")
            here = here[step]
        if path[-1] in here:
            raise ValueError(f"{name_of(path)} is there twice")
        here[path[-1]] = value
    for holder, key in reversed(made.values()):  # the inner ones first
        inner = holder[key] if holder else root
        if any(type(step) is int for step in inner):
            if not holder or set(inner) != set(range(len(inner))):
                raise ValueError(f"{list(inner)[:10]} number no list")
            holder[key] = [inner[number] for number in range(len(inner))]
    return root


def is_dtensor(value: Any) -> bool:
    return is_dtensor_type(type(value))


def is_dtensor_type(kind: type) -> bool:
    found = getattr(
        sys.modules.get("torch.distributed.tensor"), "DTensor", None
    )  # without the import, no DTensor exists
    return found is not None and issubclass(kind, found)


def chunk_of(tensor: Any) -> Chunk:
    """The chunk of a DTensor that this rank holds. Raises ConfigError if its values are a pending sum."""
    return Chunk(tensor._local_tensor, *_place(tensor._spec))


@functools.lru_cache(maxsize=1 << 16)  # torch lists the rows of a shard to find where it begins
def _place(spec: Any) -> tuple[tuple[int, ...], tuple[int, ...], Any, int, int]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, shape = spec.mesh, tuple(spec.shape)
    if any(how.is_partial() and size > 1 for how, size in zip(spec.placements, mesh.shape, strict=True)):
        raise ConfigError(f"a DTensor with a pending sum ({spec.placements}); redistribute() it before the save")
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, spec.placements)
    coordinate = mesh.get_coordinate()
    replica, replicas = 0, 1
    shards = []
    for dimension, placement in enumerate(spec.placements):
        if placement.is_replicate():
            replica = replica * mesh.size(dimension) + coordinate[dimension]
            replicas *= mesh.size(dimension)
        else:
            shards.append((dimension, coordinate[dimension]))
    return tuple(offsets), shape, (id(mesh), tuple(shards)), replica, replicas
