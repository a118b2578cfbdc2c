"""DeepSpeed in one process on gloo: a plain loop, and the Trainer of transformers.

Rows that name it in ``packages`` find it in a folder of its own (__main__.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ecosystem.hugging_face import BATCH, trainer_for, with_trainer
from ecosystem.parts import Net, loss_of
from ecosystem.rows import EVERY, STEPS, Row, Run, Train, seed_all


def _zero(stage: int) -> Train:
    def train(run: Run) -> Any:
        import deepspeed
        import deepspeed_training

        from lazyckpt.integrations.deepspeed import enable

        _one_rank()
        deepspeed_training.forget()
        seed_all(run.seed)
        model = Net()
        config = deepspeed_training.config(stage)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        if run.knobs is not None:
            enable(engine, **run.knobs)
        if run.resumed is not None:
            _, client_state = engine.load_checkpoint(run.resumed.parent, run.resumed.name)
            torch.set_rng_state(client_state["random"])
        for step in range(engine.global_steps + 1, STEPS + 1):
            engine.backward(loss_of(engine, step))
            engine.step()
            if step % EVERY == 0:
                engine.save_checkpoint(run.folder, f"step-{step}", {"random": torch.get_rng_state()})
        found = _state(engine)
        engine.destroy()
        return found

    return train


def _trainer(run: Run, callbacks: list[Any]) -> Any:
    import deepspeed_training

    _one_rank()
    deepspeed_training.as_accelerator()
    config = {**deepspeed_training.config(2), "train_micro_batch_size_per_gpu": BATCH}
    return trainer_for(run, callbacks, deepspeed=config, use_cpu=False)


def _one_rank() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _state(engine: Any) -> Any:
    """What DeepSpeed trains, by name."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        "module": engine.module.state_dict(),
        "masters": {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()},
        "moments": {
            (name, kind): safe_get_full_optimizer_state(p, kind)
            for name, p in engine.module.named_parameters()
            for kind in ("exp_avg", "exp_avg_sq")
        },
    }


DEEPSPEED = ("deepspeed",)
ROWS = [
    Row("DeepSpeed ZeRO 2", DEEPSPEED, _zero(2)),
    Row("DeepSpeed ZeRO 3", DEEPSPEED, _zero(3)),
    Row(
        "HF Trainer + DeepSpeed ZeRO 2",
        ("transformers", *DEEPSPEED),
        with_trainer(_trainer, lambda trainer: _state(trainer.deepspeed)),
    ),
]
