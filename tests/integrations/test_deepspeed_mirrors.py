"""DeepSpeed with mirrors: tags go there whole, and the engine loads a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import Ranks

import lazyckpt


def saved(folder: str, stage: int) -> Any:
    from deepspeed_training import built, config, train

    import lazyckpt.integrations.deepspeed  # noqa: F401

    engine = built({**config(stage=stage), "lazyckpt": {"mirrors": [{"url": f"{folder}/lustre", "keep_last": 1}]}})
    for step in (0, 1):
        train(engine, step, step + 1)
        engine.save_checkpoint(f"{folder}/a")
    expected = train(engine, 2, 4)
    engine.checkpoint_engine.last_save.result()
    engine.destroy()
    return expected


def loaded(folder: str, stage: int, tag: str) -> Any:
    from deepspeed_training import built, config, train

    import lazyckpt.integrations.deepspeed  # noqa: F401

    engine = built({**config(stage=stage), "lazyckpt": {"mirrors": [f"{folder}/other"]}})
    engine.load_checkpoint(f"{folder}/b", tag=tag)
    found = train(engine, 2, 4)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_tags_go_there_and_an_engine_loads_a_copy(deepspeed_ranks: Ranks, tmp_path: Path, stage: int) -> None:
    expected = deepspeed_ranks.run(2, saved, str(tmp_path), stage, timeout_s=180)
    assert [path.parent.name for path in (tmp_path / "lustre").glob("*/manifest.json")] == ["global_step2"]
    copy = lazyckpt.pull(tmp_path / "lustre", tmp_path / "b")
    here = tmp_path / "a" / "global_step2"
    names = {path.name for path in here.iterdir()} - {".lazyckpt-lock"}
    assert {path.name for path in copy.iterdir()} == names
    assert all(path.read_bytes() == (here / path.name).read_bytes() for path in copy.iterdir())
    assert deepspeed_ranks.run(2, loaded, str(tmp_path), stage, copy.name, timeout_s=180) == expected
    assert (tmp_path / "other" / copy.name / "manifest.json").exists()  # this mirror lacked it
