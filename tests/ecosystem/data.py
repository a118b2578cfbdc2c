"""Metrics and loaders that are tracked beside the model."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ecosystem.parts import BATCH, Net, batch, digits
from ecosystem.rows import Recipe, Row, Train, loop


def _with_loader(make: Callable[[], Any], dropout: float = 0.1) -> Train:
    """A loader that has ``state_dict()``. It is iterated anew at the end of each epoch."""

    def build() -> Recipe:
        model = Net(dropout=dropout)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = make()

        def batches() -> Iterator[Any]:
            while True:
                yield from loader

        epochs = batches()

        def step(number: int) -> None:
            found = next(epochs)
            images, classes = (found["image"], found["class"]) if isinstance(found, dict) else found
            model.train()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.float()), classes).backward()
            optimizer.step()

        return Recipe({"model": model, "optimizer": optimizer, "loader": loader}, step)

    return loop(build)


def _torchdata(workers: int) -> Callable[[], Any]:
    def make() -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        images, classes = digits()
        few = 5 * BATCH  # resumption is in the middle of the second epoch
        rows = torch.utils.data.TensorDataset(images[:few], classes[:few])
        order = torch.Generator().manual_seed(3) if workers else None
        return StatefulDataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=workers, generator=order)

    return make


def _streaming() -> Any:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with MDSWriter(out=folder + "/data", columns={"image": "ndarray:float32:64", "class": "int"}) as out:
        for image, number in zip(*digits(), strict=True):
            out.write({"image": image.numpy(), "class": int(number)})
    rows = StreamingDataset(local=folder + "/data", shuffle=True, shuffle_seed=3, batch_size=BATCH)
    return StreamingDataLoader(rows, batch_size=BATCH, generator=torch.Generator().manual_seed(0))


def _metrics() -> Recipe:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    metrics = MetricCollection([MulticlassAccuracy(10), MulticlassConfusionMatrix(10)])
    metrics.persistent(True)

    def step(number: int) -> None:
        images, classes = batch(number)
        model.train()
        optimizer.zero_grad()
        logits = model(images)
        nn.functional.cross_entropy(logits, classes).backward()
        optimizer.step()
        metrics.update(logits.detach(), classes)

    return Recipe({"model": model, "optimizer": optimizer, "metrics": metrics}, step)


_ITERATOR = (
    "Give it a `generator`: without one, its iterator draws a number of torch's after `restore()`, and dropout gets "
    "others than in a run that was not interrupted."
)
_NO_GENERATOR = (
    "Without workers, the order of later epochs is restored only if it has no `generator`. Its iterator draws a number "
    "of torch's after `restore()`, as with plain torch, so the row has no dropout."
)
ROWS = [
    Row("torchmetrics", ("torchmetrics",), loop(_metrics)),
    Row(
        "torchdata StatefulDataLoader",
        ("torchdata",),
        _with_loader(_torchdata(0), dropout=0.0),
        note=_NO_GENERATOR,
    ),
    Row("torchdata StatefulDataLoader, 2 workers", ("torchdata",), _with_loader(_torchdata(2)), note=_ITERATOR),
    Row("MosaicML streaming", ("mosaicml-streaming",), _with_loader(_streaming), note=_ITERATOR),
]
