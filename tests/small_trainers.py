"""What the tests of the Hugging Face Trainer share: a small model, a small data set, short runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from lazyckpt.integrations.transformers import LazyCheckpointCallback
from trainers import hugging_face_arguments

# What older releases of transformers do not have
JUST_IN_TIME = pytest.mark.skipif(
    not hasattr(TrainingArguments, "enable_jit_checkpoint"), reason="transformers has no just-in-time checkpoints yet"
)
PUSHES = pytest.mark.skipif(
    not hasattr(TrainerCallback, "on_push_begin"), reason="transformers has no on_push_begin yet"
)
NAMES_BEST = pytest.mark.skipif(
    hasattr(Trainer, "_sorted_checkpoints"), reason='transformers does not name the best checkpoint of "best" yet'
)

# Half of the state of bert(): the rest stays uncopied while the disk is held back.
SMALL_RING = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 640 << 10}


def bert(**options: Any) -> Any:
    """With dropout, and with tied weights."""
    transformers.set_seed(1)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(vocab_size=512, max_position_embeddings=32, **sizes, **options)
    return transformers.BertForMaskedLM(config)


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(bert(), peft.LoraConfig(r=16, target_modules=["query", "value"], lora_dropout=0.1))


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 512, (8,), generator=generator) for _ in range(24)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    return hugging_face_arguments(folder, **{**options, **changes})


def trainer_of(
    folder: Path | str,
    *callbacks: TrainerCallback,
    model: Callable[[], Any] = bert,
    cls: type[Trainer] = Trainer,
    **changes: Any,
) -> Trainer:
    return cls(model(), arguments(folder, **changes), train_dataset=data(), callbacks=list(callbacks))


def lazy(**knobs: Any) -> LazyCheckpointCallback:
    return LazyCheckpointCallback(**{**SMALL_RING, **knobs})


def checkpoints(folder: Path | str) -> list[str]:
    """Everything in the folder, in the order of the steps."""
    return sorted(os.listdir(folder), key=lambda name: (len(name), name))


class At(TrainerCallback):  # type: ignore[misc]
    """Calls a function at an event of a step."""

    def __init__(self, event: str, step: int, action: Callable[[], object]) -> None:
        def called(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                action()

        setattr(self, event, called)
