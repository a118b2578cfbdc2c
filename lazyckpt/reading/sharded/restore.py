"""Restores the folder that many ranks wrote, on any number of ranks, into tensors that are sharded in any way.

``.metadata`` says which parts of each tensor lie where. From it comes the saved state as a tree, with tensors that have
a shape and no memory; so every check and every argument of ``restore()`` works as for a single file. Then each rank
reads the parts that its own shards overlap with, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lazyckpt import _engine
from lazyckpt.errors import CorruptFileError, LoadError, RestoreError
from lazyckpt.providers import global_state
from lazyckpt.providers.base import Landing
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.optimizer import OptimizerProvider, groups_of
from lazyckpt.providers.training import LoaderProvider
from lazyckpt.ranks.team import Team
from lazyckpt.reading.fit import Fitting, hand_over, misfit
from lazyckpt.reading.hint import hint
from lazyckpt.reading.ranges import process_engine
from lazyckpt.reading.sharded.folder import Folder, Target
from lazyckpt.reading.sharded.shards import part_of
from lazyckpt.warn import warn


class Shards:
    """A checkpoint that fits, on its way into the tracked state of this rank."""

    def __init__(self, path: Path, fitting: Fitting, team: Team) -> None:
        """Checks everything, and touches nothing. Raises LoadError for what is damaged, RestoreError for what does not
        fit."""
        self._folder = folder = Folder(path)
        own = _own_state(folder, fitting, team)
        tree, self._names = _tree(folder, own, folder.read_object)
        fitting.by_name = True
        try:
            self._tree = tree if fitting.choose is None else fitting.choose(tree)
            self._provider = fitting.provider
            landings = fitting.landings(self._tree)
            # Others, such as sparse ones, were read as objects, and entries that the checkpoint lacks are live ones.
            self._landed = {id(it.saved): it.live for it in landings if id(it.saved) in self._names}
        except Exception as error:
            raise misfit(path, error, hint(fitting, fitting.saved)) from (
                None if isinstance(error, RestoreError) else error
            )

    def restore(self, engine: _engine.Engine) -> None:
        """Reads the parts that this rank needs, and hands them over. Raises LoadError, RestoreError."""
        places = self._landed | allocate(self._tree, self._provider.parts, self._landed)
        self._folder.read([_target(self._names[key][0], place) for key, place in places.items()], engine)
        hand_over(self._provider, self._tree, self._landed, self._folder.path)


def load_shards(
    path: Path, device: torch.device, choose: Callable[[Any], Any], *, key: str | None, weights_only: bool
) -> Any:
    """Returns the part that ``choose`` takes of the saved state, its tensors whole and on ``device``. Reads only that
    part, which is at ``key`` or below. What each rank had of its own is a dict by rank. Raises LoadError, and what
    ``choose`` raises."""
    folder = Folder(path)

    def is_needed(name: str) -> bool:
        return key is None or f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")

    tree, names = _tree(
        folder, {}, lambda name: folder.read_object(name, weights_only=weights_only) if is_needed(name) else None
    )
    holder = {"": choose(tree)}
    made: dict[Any, torch.Tensor] = {}  # tensors that were one stay one
    places: dict[str, torch.Tensor] = {}
    for inner, at, _ in _tensors_in(holder, ""):
        if (known := names.get(id(inner[at]))) is not None:
            name, saved = known
            same = folder.entries[name].sameness
            if same not in made:
                made[same] = places[name] = _new(saved, device, path)
            inner[at] = made[same]
    if device.type != "meta":
        folder.read([_target(name, place) for name, place in places.items()], process_engine())
    return holder[""]


def _new(like: torch.Tensor, device: torch.device, path: Path) -> torch.Tensor:
    """Raises LoadError if there is no memory on the host for a tensor of this shape and dtype."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LoadError(f"torch cannot hold these tensors: {error}", path=path) from error


def _own_state(folder: Folder, fitting: Fitting, team: Team) -> dict[str, int]:
    """The rank whose state this rank takes, by the names of the parts that every rank has of its own.

    In a world of the size that was saved each rank takes its own. In another one the random states go to the ranks that
    were there, and the others keep theirs: equal states would give equal dropout masks. Loaders stay as they are, since
    another number of ranks hands out other batches."""
    taken: dict[str, int] = {}
    left: list[str] = []
    saved_by = 0
    for name, part in fitting.provider.parts.items():
        source = fitting.sources.get(name, name)
        ranks = {str(e.path[1]) for e in folder.entries.values() if e.path[0] == source and global_state.is_own(part)}
        if not ranks:
            continue  # nobody's own; or not in the checkpoint, which is an error below
        if len(ranks) == team.world_size or (str(team.rank) in ranks and not isinstance(part, LoaderProvider)):
            taken[source] = team.rank
        else:
            left.append(name)
        saved_by = len(ranks)
    if saved_by not in (0, team.world_size):
        stays = f"; {', '.join(left)} of rank {team.rank} stays as it is" if left else ""
        warn(
            f"{folder.path} was saved by {saved_by} ranks, and {team.world_size} restore it, so training will not go "
            f"on exactly as before: random states go to the ranks that were there, loaders begin a new epoch{stays}"
        )
    fitting.leave(left)
    return taken


def _tree(
    folder: Folder, own: dict[str, int], read_object: Callable[[str], Any]
) -> tuple[dict[str, Any], dict[int, tuple[str, torch.Tensor]]]:
    """The saved state, its tensors on the meta device, and these with their names by ``id``."""
    leaves: dict[global_state.Path, Any] = {}
    names: dict[int, tuple[str, torch.Tensor]] = {}  # the tensors, so that no id comes back
    of_ranks: dict[str, Any] = {}
    for name, entry in folder.entries.items():
        if entry.path[0] in own:
            if entry.path[1:] == (str(own[entry.path[0]]),):
                of_ranks[entry.path[0]] = read_object(name)
        elif not entry.is_tensor:
            leaves[entry.path] = read_object(name)
        else:
            size, dtype = entry.described.size, entry.described.properties.dtype
            leaves[entry.path] = tensor = torch.empty(size, dtype=dtype, device="meta")
            names[id(tensor)] = name, tensor
    try:
        return global_state.unflatten(leaves) | of_ranks, names
    except ValueError as error:
        raise CorruptFileError(f".metadata: {error}", path=folder.path) from error


def _target(name: str, live: Any) -> Target:
    if global_state.is_dtensor(live):
        chunk = global_state.chunk_of(live)
        return Target(name, chunk.offsets, chunk.local)
    return Target(name, (0,) * live.dim(), live)


def allocate(
    tree: dict[str, Any], parts: Mapping[str, StateProvider], landed: Container[int]
) -> dict[int, torch.Tensor]:
    """Replaces the tensors of ``tree`` that have no memory, except those in ``landed``, by new ones, which are returned
    by the ``id`` of what they replace.

    They are DTensors where the live state, or the parameter that they are the state of, is one: ``load_state_dict``
    takes shards of the whole there. All others are whole, in host memory."""
    made: dict[int, torch.Tensor] = {}
    for name, part in parts.items():
        live: Any = None
        for holder, key, path in _tensors_in(tree, name):
            saved = holder[key]
            if not saved.is_meta or id(saved) in landed:
                continue
            if live is None:
                live = _live(part)
            like = _at(live, path[1:3] if isinstance(part, OptimizerProvider) else path[1:])
            if global_state.is_dtensor(like) and like.shape == saved.shape:
                new = torch.empty_like(like, dtype=saved.dtype, requires_grad=False)
            else:
                new = torch.empty(saved.shape, dtype=saved.dtype)
            made[id(saved)] = holder[key] = new
    return made


def scatter(
    tree: dict[str, Any], landings: Sequence[Landing], provider: CompositeProvider | StateProvider
) -> dict[int, torch.Tensor]:
    """Copies this rank's parts of the whole tensors in ``tree`` into the live DTensors of ``landings``, which are
    returned by the ``id`` of the saved ones. Other tensors of ``tree`` become DTensors where ``load_state_dict`` needs
    them."""
    landed: dict[int, torch.Tensor] = {}
    for landing in landings:
        if not global_state.is_dtensor(landing.saved):  # else it is the live one, which the checkpoint lacks
            _copy_part(landing.saved, landing.live)
            landed[id(landing.saved)] = landing.live
    for name, part in provider.parts.items() if isinstance(provider, CompositeProvider) else ():
        live = _live(part)
        for holder, key, path in _tensors_in(tree, name):
            saved = holder[key]
            like = _at(live, path[1:3] if isinstance(part, OptimizerProvider) else path[1:])
            if id(saved) in landed or global_state.is_dtensor(saved):
                continue
            if global_state.is_dtensor(like) and like.shape == saved.shape:
                holder[key] = torch.empty_like(like, dtype=saved.dtype, requires_grad=False)
                _copy_part(saved, holder[key])
    return landed


def _copy_part(whole: torch.Tensor, live: Any) -> None:
    chunk = global_state.chunk_of(live)
    with torch.no_grad():
        chunk.local.copy_(part_of(whole, chunk.offsets, chunk.local.shape))


def _live(part: StateProvider) -> Any:
    """The live state; of an optimizer, its parameters where their state is."""
    if not isinstance(part, OptimizerProvider):
        return part.state()
    parameters = [parameter for group in groups_of(part.obj) for parameter in group["params"]]
    return {"state": dict(enumerate(parameters))}


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    """What ``state`` holds at ``path``; None if there is nothing."""
    for step in path:
        try:
            state = state[step]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def _tensors_in(holder: Any, key: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """The places of the tensors in nested dicts and lists: what holds each, under which key, and the whole path."""
    value, path = holder[key], (*path, key)
    if isinstance(value, torch.Tensor):
        yield holder, key, path
    elif isinstance(value, dict | list):
        for inner in list(value) if isinstance(value, dict) else range(len(value)):
            yield from _tensors_in(value, inner, path)
