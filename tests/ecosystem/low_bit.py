"""Weights and optimizer state of less than 16 bits: torchao and bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ecosystem.optimizers import Parameters, with_optimizer
from ecosystem.parts import Net, backward, stepping
from ecosystem.rows import Recipe, Row, Train, loop

WIDE = 1024  # a quarter of the bytes a value, and so as many values more


def _torchao(name: str) -> Row:
    def make(parameters: Parameters) -> Any:
        import torchao.optim

        return getattr(torchao.optim, name)(parameters)

    return Row(f"torchao {name}", ("torchao",), with_optimizer(make, WIDE))


def _bitsandbytes(name: str) -> Row:
    def make(parameters: Parameters) -> Any:
        import bitsandbytes

        return getattr(bitsandbytes.optim, name)(parameters, lr=1e-3)

    return Row(f"bitsandbytes {name}", ("bitsandbytes",), with_optimizer(make, WIDE))


def _trains(make: Any, width: int = WIDE, optimizer: Any = torch.optim.AdamW) -> Train:
    """A loop with a model that ``make`` changes."""

    def build() -> Recipe:
        model = make(Net(width))
        own = optimizer(model.parameters())
        return Recipe({"model": model, "optimizer": own}, stepping(model, own))

    return loop(build)


class _Bf16(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.bfloat16()

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(digits.bfloat16())
        return logits


def _stochastic_rounding(parameters: Any) -> Any:
    from torchao.optim.adam import _AdamW

    return _AdamW(list(parameters), bf16_stochastic_round=True)


def _fake_int4(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_
    from torchao.quantization.qat import QATConfig

    quantize_(model, QATConfig(Int4WeightOnlyConfig(group_size=32), step="prepare"))
    return model


def _float8(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_large(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module.in_features == module.out_features

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=is_large)
    return model


def _int8(model: nn.Module) -> nn.Module:
    from torchao.prototype.quantized_training import (
        Int8QuantizedTrainingLinearWeight,
        int8_weight_only_quantized_training,
    )
    from torchao.quantization import quantize_

    torch.serialization.add_safe_globals([Int8QuantizedTrainingLinearWeight])
    quantize_(model, int8_weight_only_quantized_training())
    return model


def _int8_optimizer(parameters: Any) -> Any:
    from torchao.optim.adam import _AdamW

    return _AdamW(list(parameters))


def _compiled() -> Recipe:
    import torchao.optim

    model = Net(WIDE)
    optimizer = torchao.optim.AdamW8bit(model.parameters())
    compiled = torch.compile(model, backend="aot_eager")

    def step(number: int) -> None:
        model.train()
        backward(compiled, optimizer, number)
        optimizer.step()

    return Recipe({"model": model, "optimizer": optimizer}, step)


class _Quantized(nn.Module):
    """Digits to classes by layers of four bits, which do not train, and what an adapter adds to them."""

    def __init__(self) -> None:
        super().__init__()
        import bitsandbytes

        self.first = nn.Linear(64, WIDE)
        self.hidden = bitsandbytes.nn.Linear4bit(WIDE, WIDE, compute_dtype=torch.float32, quant_type="nf4")
        self.last = nn.Linear(WIDE, 10)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(torch.relu(self.hidden(torch.relu(self.first(digits)))))
        return logits


def _qlora() -> Any:
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(7)  # whatever the seed of the run: the base comes from elsewhere
        base = _Quantized().to("cpu")  # quantizes
    return peft.get_peft_model(base, peft.LoraConfig(r=64, target_modules=["first", "hidden"]))


class Adapter:
    """The adapter of a PEFT model alone."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        import peft

        state: dict[str, Any] = peft.get_peft_model_state_dict(self.model)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import peft

        peft.set_peft_model_state_dict(self.model, state)


def _qlora_with(track: Any) -> Train:
    def build() -> Recipe:
        model = _qlora()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        return Recipe({"model": track(model), "optimizer": optimizer}, stepping(model, optimizer))

    return loop(build)


_INT8_NOTE = (
    "Before the first `save()`, and before `restore()`: "
    "`torch.serialization.add_safe_globals([Int8QuantizedTrainingLinearWeight])`."
)
ROWS = [
    *(_torchao(name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    Row(
        "torchao bf16 with stochastic rounding",
        ("torchao",),
        _trains(_Bf16, optimizer=_stochastic_rounding),
    ),
    Row("torchao QAT int4", ("torchao",), _trains(_fake_int4)),
    Row("torchao Float8 training", ("torchao",), _trains(_float8)),
    Row("torchao int8 weights", ("torchao",), _trains(_int8, optimizer=_int8_optimizer), note=_INT8_NOTE),
    Row("torchao AdamW8bit, torch.compile", ("torchao",), loop(_compiled)),
    *(_bitsandbytes(name) for name in ("AdamW8bit", "PagedAdamW8bit", "Lion8bit")),
    Row(
        "bitsandbytes Linear4bit (QLoRA), the whole model",
        ("bitsandbytes", "peft"),
        _qlora_with(lambda model: model),
        refused="absmax",
        note="Refused at the first save: `load_state_dict` does not take the keys of quantized weights. Track the "
        "adapter, as in the next row.",
    ),
    Row(
        "bitsandbytes Linear4bit (QLoRA), the adapter",
        ("bitsandbytes", "peft"),
        _qlora_with(Adapter),
        note="Track an object whose `state_dict()` is `peft.get_peft_model_state_dict(model)`.",
    ),
]
