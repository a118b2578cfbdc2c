"""DeepSpeed on two gloo ranks: its own files, lazily, as one snapshot; its own code resumes from them.

The cases import DeepSpeed, and this module does not: accelerate and transformers would find it in this process, too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import different
from processes import Ranks

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
PARAMETERS, SUB_GROUPS = {"offload_param": {"device": "cpu"}}, {"sub_group_size": 6000}
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "0, fp32": ({"stage": 0}, {}),
    "0, bf16": ({"stage": 0, "dtype": "bf16"}, {}),
    "0, frozen": ({"stage": 0}, {"frozen": True}),
    "1, fp32": ({"stage": 1}, {}),
    "1, bf16": ({"stage": 1, "dtype": "bf16"}, {}),
    "1, bf16, two groups": ({"stage": 1, "dtype": "bf16"}, {"param_groups": 2}),
    "1, bf16, round robin": ({"stage": 1, "dtype": "bf16", "zero": {"round_robin_gradients": True}}, {}),
    "1, bf16, padded": ({"stage": 1, "dtype": "bf16"}, {"width": 47}),
    "2, fp32, padded": ({"stage": 2}, {"width": 47}),
    "2, fp32, accumulated": ({"stage": 2, "gas": 2}, {}),
    "2, bf16, overlapped": ({"stage": 2, "dtype": "bf16", "zero": {"overlap_comm": True}}, {}),
    "2, bf16, three groups, frozen": ({"stage": 2, "dtype": "bf16"}, {"param_groups": 3, "frozen": True}),
    "2, bf16, offloaded": ({"stage": 2, "dtype": "bf16", "zero": OFFLOADED}, {}),
    "2, excluded frozen": ({"stage": 2}, {"frozen": True, "excluded": True}),
    "3, fp32": ({"stage": 3}, {}),
    "3, bf16, accumulated": ({"stage": 3, "dtype": "bf16", "gas": 2}, {}),
    "3, bf16, sub-groups": ({"stage": 3, "dtype": "bf16", "zero": SUB_GROUPS}, {"param_groups": 2}),
    "3, bf16, frozen": ({"stage": 3, "dtype": "bf16"}, {"frozen": True}),
    "3, bf16, all offloaded": ({"stage": 3, "dtype": "bf16", "zero": OFFLOADED | PARAMETERS}, {}),
}


def resumed(folder: str, settings: dict[str, Any], options: dict[str, Any]) -> Any:
    """Saves twice with lazyckpt and once with DeepSpeed's own engine, in between two steps, and resumes with that."""
    from deepspeed_training import WIDTH, built, config, train

    from lazyckpt.integrations.deepspeed import LazyCheckpointEngine, enable

    excluded = options.pop("excluded", False)
    settings = config(**settings)
    accumulation = settings["gradient_accumulation_steps"]
    width = options.get("width", WIDTH)
    engine = built({**settings, "lazyckpt": {}}, **options)
    ours = engine.checkpoint_engine
    assert isinstance(ours, LazyCheckpointEngine)
    train(engine, 0, 2 * accumulation, width)
    engine.save_checkpoint(f"{folder}/ours", exclude_frozen_parameters=excluded)
    train(engine, 2 * accumulation, 4 * accumulation, width)
    engine.save_checkpoint(f"{folder}/ours", client_state={"note": "mine"}, exclude_frozen_parameters=excluded)
    handle = ours.last_save
    expected = train(engine, 4 * accumulation, 6 * accumulation, width)  # while it is copied
    assert handle is not None
    handle.result()
    latest = Path(folder, "ours", "latest").read_text()
    enable(engine, enabled=False)
    engine.destroy()

    plain = built(settings, **options)
    assert not isinstance(plain.checkpoint_engine, LazyCheckpointEngine)
    _, client = plain.load_checkpoint(f"{folder}/ours", load_module_strict=not excluded)
    assert client["note"] == "mine"
    plain.save_checkpoint(f"{folder}/plain", client_state={"note": "mine"}, exclude_frozen_parameters=excluded)
    found = train(plain, 4 * accumulation, 6 * accumulation, width)
    plain.destroy()
    return expected, found, latest, handle.metrics.bytes, handle.metrics.eager_bytes


@pytest.mark.long(first=1)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_deepspeed_resumes_bit_for_bit_from_its_own_files(deepspeed_ranks: Ranks, tmp_path: Path, name: str) -> None:
    settings, options = CONFIGURATIONS[name]
    told = deepspeed_ranks.run(2, resumed, str(tmp_path), settings, options)
    for expected, found, latest, nbytes, eager in told:
        assert found == expected and latest == "global_step4"
        if settings["stage"] > 0 and not options.get("frozen"):
            assert eager <= 64 << 10 and eager <= nbytes / 10
    assert sorted(os.listdir(tmp_path / "ours")) == sorted({"global_step2", *os.listdir(tmp_path / "plain")})
    assert deepspeed_ranks.run(1, different, str(tmp_path), "global_step4") == [[]]
