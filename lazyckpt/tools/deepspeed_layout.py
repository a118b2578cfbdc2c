"""Tells which files DeepSpeed writes into the folder of a tag, and which of them are not there.

    mp_rank_00_model_states.pt                       weights; without ZeRO the optimizer, too
    zero_pp_rank_0_mp_rank_00_model_states.pt        instead with stage 3, for each rank
    bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt   with ZeRO, for each rank
    layer_03-model_states.pt                         for each layer of a pipeline that has weights
    layer_0_expert_3_mp_rank_00_model_states.pt      for each expert
    expp_rank_0_mp_rank_00_optim_states.pt           without ZeRO, for each rank of the experts
    zero/0.weight/fp32.pt                            for each parameter, if ds_to_universal made the folder

There is no manifest: the names follow from what a model file says of the job. Two things are recorded nowhere: the
layers of a pipeline without ZeRO, and, if no model file can be read, the ranks that have no file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from lazyckpt.conversion.inert import InertObject, read_inert
from lazyckpt.errors import CorruptFileError, LoadError
from lazyckpt.formats.torch_zip_reader import read_directory

UNIVERSAL = "zero"  # the folder that ds_to_universal makes
MOST_MISSING = 10  # names that are told

_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_([0-9]+)((?:-[a-z]+_[0-9]+)*)-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_([0-9]+)_)?expert_([0-9]+)_mp_rank_[0-9]+_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_([0-9]+)_mp_rank_[0-9]+_optim_states\.pt")
_NAMES = (_MODEL, _OPTIMIZER, _LAYER, _EXPERT, _EXPERT_OPTIMIZER)

_LAYER_OF_PARAMETER = re.compile(r"([0-9]{1,9})\.")
_EXPERT_GROUP = re.compile(r"ep_size_([0-9]{1,9})")
_MAX_NUMBER = 2**63 - 1


def belongs(name: str) -> bool:
    """Whether DeepSpeed gives a file this name in the folder of a tag."""
    return any(pattern.fullmatch(name) for pattern in _NAMES)


class Layout:
    """The files of a tag: those that are ``present`` in its folder, and those that its model files call for.

    The numbers in files and names may be huge: nothing here takes time or memory that grows with them.

    Attributes:
        step: ``global_steps``; None if no model file can be read.
        world_size: The ranks of the job; None if no model file can be read.
        unread: Why no model file can be read; empty if one was, or if there is none.
    """

    def __init__(self, folder: Path, present: Collection[str], *, universal: bool) -> None:
        self._folder = folder
        self._present = present
        self._universal = universal
        self._models = [match for name in sorted(present) if (match := _MODEL.fullmatch(name))]
        self._optimizers = [match for name in sorted(present) if (match := _OPTIMIZER.fullmatch(name))]
        self.unread = ""
        self._told = [*self._read_models()]
        told = self._told[0] if self._told else {}
        ranks = [match.groups()[-2:] for match in (*self._models, *self._optimizers)]
        data, model = (max((int(rank[at] or 0) + 1 for rank in ranks), default=1) for at in (0, 1))
        self._data = _number(told.get("dp_world_size"), least=1) or data
        self._model = _number(told.get("mp_world_size"), least=1) or model
        self.step = _number(told.get("global_steps"))
        self.world_size = self._data * self._model if self._told else None

    def _read_models(self) -> Iterator[Mapping[Any, Any]]:
        """The contents of the first model file that can be read; of all in a pipeline, where each has no weights, and
        names the parameters of its own stage."""
        for match in self._models:
            try:
                told = _read(self._folder / match.string)
            except LoadError as error:
                self.unread = self.unread or f"{match.string}: {error.what}"
                continue
            yield told
            if told.get("module", 0) is not None:
                self.unread = ""
                return

    @cached_property
    def _state(self) -> Mapping[Any, Any]:
        """The ZeRO optimizer's state in the first file that can be read."""
        for match in self._optimizers:
            try:
                state = _read(self._folder / match.string).get("optimizer_state_dict")
            except LoadError:
                continue
            return state if isinstance(state, Mapping) else {}
        return {}

    @cached_property
    def _is_stage_3(self) -> bool:
        kinds = {match[1] is not None for match in self._models}
        if len(kinds) == 1:
            return kinds.pop()
        stage = self._state.get("zero_stage")
        return 3 in (stage, *stage.args) if isinstance(stage, InertObject) else stage == 3

    @cached_property
    def _parts(self) -> int:
        """How many ranks share the optimizer. They may be fewer than the ranks with other data (MiCS)."""
        if len({match[2] for match in self._optimizers}) in (0, self._data):
            return self._data
        counts = self._state.get("partition_count")
        found = [_number(count, least=1) or 0 for count in (counts if isinstance(counts, list) else [counts])]
        return max(found, default=0) or self._data

    def is_stale(self, name: str) -> bool:
        """Whether the file is of another save into this folder: of a rank or a kind that this save does not have."""
        if match := _MODEL.fullmatch(name):
            is_stage_3 = match[1] is not None
            return (
                int(match[2]) >= self._model
                or is_stage_3 != self._is_stage_3
                or (is_stage_3 and int(match[1]) >= self._parts)
            )
        if match := _OPTIMIZER.fullmatch(name):
            return match[1] != self._prefix or int(match[2]) >= self._parts or int(match[3]) >= self._model
        return False

    def missing(self) -> list[str]:
        """The files that should be there but are not; of more than ``MOST_MISSING`` one more, to show that."""
        demanded = [self._model_files(), self._layer_files(), self._expert_files()]
        if self._universal:
            demanded.append(self._universal_files())
        elif self._has_zero:
            demanded.append(self._optimizer_files(self._prefix))
        found: dict[str, None] = {}  # ranks name the same parameters
        for name in (name for names in demanded for name in self._absent(names)):
            found[name] = None
            if len(found) > MOST_MISSING:
                break
        return [*found]

    def _absent(self, names: Iterable[str]) -> Iterator[str]:
        """Those that are not present, under the name without the second underscore of older releases neither."""
        old = ("_optim_states", "optim_states")
        return (name for name in names if name not in self._present and name.replace(*old) not in self._present)

    def _model_files(self) -> Iterator[str]:
        for rank in range(self._parts if self._is_stage_3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if self._is_stage_3 else ""
            for model in range(self._model):
                yield f"{prefix}mp_rank_{model:02d}_model_states.pt"

    @cached_property
    def _has_zero(self) -> bool:
        """Whether ranks have parts of the optimizer. A pipeline in bfloat16 has them even without ZeRO."""
        told = self._told[0] if self._told else {}
        whole = told.get("optimizer")
        parted = isinstance(whole, Mapping) and "partition_count" in whole
        return bool(self._optimizers) or told.get("param_shapes") is not None or parted

    @cached_property
    def _prefix(self) -> str:
        """How the names of the optimizer's files begin; of several beginnings, that with the fewest missing."""
        config = self._told[0].get("ds_config") if self._told else None
        half = config.get("bf16") if isinstance(config, Mapping) else None
        usual = "bf16_" if isinstance(half, Mapping) and half.get("enabled") is True else ""
        found = sorted({match[1] for match in self._optimizers}, key=lambda prefix: prefix != usual)
        return min(
            found or [usual], key=lambda prefix: len(list(islice(self._absent_optimizers(prefix), MOST_MISSING)))
        )

    def _absent_optimizers(self, prefix: str) -> Iterator[str]:
        return self._absent(self._optimizer_files(prefix))

    def _optimizer_files(self, prefix: str) -> Iterator[str]:
        for rank in range(self._parts):
            for model in range(self._model):
                yield f"{prefix}zero_pp_rank_{rank}_mp_rank_{model:02d}_optim_states.pt"

    def _layer_files(self) -> Iterator[str]:
        """Those of a pipeline: of the layers that own a parameter or buffer, and of every rank of a layer."""
        if not self._told or self._told[0].get("module", 0) is not None:
            return
        found = [match for name in self._present if (match := _LAYER.fullmatch(name))]
        numbers = {int(match[1]) for match in found}
        owned = [name for told in self._told for name in (*_parameters(told), *_texts(told.get("buffer_names")))]
        numbers.update(int(match[1]) for name in owned if (match := _LAYER_OF_PARAMETER.match(name)))
        dimensions = self._told[0].get("checkpoint_parallel_dimensions")
        degree = _number(dimensions.get("tp_degree"), least=1) if isinstance(dimensions, Mapping) else None
        ranks: Iterable[str] = sorted({match[2] for match in found}) or [""]
        if degree is not None and all(re.fullmatch("-model_[0-9]+", rank) for rank in ranks):
            ranks = (f"-model_{rank:02d}" for rank in range(degree))
        if not numbers:
            yield "layer_00-model_states.pt"
        for rank in ranks:
            for number in sorted(numbers):
                yield f"layer_{number:02d}{rank}-model_states.pt"

    def _expert_files(self) -> Iterator[str]:
        """Those of experts: with any rank in their name, as ranks share them out."""
        numbers = self._told[0].get("num_experts") if self._told else None
        if not isinstance(numbers, list) or self._is_stage_3:
            return
        found = {(match[1], int(match[2])) for name in self._present if (match := _EXPERT.fullmatch(name))}
        for layer, number in enumerate(numbers):
            for expert in range(_number(number) or 0):
                if not found & {(str(layer), expert), (None, expert)}:
                    yield f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
        if numbers and not self._has_zero and not self._universal:
            ranks = {int(match[1]) for name in self._present if (match := _EXPERT_OPTIMIZER.fullmatch(name))}
            for rank in range(max((self._expert_ranks(), *(rank + 1 for rank in ranks)))):
                if rank not in ranks:
                    yield f"expp_rank_{rank}_mp_rank_00_optim_states.pt"

    def _expert_ranks(self) -> int:
        """Over how many ranks the experts are spread, as the groups of the optimizer tell; at least 1."""
        optimizer = self._told[0].get("optimizer")
        groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
        names = [group.get("name") for group in groups or () if isinstance(group, Mapping)]
        found = [_EXPERT_GROUP.fullmatch(name) for name in names if isinstance(name, str)]
        return max((int(match[1]) for match in found if match), default=1)

    def _universal_files(self) -> Iterator[str]:
        yield f"{UNIVERSAL}/optimizer_state.pt"
        for told in self._told:
            if not told.get("num_experts"):  # a parameter of experts becomes one for each of them, or none
                yield from (f"{UNIVERSAL}/{name}/fp32.pt" for name in _parameters(told))


def _read(file: Path) -> Mapping[Any, Any]:
    found = read_inert(file, read_directory(file))
    if not isinstance(found, Mapping):
        raise CorruptFileError("holds no dict, as the files of DeepSpeed do", path=file)
    return found


def _parameters(told: Mapping[Any, Any]) -> Iterator[str]:
    """The parameters that a model file names: those of the ZeRO optimizer."""
    groups = told.get("param_shapes")
    for group in groups if isinstance(groups, list) else ():
        yield from _texts(group)


def _texts(names: Any) -> Iterator[str]:
    yield from (name for name in names if isinstance(name, str)) if isinstance(names, Mapping | list) else ()


def _number(value: Any, *, least: int = 0) -> int | None:
    return value if type(value) is int and least <= value <= _MAX_NUMBER else None
