"""The Trainer of transformers, and those that derive from it: PEFT, TRL, sentence-transformers."""

from __future__ import annotations

import functools
import inspect
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ecosystem.rows import EVERY, STEPS, Row, Run, Train, seed_all

CONTEXT = 32
BATCH = 4


@functools.cache
def lines() -> list[str]:
    """Prose of the standard library's own modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "\n".join(
        (folder / name).read_text() for name in ("argparse.py", "typing.py", "pathlib.py", "subprocess.py")
    )
    return [line.strip() for line in text.splitlines() if len(line.strip()) > 40][: 4 * STEPS * BATCH]


@functools.cache
def tokenizer() -> Any:
    """Byte pairs of these lines."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    pairs = ByteLevelBPETokenizer()
    pairs.train_from_iterator(lines(), vocab_size=1024, special_tokens=["<pad>", "<s>", "</s>", "<unk>"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        pairs._tokenizer.save(str(file))
        return PreTrainedTokenizerFast(
            tokenizer_file=str(file), pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )


def llama() -> Any:
    """A language model of 8 MiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            attention_dropout=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def the_same_base() -> Any:
    """Whatever the seed of the run: what an adapter is for comes from elsewhere."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return llama()


def tokens() -> list[dict[str, torch.Tensor]]:
    encoded = tokenizer()(lines(), truncation=True, padding="max_length", max_length=CONTEXT, return_tensors="pt")
    return [{"input_ids": row, "labels": row} for row in encoded["input_ids"]]


def arguments(run: Run, kind: Any, **more: Any) -> Any:
    """For a Trainer that saves every second step."""
    known = inspect.signature(kind.__init__).parameters
    assert set(more) <= set(known), "a setting that this version does not have"
    return kind(
        output_dir=str(run.folder),
        max_steps=STEPS,
        save_steps=EVERY,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "steps", "learning_rate": 1e-3, "use_cpu": True, **more},
    )


def model_and_optimizer(trainer: Any) -> Any:
    return {"model": trainer.model, "optimizer": trainer.optimizer}


def with_trainer(make: Callable[[Run, list[Any]], Any], state: Callable[[Any], Any] = model_and_optimizer) -> Train:
    """Trains with the Trainer that ``make`` makes with these callbacks, and returns ``state`` of it."""

    def train(run: Run) -> Any:
        from lazyckpt.integrations.transformers import LazyCheckpointCallback

        seed_all(run.seed)
        trainer = make(run, [] if run.knobs is None else [LazyCheckpointCallback(**run.knobs)])
        trainer.train(resume_from_checkpoint=run.resumed and str(run.resumed))
        return state(trainer)

    return train


def trainer_for(run: Run, callbacks: list[Any], model: Any = None, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(
        model if model is not None else llama(),
        arguments(run, TrainingArguments, **more),
        train_dataset=tokens(),
        eval_dataset=tokens()[: 2 * BATCH],
        callbacks=callbacks,
    )


def _schedule_free(run: Run, callbacks: list[Any]) -> Any:
    return trainer_for(
        run,
        callbacks,
        optim="schedule_free_adamw",
        lr_scheduler_type="constant",
        warmup_steps=2,
        eval_strategy="steps",
        eval_steps=EVERY,
    )


def with_optim(name: str) -> Train:
    return with_trainer(lambda run, callbacks: trainer_for(run, callbacks, optim=name))


def lora(**more: Any) -> Any:
    from peft import LoraConfig

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(r=32, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM", **more)


def _with_adapter(**more: Any) -> Train:
    def make(run: Run, callbacks: list[Any]) -> Any:
        from peft import get_peft_model

        return trainer_for(run, callbacks, get_peft_model(the_same_base(), lora(**more)))

    return with_trainer(make)


def _sft(run: Run, callbacks: list[Any], adapter: bool = False) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        the_same_base() if adapter else llama(),
        arguments(run, SFTConfig, max_length=CONTEXT, bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({"text": lines()}),
        processing_class=tokenizer(),
        peft_config=lora() if adapter else None,
        callbacks=callbacks,
    )


def _dpo(run: Run, callbacks: list[Any], adapter: bool = False) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    halves = [(line[:20], line[20:]) for line in lines()]
    pairs = {
        "prompt": [prompt for prompt, _ in halves],
        "chosen": [end for _, end in halves],
        "rejected": [end[::-1] for _, end in halves],
    }
    return DPOTrainer(
        the_same_base() if adapter else llama(),
        None if adapter else the_same_base(),
        args=arguments(run, DPOConfig, max_length=2 * CONTEXT, bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer(),
        peft_config=lora() if adapter else None,
        callbacks=callbacks,
    )


def _sentences(run: Run, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    with tempfile.TemporaryDirectory() as folder:
        config = BertConfig(
            vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
        )
        BertModel(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = Transformer(folder, max_seq_length=CONTEXT)
    model = SentenceTransformer(modules=[words, Pooling(256)], device="cpu")
    return SentenceTransformerTrainer(
        model,
        arguments(run, SentenceTransformerTrainingArguments),
        train_dataset=Dataset.from_dict({"anchor": lines(), "positive": [line[::2] for line in lines()]}),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=callbacks,
    )


HF = ("transformers",)
ROWS = [
    Row("HF Trainer", HF, with_optim("adamw_torch")),
    Row("HF Trainer, schedule_free_adamw + evaluation", (*HF, "schedulefree"), with_trainer(_schedule_free)),
    *(
        Row(f"HF Trainer, {name}", (*HF, "bitsandbytes"), with_optim(name))
        for name in ("adamw_8bit", "paged_lion_8bit")
    ),
    *(
        Row(f"HF Trainer, {name}", (*HF, "torchao"), with_optim(name))
        for name in ("adamw_torch_8bit", "adamw_torch_4bit")
    ),
    Row("HF Trainer + PEFT LoRA", (*HF, "peft"), _with_adapter()),
    Row("HF Trainer + PEFT DoRA", (*HF, "peft"), _with_adapter(use_dora=True)),
    Row("TRL SFTTrainer", ("trl",), with_trainer(_sft)),
    Row("TRL SFTTrainer + LoRA", ("trl", "peft"), with_trainer(functools.partial(_sft, adapter=True))),
    Row("TRL DPOTrainer", ("trl",), with_trainer(_dpo)),
    Row("TRL DPOTrainer + LoRA", ("trl", "peft"), with_trainer(functools.partial(_dpo, adapter=True))),
    Row("sentence-transformers Trainer", ("sentence-transformers",), with_trainer(_sentences)),
]
