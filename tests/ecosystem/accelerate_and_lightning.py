"""Loops with Accelerate, as its examples and the scripts of diffusers write them; Lightning and Fabric."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import lazyckpt
from ecosystem import averages
from ecosystem.hugging_face import lora, the_same_base, tokens
from ecosystem.parts import BATCH, Net, digits, loss_of
from ecosystem.rows import EVERY, STEPS, Row, Run, Train, seed_all
from trainers import ScheduleFreeHooks


@contextlib.contextmanager
def accelerator(run: Run, **options: Any) -> Iterator[Any]:
    """One that saves lazily if the run asks for it. Call ``run_enabled`` behind ``prepare``."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from lazyckpt.integrations.accelerate import enable

    seed_all(run.seed)
    own = Accelerator(cpu=True, **options)
    if run.knobs is not None:
        enable(own, **run.knobs)
    try:
        yield own
        own.end_training()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _steps(run: Run, own: Any) -> Iterator[int]:
    """The numbers of the steps that are left, from 1 on; saves behind every second one."""
    begin = 0
    if run.resumed is not None:
        own.load_state(str(run.resumed))
        begin = int(run.resumed.name.removeprefix("step-"))
    for number in range(begin + 1, STEPS + 1):
        yield number
        if number % EVERY == 0:
            own.save_state(str(run.folder / f"step-{number}"))


def _with_scheduler(run: Run) -> Any:
    """As the examples cv_example and complete_nlp_example: model, optimizer, loader and scheduler are prepared."""
    with accelerator(run) as own:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=2 * STEPS)
        rows = torch.utils.data.TensorDataset(*digits())
        order = torch.Generator().manual_seed(3)
        loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True, generator=order)
        model, optimizer, loader, scheduler = own.prepare(model, optimizer, loader, scheduler)
        begin = 0 if run.resumed is None else int(run.resumed.name.removeprefix("step-"))
        steps = _steps(run, own)
        next_step = next(steps)
        for images, classes in own.skip_first_batches(loader, begin) if begin else loader:
            model.train()
            loss = nn.functional.cross_entropy(model(images), classes)
            own.backward(loss)
            own.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if next_step == STEPS:
                next(steps, None)
                break
            next_step = next(steps)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def _mid_epoch(stateful: bool) -> Train:
    """Shuffles and drops out; five batches are an epoch, so resumption is in the middle of the second one."""

    def train(run: Run) -> Any:
        from accelerate.utils import DataLoaderConfiguration

        loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3, use_stateful_dataloader=stateful)
        with accelerator(run, dataloader_config=loading) as own:
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            images, classes = digits()
            rows = torch.utils.data.TensorDataset(images[: 5 * BATCH], classes[: 5 * BATCH])
            # A generator of its own: without one, each epoch begins with a draw from the stream of dropout.
            order = torch.Generator().manual_seed(3)
            loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, generator=order)
            model, optimizer, loader = own.prepare(model, optimizer, loader)
            steps = _steps(run, own)
            number = next(steps)  # loads
            while number is not None:
                epoch, batch = divmod(number - 1, 5)
                loader.set_epoch(epoch)
                for images, classes in own.skip_first_batches(loader, batch) if batch and not stateful else loader:
                    model.train()
                    own.backward(nn.functional.cross_entropy(model(images), classes))
                    optimizer.step()
                    optimizer.zero_grad()
                    number = next(steps, None)  # saves
                    if number is None:
                        break
            return {"model": model, "optimizer": optimizer}

    return train


def _schedule_free(run: Run) -> Any:
    import schedulefree

    with accelerator(run) as own:
        model = Net()
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
        model, optimizer = own.prepare(model, optimizer)
        for number in _steps(run, own):
            model.train()
            optimizer.train()
            own.backward(loss_of(model, number))
            optimizer.step()
            optimizer.zero_grad()
            if number % EVERY == 0:
                model.eval()
                optimizer.eval()
        return {"model": model, "optimizer": optimizer}


def _lora(run: Run) -> Any:
    from peft import get_peft_model

    with accelerator(run) as own:
        model = get_peft_model(the_same_base(), lora())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        model, optimizer = own.prepare(model, optimizer)
        rows = tokens()
        for number in _steps(run, own):
            model.train()
            text = torch.stack([row["input_ids"] for row in rows[4 * number - 4 : 4 * number]])
            own.backward(model(input_ids=text, labels=text).loss)
            optimizer.step()
            optimizer.zero_grad()
        return {"model": model, "optimizer": optimizer}


def _registered_average(make: averages.Average) -> Train:
    def train(run: Run) -> Any:
        with accelerator(run) as own:
            model = Net()
            ema, update = make(model)
            model, optimizer = own.prepare(model, torch.optim.AdamW(model.parameters()))
            own.register_for_checkpointing(ema)
            for number in _steps(run, own):
                model.train()
                own.backward(loss_of(model, number))
                optimizer.step()
                optimizer.zero_grad()
                update()
            return {"model": model, "optimizer": optimizer, "ema": ema}

    return train


def _unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def _with_hooks(run: Run) -> Any:
    """As diffusers' examples/unconditional_image_generation/train_unconditional.py."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    with accelerator(run) as own:
        model = _unet()
        ema = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)

        def save_model_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if own.is_main_process:
                ema.save_pretrained(os.path.join(output_dir, "unet_ema"))
                for part in models:
                    part.save_pretrained(os.path.join(output_dir, "unet"))
                    weights.pop()  # so that it is not saved again

        def load_model_hook(models: list[Any], input_dir: str) -> None:
            averaged = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
            ema.load_state_dict(averaged.state_dict())
            for _ in range(len(models)):
                loaded = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
                part = models.pop()
                part.register_to_config(**loaded.config)
                part.load_state_dict(loaded.state_dict())

        own.register_save_state_pre_hook(save_model_hook)
        own.register_load_state_pre_hook(load_model_hook)
        model, optimizer = own.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        noise_scheduler = DDPMScheduler(num_train_timesteps=100)
        images = digits()[0].unflatten(1, (1, 8, 8))
        for number in _steps(run, own):
            model.train()
            clean = images[8 * number - 8 : 8 * number]
            noise = torch.randn(clean.shape)
            times = torch.randint(0, 100, (len(clean),))
            noisy = noise_scheduler.add_noise(clean, noise, times)
            own.backward(nn.functional.mse_loss(model(noisy, times).sample, noise))
            optimizer.step()
            optimizer.zero_grad()
            ema.step(model.parameters())
        return {"model": model, "optimizer": optimizer, "ema": ema}


def _four_batches() -> Any:
    """An epoch of four batches, in another order each time: the checkpoint of step 6 is in the middle of the second."""
    images, classes = digits()
    few = 4 * BATCH
    rows = torch.utils.data.TensorDataset(images[:few], classes[:few])
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)


def _fabric(run: Run) -> Any:
    from lightning.fabric import Fabric

    from lazyckpt.integrations.lightning import LazyCheckpointIO

    seed_all(run.seed)
    io = None if run.knobs is None else LazyCheckpointIO(**run.knobs)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[] if io is None else [io])
    fabric.launch()
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loader = _four_batches()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if io is not None:
        loader = lazyckpt.track_loader(loader)
        state |= {"loader": loader, "random": lazyckpt.RandomStates()}
    if run.resumed is not None:
        fabric.load(run.resumed, state)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for number in range(int(state["step"]) + 1, STEPS + 1):
        images, classes = next(batches)
        model.train()
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(images), classes))
        optimizer.step()
        state["step"] = number
        if number % EVERY == 0:
            fabric.save(run.folder / f"step-{number}.ckpt", state)
    if io is not None:
        io.wait()
    return {"model": model, "optimizer": optimizer}


def _lightning(schedule_free: bool = False, averaged: bool = False) -> Train:
    def train(run: Run) -> Any:
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

        from lazyckpt.integrations.lightning import LazyCheckpointIO

        class Module(LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                images, classes = batch
                return nn.functional.cross_entropy(self.net(images), classes)

            validation_step = training_step

            def configure_optimizers(self) -> Any:
                if schedule_free:
                    import schedulefree

                    return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.01, warmup_steps=2)
                return torch.optim.AdamW(self.parameters())

            def train_dataloader(self) -> Any:
                return _four_batches()

            val_dataloader = train_dataloader

        class ByTheReadme(ScheduleFreeHooks, Module):
            pass

        seed_all(run.seed)
        module = ByTheReadme() if schedule_free else Module()
        newest = ModelCheckpoint(
            run.folder,
            filename="step-{step}",
            auto_insert_metric_name=False,
            save_top_k=-1,
            every_n_train_steps=EVERY,
        )
        trainer = Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            max_epochs=-1,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=2,  # not behind the checkpoint that is resumed: it changes schedule-free weights
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=run.folder,
            plugins=[] if run.knobs is None else [LazyCheckpointIO(**run.knobs)],
            callbacks=[newest, *([EMAWeightAveraging(decay=0.9)] if averaged else [])],
        )
        trainer.fit(module, ckpt_path=run.resumed)
        return {"model": module, "optimizer": trainer.optimizers[0]}

    return train


ACCELERATE = ("accelerate",)
_FABRIC = "With `RandomStates` and `track_loader` in what it saves; otherwise it leaves them to the script."
_LIGHTNING = "Lightning alone begins the interrupted epoch anew."
_HOOKS = "`EMAModel.save_pretrained` copies the averages before it saves them, and `save()` copies them again."
_LOADER = (
    "Give the loader a `generator`, or each epoch begins with a draw from the stream of dropout, a resumed one too. "
    "Give `DataLoaderConfiguration` a `data_seed`: `save_state` does not save the sampler's."
)
ROWS = [
    Row("Accelerate, with a scheduler and a loader", ACCELERATE, _with_scheduler),
    Row("Accelerate, shuffle + dropout, mid-epoch", ACCELERATE, _mid_epoch(stateful=False), note=_LOADER),
    Row(
        "Accelerate, use_stateful_dataloader, mid-epoch",
        (*ACCELERATE, "torchdata"),
        _mid_epoch(stateful=True),
        note=_LOADER,
    ),
    Row("Accelerate + schedulefree", (*ACCELERATE, "schedulefree"), _schedule_free),
    Row("Accelerate + PEFT LoRA", (*ACCELERATE, "peft"), _lora),
    Row("Accelerate + registered AveragedModel", ACCELERATE, _registered_average(averages.torch_average)),
    Row(
        "Accelerate + registered EMAModel", (*ACCELERATE, "diffusers"), _registered_average(averages.diffusers_average)
    ),
    Row("Accelerate + diffusers' hooks and EMA", (*ACCELERATE, "diffusers"), _with_hooks, 0.27, note=_HOOKS),
    Row("Fabric", ("lightning",), _fabric, exact_alone=False, note=_FABRIC),
    Row("Lightning", ("lightning",), _lightning(), exact_alone=False, note=_LIGHTNING),
    Row(
        "Lightning + schedulefree, by its README",
        ("lightning", "schedulefree"),
        _lightning(schedule_free=True),
        exact_alone=False,
        note=_LIGHTNING,
    ),
    Row(
        "Lightning EMAWeightAveraging",
        ("lightning",),
        _lightning(averaged=True),
        exact_alone=False,
        note=_LIGHTNING,
    ),
]
