"""The documentation names every public thing, and its code runs. `make check` builds it and checks its links."""

from __future__ import annotations

import ast
import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from benchmarks import engines
from commands import commands
from ecosystem import table

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
CODE = {page.name: blocks for page in _PAGES if (blocks := _BLOCK.findall(page.read_text()))}


def test_every_error_has_a_section() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    headings = set(re.findall(r"^### `(\w+)`", text, re.MULTILINE))
    errors = {name for name in lazyckpt.__all__ if name.endswith("Error")} - {"LazyCkptError"}
    assert headings == errors


def test_the_table_of_what_works_has_the_rows_of_make_ecosystem() -> None:
    assert len(rows := [row.name for row in table.rows()]) > 50
    assert table.names_in_docs() == rows


def test_the_picture_of_engines_shows_the_table() -> None:
    """`python -m benchmarks.engines` draws it."""
    picture = (DOCS / "img" / "engines.svg").read_text()
    assert len(shown := engines.figures()) == 10
    assert [name for name in shown if f">{name}<" not in picture] == []


def test_start_here_names_what_is_there() -> None:
    """The files of its nine stops, and what each defines; at most twelve words to learn before."""
    page = (DOCS / "architecture.md").read_text()
    section = page.partition("## Start here")[2].partition("Beside this way")[0]
    words, stops = (table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE))
    assert len(words) <= 12
    assert re.findall(r"^\| (\d+)\. `", "\n".join(stops), re.MULTILINE) == list("123456789")
    for stop in stops:
        file, *names = re.findall(r"`([^`]+)`", stop.split("|")[1])
        path = next(p for p in (DOCS.parent / file, DOCS.parent / "lazyckpt" / file) if p.exists())
        assert names or path.suffix == ".md", file
        for name in names:
            assert defines(ast.parse(path.read_text()), name.split(".")), f"{file} has no {name}"


def defines(tree: ast.AST, name: list[str]) -> bool:
    """Whether a module or a class defines ``name``, the parts of a dotted name."""
    definitions = (n for n in ast.iter_child_nodes(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef))
    return any(d.name == name[0] and (not name[1:] or defines(d, name[1:])) for d in definitions)


def test_every_knob_is_explained() -> None:
    text = (DOCS / "settings.md").read_text()
    assert [name for name in lazyckpt.Config.__dataclass_fields__ if f"`{name}`" not in text] == []


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference.md").read_text()
    listed = set(re.findall(r"^::: lazyckpt\.(\w+)$", text, re.MULTILINE))
    public = {name for name in lazyckpt.__all__ if not name.endswith("Error")}
    assert listed - {"errors"} == public


def test_every_command_is_explained() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "cli.md").read_text(), re.MULTILINE)[1:]
    assert {heading.split()[0] for heading in ", ".join(headings).split(", ")} == set(commands())


def test_every_page_is_in_the_navigation() -> None:
    config = (DOCS.parent / "mkdocs.yml").read_text()
    pages = set(re.findall(r"[\w/-]+\.md", config))
    assert pages == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_code_of_the_home_page_fits_its_column() -> None:
    """The site cuts off longer lines, until the reader scrolls."""
    text = (DOCS / "index.md").read_text()
    fenced = [
        line for block in re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL) for line in block.splitlines()
    ]
    indented = re.findall(r"^    .*", text, re.MULTILINE)
    assert len(fenced) > 20 and [line for line in (*fenced, *indented) if len(line) > 80] == []


@pytest.mark.long(first=7)
@pytest.mark.parametrize("page", CODE)
def test_code_runs_as_it_is_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the blocks of a page in order, with the names that a page takes for given."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    names = _given()
    try:
        with lazyckpt.Saver() as saver:
            for number, block in enumerate(CODE[page]):
                names["saver"] = saver
                _execute(block, names, Path(f"given-{number}"), monkeypatch)
    finally:
        signal.signal(signal.SIGTERM, before)


def _execute(block: str, names: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "CheckpointIO" in block:
        names |= _lightning()
    elif "LazyCheckpoint" in block:
        names |= _transformers()
    if "enable(accelerator)" in block:
        names["accelerator"] = pytest.importorskip("accelerate").Accelerator(cpu=True)
    if "init_process_group" in block:
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
    if "prometheus" in block:
        prometheus = pytest.importorskip("prometheus_client")
        monkeypatch.setattr(prometheus, "REGISTRY", prometheus.CollectorRegistry())
        monkeypatch.setattr(prometheus, "start_http_server", lambda port: None)
    if not torch.cuda.is_available():
        block = block.replace("graph = lazyckpt.CUDAGraph()", "")
    ckpt = names["ckpt"] = lazyckpt.Checkpointer(folder)
    tracks = "ckpt.track(" in block
    if not tracks:
        ckpt.track(model=names["model"], optimizer=names["optimizer"])
    with one_rank() if "new_group" in block else contextlib.nullcontext():
        exec(compile(block, "block", "exec"), names)
    if tracks and names["ckpt"] is ckpt:
        ckpt.save(1, blocking=True)
        assert ckpt.restore() == 1
    names["ckpt"].close()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _given() -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    replay = {"seen": torch.ones(3), "worth": torch.ones(3), "added": 3, "random": torch.Generator()}
    return {
        "torch": torch,
        "lazyckpt": lazyckpt,
        "signal": signal,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loader": torch.utils.data.DataLoader(torch.ones(400, 4), batch_size=4),
        "loss_of": torch.Tensor.sum,
        "ema": type("Average", (torch.nn.Linear,), {"update": torch.nn.Module.requires_grad_})(4, 4),
        "buffer": type("ReplayBuffer", (), replay)(),
        "obj": torch.ones(2),
        "state": {"model": model.state_dict()},
        "step": 100,
    }


def _lightning() -> dict[str, Any]:
    """Names for a block that uses Lightning. The module stops after one epoch."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import AsyncCheckpointIO

    from lazyckpt.integrations.lightning import LazyCheckpointIO

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = True

    classes = (lightning.Trainer, ModelCheckpoint, AsyncCheckpointIO, LazyCheckpointIO)
    return {each.__name__: each for each in classes} | {"model": Net()}


def _transformers() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    options = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    return {
        "Trainer": transformers.Trainer,
        "MyTrainer": transformers.Trainer,
        "model": Net(),
        "args": transformers.TrainingArguments("hf", max_steps=4, save_steps=2, **options),
        "data": [{"x": torch.ones(4)}] * 32,
    }


def test_the_script_of_the_first_page_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = CODE["index.md"][0]
    exec(compile(script, "train.py", "exec"), {})
    first = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in first] == ["from step 0", *(f"step {step}" for step in range(20, 121, 20))]
    exec(compile(script, "train.py", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["from step 120"]
