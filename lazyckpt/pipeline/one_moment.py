"""Proves that the pickles of a save are of the moment at which the engine took the bytes of the tensors.

Only code that interrupts the thread can run between the two: a signal handler, a destructor. If there are signs of it,
the save collects the state once more, and it must not have changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lazyckpt import devices
from lazyckpt.capture.instant import Instant
from lazyckpt.capture.sources import Sources
from lazyckpt.errors import TornSnapshotError
from lazyckpt.formats.program import Extent
from lazyckpt.gate.gate import gate
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.plan import FilePlan
from lazyckpt.providers.base import TensorViews

_MAX_NAMES = 5  # of tensors in a message


def check(
    instant: Instant,
    plans: Mapping[str, FilePlan],
    sources: Sources,
    programs: list[tuple[list[Extent], int]],
    handle: SaveHandle,
) -> None:
    """Raises TornSnapshotError if something wrote to the state inside ``save()``. Call it when the gate guards the
    snapshot."""
    if (owner := gate.stepped_inside()) is not None:
        raise _torn(f"{owner} stepped", handle)
    moved = instant.moved()
    if not moved and not instant.was_interrupted():
        return
    files = zip(plans.values(), sources.files, programs, strict=True)
    if any(not _is_the_same(plan, file, extents, moved) for plan, file, (extents, _) in files):
        raise _torn(f"{_names(moved, plans)} changed", handle)


def _torn(what: str, handle: SaveHandle) -> TornSnapshotError:
    return TornSnapshotError(
        f"{what} inside save(): a signal handler or a callback that ran on its thread wrote to the state. Let it set a "
        "flag, and write when save() has returned",
        path=handle.path,
        step=handle.step,
    )


def _names(moved: list[torch.Tensor], plans: Mapping[str, FilePlan]) -> str:
    names = dict.fromkeys(plan.name_of(tensor.untyped_storage()) for tensor in moved for plan in plans.values())
    known = [name for name in names if name is not None]
    more = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
    return ", ".join(known[:_MAX_NAMES]) + more or "an object in the state"


def _is_the_same(plan: FilePlan, file: TensorViews, extents: list[Extent], moved: list[torch.Tensor]) -> bool:
    """Whether the state of a file is as it was when it was collected, apart from the bytes that the engine took at one
    moment."""
    if any(tensor.device.type not in ("cpu", "cuda") for tensor in moved):  # torch copied these earlier
        return False
    again = plan.again()
    if again is None:
        return not moved
    now = again.gather()
    places = {key: at for at, key in enumerate(now.keys)}
    if len(now) != len(file) or places.keys() != set(file.keys):
        return False
    now = now.take([places[key] for key in file.keys])
    if again.lay_out(now)[0] != extents or now.offsets != file.offsets:
        return False
    others = zip(now.storages, file.storages, now.identities, file.identities, strict=True)
    return all(
        _have_equal_bytes(a, b) for a, b, at, before in others if at != before
    )  # new at every call, such as random states


def _have_equal_bytes(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    one, other = (torch.empty(0, dtype=torch.uint8).set_(devices.on_host(storage)) for storage in (a, b))
    return torch.equal(one, other)
