"""docs/deepspeed.md on two gloo ranks: its code runs, and leaves the files that it shows."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks

PAGE = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [block for kind, block in FENCED.findall(PAGE) if kind == language]


def as_printed(folder: str) -> list[Any]:
    """Trains with what the first block makes, then with what the second makes of it."""
    import torch
    from deepspeed_training import Model, config, deepspeed, forget, train

    from lazyckpt.integrations.deepspeed import LazyCheckpointEngine

    os.chdir(folder)
    forget()
    torch.manual_seed(7)
    (ignored,) = map(json.loads, blocks("json"))
    names = {"deepspeed": deepspeed, "model": Model(), "config": config(stage=2, dtype="bf16", **ignored)}
    made = []
    for block in blocks("py"):
        exec(compile(block, "block", "exec"), names)
        engine: Any = names["engine"]
        assert isinstance(engine.checkpoint_engine, LazyCheckpointEngine)
        made.append(engine.checkpoint_engine)
        train(engine, 0, 1)
        engine.save_checkpoint("runs/a")
    assert made[0] is not made[1]
    assert not engine.checkpoint_tag_validation_enabled()
    engine.checkpoint_engine.last_save.result()
    engine.checkpoint_engine.wait()
    engine.load_checkpoint("runs/a")
    engine.destroy()
    return sorted(path.relative_to("runs/a").as_posix() for path in Path("runs/a").rglob("*"))


@pytest.mark.long
def test_the_code_runs_and_leaves_the_files_that_the_page_shows(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    found, _ = deepspeed_ranks.run(2, as_printed, str(tmp_path))
    (tree,) = blocks("text")
    shown = re.findall(r"^(│?).*?── ([\w.-]+)", tree, re.MULTILINE)
    expected = {f"global_step2/{name}" if inside else name.replace("100", "2") for inside, name in shown}
    step_2 = {name for name in found if not re.match(r"global_step[01]\b", name)}
    assert step_2 - {"zero_to_torch.py"} == expected and len(expected) == 7
