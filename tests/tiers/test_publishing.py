"""What from_pretrained reads of a mirror that takes weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from file_server import Files, InMemory
from hub_server import HubServer
from object_store import S3
from processes import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from commands import run, run_json
from lazyckpt import Checkpointer, Mirror, MirrorError
from lazyckpt.conversion import weights

Place: TypeAlias = S3 | Files | InMemory

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def bert(seed: int = 1) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def assert_pretrained(folder: Path, model: torch.nn.Module) -> None:
    import transformers

    found = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    assert type(found) is type(model)
    assert_equal(found.state_dict(), model.state_dict())


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def published(folder: Path, *mirrors: Mirror, step: int = 5, **tracked: Any) -> None:
    with Checkpointer(folder, mirrors=mirrors) as ckpt:
        ckpt.track(**tracked)
        ckpt.save(step).mirrored().result(60)


def test_a_bucket_gets_weights_that_are_pulled_and_loaded(place: Place, tmp_path: Path) -> None:
    model = bert()
    mirror = Mirror(place.url(), what="model", every=5, keep_last=2)
    with Checkpointer(tmp_path / "a", keep_last=1, mirrors=[mirror]) as ckpt:
        ckpt.track(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        for step in (5, 7, 10, 15):
            with torch.no_grad():
                model.cls.predictions.bias.fill_(float(step))
            ckpt.save(step).mirrored().result(60)
        assert ckpt.mirror_lag_s == 0.0
    there = {name.split("/")[1] for name in place.names() if name.endswith(".safetensors")}
    assert there == {"model-00000010", "model-00000015"}
    assert run_json("pull", place.url(), tmp_path / "b") == {"path": str(tmp_path / "b" / "model-00000015")}
    assert_pretrained(tmp_path / "b" / "model-00000015", model)
    assert not list((tmp_path / "a").glob(".tmp-*"))


def test_a_mounted_folder_is_loaded_as_it_is(tmp_path: Path) -> None:
    model = bert()
    published(tmp_path / "a", Mirror(tmp_path / "lustre", what="model"), model=model)
    assert_pretrained(tmp_path / "lustre" / "model-00000005", model)
    assert "model-00000005" in run("ls", tmp_path / "lustre").output


def test_a_large_model_has_several_files_and_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SHARD_BYTES", 4000)
    model = bert()
    published(tmp_path / "a", Mirror(tmp_path / "m", what="model"), model=model)
    folder = tmp_path / "m" / "model-00000005"
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    assert_pretrained(folder, model)


def test_a_module_without_a_configuration_is_only_weights(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    published(tmp_path / "a", Mirror(tmp_path / "m", what="model"), net=model, numbers=torch.ones(3))
    folder = tmp_path / "m" / "model-00000005"
    assert sorted(os.listdir(folder)) == ["manifest.json", "model.safetensors"]
    assert_equal(loaded(folder), model.state_dict())


def test_the_names_are_those_inside_wrappers(tmp_path: Path) -> None:
    model = bert()
    published(tmp_path / "a", Mirror(tmp_path / "m", what="model"), model=torch.compile(model))
    assert_pretrained(tmp_path / "m" / "model-00000005", model)


def test_of_several_modules_one_is_named(tmp_path: Path) -> None:
    student, teacher = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    tracked = {"student": student, "teacher": teacher}
    with (
        pytest.warns(UserWarning, match="could not be uploaded"),
        pytest.raises(MirrorError, match=r"step 5: several modules are tracked: student, teacher; say which"),
    ):
        published(tmp_path / "a", Mirror(tmp_path / "m", what="model"), **tracked)
    published(tmp_path / "b", Mirror(tmp_path / "n", what="model", model="teacher"), **tracked)
    assert_equal(loaded(tmp_path / "n" / "model-00000005"), teacher.state_dict())
    with (
        pytest.warns(UserWarning, match="could not be uploaded"),
        pytest.raises(MirrorError, match="no module is tracked as 'pupil'; there is: student, teacher"),
    ):
        published(tmp_path / "c", Mirror(tmp_path / "o", what="model", model="pupil"), **tracked)


class Odd(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_module_that_has_more_than_weights_is_told(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="could not be uploaded"),
        pytest.raises(MirrorError, match="safetensors holds named tensors and nothing else: '_extra_state'"),
    ):
        published(tmp_path / "a", Mirror(tmp_path / "m", what="model"), model=Odd(2, 2))
    assert not list((tmp_path / "a").glob(".tmp-*"))


@pytest.mark.parametrize("how", ["wrapped", "added"])
def test_adapters_are_no_model(tmp_path: Path, how: str) -> None:
    peft = pytest.importorskip("peft")
    model, lora = bert(), peft.LoraConfig(r=2, target_modules=["query"])
    if how == "wrapped":
        model = peft.get_peft_model(model, lora)
    else:
        model.add_adapter(lora)
    with (
        pytest.warns(UserWarning, match="could not be uploaded"),
        pytest.raises(MirrorError, match="'model' has adapters of PEFT"),
    ):
        published(tmp_path / "a", Mirror(tmp_path / "m", what="model"), model=model)


def test_no_run_resumes_from_weights(s3: S3, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    places = [Mirror(s3.url("all")), Mirror(s3.url("models"), what="model")]
    published(tmp_path / "a", *places, model=model)
    with Checkpointer(tmp_path / "b", mirrors=places[1:]) as ckpt:
        ckpt.track(model=model)
        assert ckpt.restore() is None and ckpt.steps() == []
    with Checkpointer(tmp_path / "c", mirrors=places) as ckpt:
        ckpt.track(model=model)
        assert str(ckpt.restore().path) == f"{s3.url('all')}/step-00000005"  # type: ignore[union-attr]
        ckpt.save(6).mirrored().result(60)  # it goes on with the run, in both places


JOB = """
import sys, torch, lazyckpt
mirror = lazyckpt.Mirror("hf://org/model", what="model", options={"endpoint": sys.argv[2]})
with lazyckpt.Checkpointer(sys.argv[1], mirrors=[mirror]) as ckpt:
    model = torch.nn.Linear(300, 200)
    ckpt.track(model=model)
    if ckpt.restore() is None:
        with torch.no_grad():
            model.weight.fill_(7.0)
        ckpt.save(5).result()
        while True:
            pass
"""


@pytest.mark.long
def test_what_a_killed_process_did_not_publish_the_next_one_does(hub: HubServer, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", JOB, str(tmp_path / "a"), hub.endpoint]
    hub.held.clear()
    job = subprocess.Popen(command, env=environment)
    assert hub.reached.wait(120)
    job.send_signal(signal.SIGKILL)
    job.wait()
    left = [path for path in (tmp_path / "a").glob(".tmp-model-*")]
    assert len(left) == 1
    hub.lose_commits()
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert hub.messages("org/model") == ["Step 5"] and not list((tmp_path / "a").glob(".tmp-*"))
    assert torch.equal(loaded(hub.checked_out("org/model", tmp_path / "out"))["weight"], torch.full((200, 300), 7.0))
    hub.asked.clear()
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert not [asked for asked in hub.asked if "/commit/" in asked]  # it is there


def sharded(folder: Path) -> bool:
    model = bert()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with Checkpointer(folder / "a", mirrors=[Mirror(folder / "m", what="model")]) as ckpt:
        ckpt.track(model=model)
        handle = ckpt.save(5)
        handle.result(60)
        handle.mirrored().result(60)  # on every rank
    dist.barrier()
    found = loaded(folder / "m" / "model-00000005")
    return all(torch.equal(found[name], whole[name]) for name in found)


@pytest.mark.long
def test_the_weights_of_many_ranks_are_one_model(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, sharded, tmp_path) == [True, True]
    assert_pretrained(tmp_path / "m" / "model-00000005", bert())
