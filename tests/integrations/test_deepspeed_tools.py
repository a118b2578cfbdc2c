"""DeepSpeed's own converters read what lazyckpt wrote, and give what they give of the torch engine's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ranks


def saved_twice(folder: str, stage: int, options: dict[str, Any]) -> None:
    """One state, as lazyckpt saves it and as DeepSpeed's own engine does."""
    from deepspeed_training import built, config, train

    from lazyckpt.integrations.deepspeed import enable

    engine = built(config(stage, "bf16", zero={"sub_group_size": 6000} if stage == 3 else {}), **options)
    ours = enable(engine)
    assert ours is not None
    train(engine, 0, 3)
    engine.save_checkpoint(f"{folder}/ours")
    ours.wait()
    enable(engine, enabled=False)
    engine.save_checkpoint(f"{folder}/plain")
    engine.destroy()


def tensors(folder: Path) -> dict[str, Any]:
    """Every tensor below a folder, by file and place."""
    found: dict[str, Any] = {}

    def look(where: str, obj: Any) -> None:
        if isinstance(obj, torch.Tensor):
            found[where] = obj
        for key, value in obj.items() if isinstance(obj, dict) else enumerate(obj if isinstance(obj, list) else ()):
            look(f"{where}/{key}", value)

    for path in sorted(folder.rglob("*.pt")):
        look(str(path.relative_to(folder)), torch.load(path, weights_only=False))
    return found


def converted(root: str) -> dict[str, Any]:
    """The tensors of both converters. Rank 0 converts what lazyckpt wrote, rank 1 what the torch engine wrote."""
    import torch.distributed as dist
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    folder = Path(root, "ours" if dist.get_rank() == 0 else "plain")
    convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "fp32")
    tag, universal = (folder / "latest").read_text(), folder / "universal"
    options = ["--input_folder", folder / tag, "--output_folder", universal, "--inject_missing_state"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", *map(str, options), "--num_extract_workers=1", "--num_merge_workers=1"])
        ds_to_universal.main(ds_to_universal.parse_arguments())
    return {**tensors(universal), **torch.load(folder / "fp32" / "pytorch_model.bin")}


@pytest.mark.parametrize(("stage", "options"), [(1, {"param_groups": 2}), (2, {"frozen": True}), (3, {})])
def test_converters_give_the_same_tensors(
    deepspeed_ranks: Ranks, tmp_path: Path, stage: int, options: dict[str, Any]
) -> None:
    deepspeed_ranks.run(2, saved_twice, str(tmp_path), stage, options)
    ours, plain = deepspeed_ranks.run(2, converted, str(tmp_path))
    assert ours.keys() == plain.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


# As if lazyckpt were not installed.
WITHOUT = """
import runpy, sys
sys.modules["lazyckpt"] = None
sys.path.append(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_the_script_beside_the_tags_needs_no_lazyckpt(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    deepspeed_ranks.run(2, saved_twice, str(tmp_path), 3, {})
    folder = tmp_path / "ours"
    script = [folder / "zero_to_fp32.py", folder, tmp_path / "weights"]
    program = [sys.executable, "-c", WITHOUT, os.path.join(sys.prefix, "deepspeed"), *map(str, script)]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "hidden.weight" in torch.load(tmp_path / "weights" / "pytorch_model.bin")
