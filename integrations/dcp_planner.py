"""Plans which rank writes which item: the planner that keeps the plan of a run, and the even shares of dcp.py."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from lazyckpt.errors import ConfigError

_DIGEST_BYTES = 8


class LazySavePlanner(DefaultSavePlanner):
    """Plans the first save of a run, and afterwards only tells the coordinator that the plan is as before.

        planner = LazySavePlanner()  # once, on every rank
        dcp.async_save(state, storage_writer=LazyStorageWriter(path), planner=planner, process_group=gloo)

    Planning takes a good part of a second for hundreds of tensors, and more with the number of ranks. Keep one planner
    for one process group: the coordinator must be the same. A rank whose state has changed plans again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._local: SavePlan | None = None  # the plan of this rank that the coordinator got last
        self._final: SavePlan | None = None  # and what came back
        self._is_known = False  # whether the coordinator has planned with it
        self._of_ranks: list[SavePlan] = []  # on the coordinator
        self._metadata: Metadata | None = None

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        as_before = self._is_known and plan == self._local
        self._is_known, self._local = False, plan
        return dataclasses.replace(plan, planner_data=AsBefore()) if as_before else plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        changed = [not isinstance(plan.planner_data, AsBefore) for plan in all_plans]
        if not all(changed) and len(self._of_ranks) != len(all_plans):
            raise ConfigError("a rank keeps a plan that this coordinator does not have: one planner, one process group")
        if any(changed):
            known = all_plans if all(changed) else self._of_ranks  # all plans are new after a change of the group, too
            plans = [new if is_new else old for new, old, is_new in zip(all_plans, known, changed, strict=True)]
            self._of_ranks = [dataclasses.replace(plan, storage_data=None) for plan in plans]
            offers = (plan.storage_data for plan in all_plans)
            plans = [dataclasses.replace(plan, storage_data=offer) for plan, offer in zip(plans, offers, strict=True)]
            all_plans, self._metadata = super().create_global_plan(plans)
        assert self._metadata is not None
        return all_plans, dataclasses.replace(self._metadata)  # the code that saves adds to it

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if isinstance(new_plan.planner_data, AsBefore):
            assert self._final is not None
            new_plan = dataclasses.replace(self._final, storage_data=new_plan.storage_data)
        self._final, self._is_known = new_plan, True
        return super().finish_plan(new_plan)

    def release(self) -> None:
        """Drops the references to the state. The writer calls it when all items are resolved."""
        self.state_dict = {}


class AsBefore:
    """Takes the place of ``planner_data`` in a plan that the coordinator has."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """The items that a rank can write; goes with its local plan to the coordinator."""

    folder: str  # its final name
    held: bytes  # the digests of the items, one behind the other
    forms: bytes  # the form_digests of all items of the state, one behind the other


def digest(index: MetadataIndex) -> bytes:
    return _digest((index.fqn, None if index.offset is None else tuple(index.offset)))


def form_digests(item: WriteItem) -> bytes:
    """The digests of an item's name, and of the name with the properties that must be equal on all ranks that have
    it."""
    return _digest(item.index.fqn) + _digest((item.index.fqn, _form(item)))


def _digest(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=_DIGEST_BYTES).digest()


def _form(item: WriteItem) -> str:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return "an object"
    return f"a {item.tensor_data.properties.dtype} tensor of {tuple(item.tensor_data.size)}"


def refuse_other_forms(plans: list[SavePlan]) -> None:
    """Raises ConfigError if an entry of the state has another dtype or size on another rank: DCP would save one of
    them, or parts of both. Each plan's ``storage_data`` is the rank's offer."""
    ranks = {plan.storage_data.forms: rank for rank, plan in enumerate(plans)}  # most ranks tell the same
    told = {rank: _numbers(forms).view(-1, 2) for forms, rank in ranks.items()}
    names, forms = torch.cat(list(told.values())).unbind(1)
    if len(names.unique()) == len(forms.unique()):
        return
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, form = _numbers(form_digests(item)).tolist()
            for other, of_rank in told.items():
                if (of_rank[of_rank[:, 0] == name, 1] != form).any():
                    raise ConfigError(f"{item.index.fqn} is {_form(item)} on rank {rank}, but not on rank {other}")


def balanced(plans: list[SavePlan]) -> list[SavePlan]:
    """Moves items that several ranks can write, so that all write about the same number of bytes.

    DCP's own rule counts the size of the whole tensor for each of its shards. Each plan's ``storage_data`` is the
    rank's offer. Moves an item also to the only rank that can write it, and leaves it where it is if none can."""
    held = [_numbers(plan.storage_data.held) for plan in plans]
    planned = [_numbers(b"".join(digest(item.index) for item in plan.items)) for plan in plans]
    numbers, counts = torch.cat(held).unique(return_counts=True)
    displaced = [mine[~torch.isin(mine, can)] for mine, can in zip(planned, held, strict=True)]
    movable = torch.cat([numbers[counts > 1], *displaced]).unique()
    holders: dict[int, list[int]] = {number: [] for number in movable.tolist()}
    for rank, can in enumerate(held):
        for number in can[torch.isin(can, movable)].tolist():
            holders[number].append(rank)
    load = [0] * len(plans)
    stay: list[list[WriteItem]] = [[] for _ in plans]
    moving: dict[int, WriteItem] = {}
    for rank, (plan, mine) in enumerate(zip(plans, planned, strict=True)):
        for item, number in zip(plan.items, mine.tolist(), strict=True):
            if holders.get(number):
                moving[number] = item
            else:
                stay[rank].append(item)
                load[rank] += _bytes_of(item)
    for number, item in sorted(moving.items(), key=lambda pair: -_bytes_of(pair[1])):
        rank = min(holders[number], key=load.__getitem__)
        stay[rank].append(item)
        load[rank] += _bytes_of(item)
    return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, stay, strict=True)]


def _numbers(digests: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(digests), dtype=torch.int64) if digests else torch.empty(0, dtype=torch.int64)


def _bytes_of(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return 1  # a pickle, of unknown size
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
