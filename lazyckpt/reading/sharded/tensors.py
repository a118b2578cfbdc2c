"""Tensors and DTensors in a saved state: which ones ``load_state_dict`` needs, and this rank's shards of them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from lazyckpt.providers import global_state
from lazyckpt.providers.base import Landing
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.optimizer import OptimizerProvider, groups_of
from lazyckpt.reading.sharded.slices import slice_of


def allocate(
    tree: dict[str, Any], parts: Mapping[str, StateProvider], landed: Container[int]
) -> dict[int, torch.Tensor]:
    """Replaces the tensors of ``tree`` that have no memory, except those in ``landed``, by new ones, which are returned
    by the ``id`` of the replaced tensors.

    They are DTensors where the live state, or the parameter that they are the state of, is one: ``load_state_dict``
    takes shards of the whole there. All others are whole, in host memory."""
    made: dict[int, torch.Tensor] = {}
    for name, part in parts.items():
        live: Any = None
        for holder, key, path in tensors_in(tree, name):
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
        for holder, key, path in tensors_in(tree, name):
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
        chunk.local.copy_(slice_of(whole, chunk.offsets, chunk.local.shape))


def _live(part: StateProvider) -> Any:
    """The live state; of an optimizer, its parameters where their state is."""
    if not isinstance(part, OptimizerProvider):
        return part.state()
    parameters = [parameter for group in groups_of(part.obj) for parameter in group["params"]]
    return {"state": dict(enumerate(parameters))}


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    """Returns the object in ``state`` at ``path``; None if there is none."""
    for step in path:
        try:
            state = state[step]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def tensors_in(holder: Any, key: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """Yields each tensor in nested dicts and lists: its container, its key there, and the whole path."""
    value, path = holder[key], (*path, key)
    if isinstance(value, torch.Tensor):
        yield holder, key, path
    elif isinstance(value, dict | list):
        for inner in list(value) if isinstance(value, dict) else range(len(value)):
            yield from tensors_in(value, inner, path)
