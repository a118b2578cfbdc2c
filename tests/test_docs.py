"""The documentation: what can be checked of it besides that it builds (`make check`)."""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from commands import commands
from ecosystem import table

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
CODE = {page.name: blocks for page in _PAGES if (blocks := _BLOCK.findall(page.read_text()))}


def test_every_error_has_its_cure() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    headings = set(re.findall(r"^### `(\w+)`", text, re.MULTILINE))
    errors = {name for name in lazyckpt.__all__ if name.endswith("Error")} - {"LazyCkptError"}
    assert headings == errors


def test_every_message_of_an_error_is_explained_or_says_what_to_do() -> None:
    text = re.sub(r"\s+(> )?", " ", (DOCS / "troubleshooting.md").read_text())
    _, *sections = re.split(r" ### `(\w+)`", text)
    cures = dict(zip(sections[::2], sections[1::2], strict=True))
    assert len(messages := list(_errors())) > 50
    assert [(kind, words) for kind, words in messages if words not in cures[kind]] == []


def _errors() -> Iterator[tuple[str, str]]:
    """Their kinds and words. Not of CorruptFileError: damage has one cure, whatever it hit."""
    kinds = {name for name in lazyckpt.__all__ if name.endswith("Error")} - {"LazyCkptError", "CorruptFileError"}
    for function in (node for node in _nodes() if isinstance(node, ast.FunctionDef)):
        nodes = list(ast.walk(function))
        assigned = [(ast.unparse(n.targets[0]), n.value) for n in nodes if isinstance(n, ast.Assign)]
        for call in (n for n in nodes if isinstance(n, ast.Call) and n.args):
            kind = ast.unparse(call.func).removeprefix("lazyckpt.")
            name = ast.unparse(call.args[0])  # of a message that was put together before
            for message in [value for target, value in assigned if target == name] or call.args[:1]:
                words = _words(message)
                says = kind == "ConfigError" and _SAYS_WHAT_TO_DO.search(ast.unparse(message))
                if kind in kinds and words and not says:
                    yield kind, words


_SAYS_WHAT_TO_DO = re.compile(r"\b(expected|at most|give|use|make|call|name a|Pass)\b")


def test_the_table_of_what_works_has_the_rows_of_make_ecosystem() -> None:
    assert len(rows := [row.name for row in table.rows()]) > 50
    assert table.names_in_docs() == rows


def test_every_warning_is_explained() -> None:
    text = (DOCS / "troubleshooting.md").read_text().replace("\n> ", " ")  # as quotes are wrapped
    assert len(messages := list(_warnings())) > 10
    assert [words for words in messages if words not in text] == []


def _warnings() -> Iterator[str]:
    for node in _nodes():
        warns = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("warn", "_warn_once"))
        if warns and (words := _words(node.args[0])):
            yield words


def _nodes() -> Iterator[ast.AST]:
    """Of the whole package but for the command line and its tools."""
    package = DOCS.parent / "lazyckpt"
    files = [file for file in package.rglob("*.py") if file.parent.name not in ("cli", "tools", "integrations")]
    for file in [*files, *DOCS.parent.glob("integrations/*.py")]:
        yield from ast.walk(ast.parse(file.read_text()))


def _words(message: ast.expr) -> str:
    """The longest part that is not filled in, up to the end of a sentence."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return max(words, key=len, default="").strip(" ():;,\n").split(". ")[0]


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
    pages = set(re.findall(r"[\w-]+\.md", config))
    assert pages == {page.name for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", CODE)
def test_code_runs_as_it_is_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after the other, with what a page takes for given."""
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
    exec(compile(block, "block", "exec"), names)
    if tracks and names["ckpt"] is ckpt:
        ckpt.save(1, blocking=True)
        assert ckpt.restore() == 1
    names["ckpt"].close()


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
    """A training of one epoch, whatever the Trainer was told."""
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


def test_the_first_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = CODE["index.md"][0]
    exec(compile(script, "train.py", "exec"), {})
    first = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in first] == ["from step 0", *(f"step {step}" for step in range(20, 121, 20))]
    exec(compile(script, "train.py", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["from step 120"]
