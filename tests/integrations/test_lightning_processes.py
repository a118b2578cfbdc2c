"""Lightning's plugin in a program that ends, in Fabric, and in several processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", minversion="2.6")


from lazyckpt.integrations.lightning import LazyCheckpointIO
from lightning_runs import names_in
from trainers import SLOW_S, Forked

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small_tensors_are_lazy")]


def test_another_process_makes_its_own_threads(tmp_path: Path) -> None:
    io = pickle.loads(pickle.dumps(LazyCheckpointIO(max_in_flight=3)))
    assert io._open_saver().config.max_in_flight == 3

    def save() -> None:
        io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "a.ckpt")
        io.teardown()

    assert Forked(save, tmp_path / "output").wait() == 0
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["a"], torch.ones(3))


# Fabric and several processes


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


SLOW_DISK = f"""
import sys, time, torch
from pathlib import Path
from lazyckpt.storage import commit  # noqa: E402
folder, staging = Path(sys.argv[1]), commit.FileStaging
def late(target):
    time.sleep({SLOW_S})
    return staging(target)
commit.FileStaging = late
from lazyckpt.integrations.lightning import LazyCheckpointIO
"""


@pytest.mark.long
def test_what_fabric_saved_last_is_there_when_the_program_ends(tmp_path: Path) -> None:
    text = """
import threading
free, publish = threading.Event(), commit.publish_file
def held(*paths):
    assert free.wait(30)
    publish(*paths)
commit.publish_file = held
from lightning.fabric import Fabric
io = LazyCheckpointIO()
fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
model, optimizer = fabric.setup(net := torch.nn.Linear(128, 128), torch.optim.Adam(net.parameters()))
fabric.backward(model(torch.ones(1, 128)).sum())
optimizer.step()
fabric.save(folder / "a.ckpt", {"model": model, "optimizer": optimizer})
(handle,) = io._open_saver().pending()
assert handle.wait_captured(9) and not handle.path.exists()
torch.save(net.state_dict(), folder / "expected.pt")
handle.add_done_callback(lambda _: print("eager", handle.metrics.eager_bytes, "of", handle.metrics.bytes))
timer = threading.Timer(0.5, free.set)
timer.daemon = True  # the end of the program does not wait for it
timer.start()
"""
    done = run_script(tmp_path, SLOW_DISK + text)
    ours, expected = torch.load(tmp_path / "a.ckpt")["model"], torch.load(tmp_path / "expected.pt")
    assert torch.equal(ours["weight"], expected["weight"])
    # Its first save, and lazy: it has seen the optimizer step.
    _, eager, _, total = done.stdout.splitlines()[-1].split()
    assert int(eager) < 0.1 * int(total)


DISTRIBUTED = """
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(64, 64)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), 2)
def run(strategy, plugins, name, epochs=1, **kwargs):
    # One name for all: every rank must know which saves are pending on rank 0, or the names differ.
    checkpoint = ModelCheckpoint(folder / name, monitor="step", mode="max", every_n_train_steps=1, save_top_k=-1,
                                 filename="x", save_last="link")
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", devices=2, strategy=strategy, plugins=plugins, logger=False,
                      enable_progress_bar=False, enable_model_summary=False, callbacks=[checkpoint])
    trainer.fit(Net(), **kwargs)
    return trainer, checkpoint
"""


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    text = """
_, plain = run("ddp", [], "plain")
io = LazyCheckpointIO(host_buffer_bytes=16384, chunk_bytes=4096)
trainer, lazy = run("ddp", [io], "lazy")
assert Path(lazy.best_model_path).name == Path(plain.best_model_path).name == "x-v3.ckpt", lazy.best_model_path
assert (folder / "lazy" / "x-v3.ckpt").exists()  # on every rank, as soon as fit returns
assert not list((folder / "lazy").glob(".tmp-*")) and (trainer.is_global_zero or not io._unreported)
trainer, _ = run("ddp", [io], "lazy", epochs=2, ckpt_path="last")
assert trainer.global_step == 8
"""
    run_script(tmp_path, SLOW_DISK + DISTRIBUTED + text)
    files = {"x.ckpt", "x-v1.ckpt", "x-v2.ckpt", "x-v3.ckpt", "last.ckpt"}
    assert names_in(tmp_path / "plain") == {**dict.fromkeys(files, ""), "last.ckpt": "x-v3.ckpt"}
    assert files < names_in(tmp_path / "lazy").keys()
    assert max(torch.load(path)["global_step"] for path in (tmp_path / "lazy").iterdir()) == 8
    for name in files - {"last.ckpt"}:
        ours, theirs = (torch.load(tmp_path / folder / name)["state_dict"] for folder in ("lazy", "plain"))
        assert torch.equal(ours["layer.weight"], theirs["layer.weight"])


@pytest.mark.slow
def test_ddp_spawn(tmp_path: Path) -> None:
    text = """
if __name__ == "__main__":
    _, plain = run("ddp_spawn", [], "plain")
    trainer, lazy = run("ddp_spawn", [LazyCheckpointIO(host_buffer_bytes=16384, chunk_bytes=4096)], "lazy")
    assert Path(lazy.best_model_path).name == Path(plain.best_model_path).name
    last = torch.load(folder / "lazy" / "last.ckpt")["state_dict"]
    # Saved by the worker after its teardown, loaded here.
    assert torch.equal(last["layer.weight"], trainer.lightning_module.layer.weight)
"""
    run_script(tmp_path, SLOW_DISK + DISTRIBUTED + text)
    assert names_in(tmp_path / "lazy") == names_in(tmp_path / "plain")
