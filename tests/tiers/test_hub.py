"""Commits to a server that speaks as the Hub does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import TOKEN, HubServer

from lazyckpt import Checkpointer, ConfigError, Mirror, MirrorError
from lazyckpt.conversion import weights
from lazyckpt.storage.manifest import checkpoint_of
from lazyckpt.tiers.described import Saved
from lazyckpt.tiers.mirrors import tier_of

NAME = "org/model"


def mirror(hub: HubServer, **about: Any) -> Mirror:
    options = {"endpoint": hub.endpoint, **about.pop("options", {})}
    return Mirror(f"hf://{NAME}", what="model", options=options, **about)


def files(hub: HubServer) -> dict[str, bytes]:
    return hub.repositories[NAME].commits[-1].files


def test_each_publication_is_one_commit_that_from_pretrained_loads(hub: HubServer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    with Checkpointer(tmp_path / "a", mirrors=[mirror(hub, every=5, options={"private": True})]) as ckpt:
        ckpt.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
        for step in (5, 6, 10):
            with torch.no_grad():
                model.transformer.ln_f.bias.fill_(float(step))
            ckpt.save(step).mirrored().result(60)
    assert hub.messages(NAME) == ["Step 5", "Step 10"] and hub.repositories[NAME].private
    settings = {".gitattributes", "lazyckpt.json", "config.json", "generation_config.json"}
    assert files(hub).keys() == settings | {"model.safetensors"}
    assert json.loads(files(hub)["lazyckpt.json"])["step"] == 10
    found = transformers.AutoModelForCausalLM.from_pretrained(hub.checked_out(NAME, tmp_path / "out"))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_shards_of_an_older_model_go_in_the_same_commit(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SHARD_BYTES", 4000)
    with Checkpointer(tmp_path / "a", mirrors=[mirror(hub)]) as ckpt:
        ckpt.track(model=torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)))
        ckpt.save(1).mirrored().result(60)
        assert {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} < files(hub).keys()
        monkeypatch.setattr(weights, "_SHARD_BYTES", 5_000_000_000)
        ckpt.save(2).mirrored().result(60)
    assert files(hub).keys() == {".gitattributes", "lazyckpt.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("status", "part", "told"),
    [
        (401, "", r"the token is missing, wrong or expired \(401\): set HF_TOKEN"),
        (403, "/api/repos/create", r"has no right to write to org/model \(403\)"),
        (403, "/commit/", r"has no right to write to org/model \(403\)"),
    ],
)
def test_what_the_hub_refuses_is_told_without_the_token(
    hub: HubServer, tmp_path: Path, status: int, part: str, told: str
) -> None:
    hub.refused[part] = status
    with (
        pytest.warns(UserWarning, match=told) as warned,
        Checkpointer(tmp_path / "a", mirrors=[mirror(hub)]) as ckpt,
    ):
        ckpt.track(model=torch.nn.Linear(2, 2))
        first = ckpt.save(1)
        with pytest.raises(MirrorError, match=f"hf://org/model: {'.*'}{told}") as caught:
            first.mirrored().result(60)
        hub.refused.clear()
        ckpt.save(2).mirrored().result(60)
    assert hub.messages(NAME) == ["Step 2"]
    error: BaseException | None = caught.value
    while error is not None:
        assert TOKEN not in str(error)
        error = error.__cause__ or error.__context__
    assert not any(TOKEN in str(warning.message) for warning in warned)


def test_a_wrong_token_is_told(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    with pytest.warns(UserWarning), Checkpointer(tmp_path / "a", mirrors=[mirror(hub)]) as ckpt:
        ckpt.track(model=torch.nn.Linear(2, 2))
        with pytest.raises(MirrorError, match=r"wrong or expired \(401\)") as caught:
            ckpt.save(1).mirrored().result(60)
    assert "hunter2" not in str(caught.value)


def test_a_hub_that_fails_is_tried_again(hub: HubServer, tmp_path: Path) -> None:
    hub.refused["/api/models/org/model"] = 500
    with pytest.warns(UserWarning) as warned, Checkpointer(tmp_path / "a", mirrors=[mirror(hub)]) as ckpt:
        ckpt.track(model=torch.nn.Linear(2, 2))
        handle = ckpt.save(1)
        while len([asked for asked in hub.asked if asked == "GET /api/models/org/model"]) < 3:
            assert not handle.mirrored().done()
        hub.refused.clear()
        handle.mirrored().result(60)
    told = [str(warning.message) for warning in warned]
    assert any("the request failed (status 500); it is tried again" in text for text in told)
    assert any("works again: step 1 is there" in text for text in told)


def test_a_commit_in_between_is_kept(hub: HubServer, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"status 412\); it is tried again"):  # noqa: SIM117
        with Checkpointer(tmp_path / "a", mirrors=[mirror(hub)]) as ckpt:
            ckpt.track(model=torch.nn.Linear(2, 2))
            hub.held.clear()
            handle = ckpt.save(1)
            assert hub.reached.wait(60)
            hub.commit_beside(NAME, "README.md", b"written by hand")
            hub.held.set()
            handle.mirrored().result(60)
    assert files(hub)["README.md"] == b"written by hand" and hub.messages(NAME)[-1] == "Step 1"


def test_two_runs_do_not_mix_in_one_repository(hub: HubServer, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        with Checkpointer(tmp_path / folder, mirrors=[mirror(hub)]) as ckpt:
            ckpt.track(model=torch.nn.Linear(2, 2))
            handle = ckpt.save(1)
            if folder == "a":
                handle.mirrored().result(60)
                continue
            with (
                pytest.warns(UserWarning, match="another run"),
                pytest.raises(MirrorError, match="holds the checkpoints of another run"),
            ):
                handle.mirrored().result(60)
    assert hub.messages(NAME) == ["Step 1"]


@pytest.mark.long(first=2)
@pytest.mark.parametrize("note", [b"", b"[]", b'{"step": 1}', b"{" * 9000])
def test_a_foreign_file_in_the_place_of_ours_is_told(hub: HubServer, tmp_path: Path, note: bytes) -> None:
    hub.create(NAME, {"lazyckpt.json": note})
    with pytest.warns(UserWarning, match=r"hf://org/model/lazyckpt.json: not a file of lazyckpt"):  # noqa: SIM117
        with Checkpointer(tmp_path / "a", mirrors=[mirror(hub)]) as ckpt:
            ckpt.track(model=torch.nn.Linear(2, 2))
            ckpt.save(1).result()
    assert hub.messages(NAME) == []


def test_what_a_trainer_has_published_is_not_committed_again(hub: HubServer, tmp_path: Path) -> None:
    tier = tier_of(mirror(hub))
    tier.belong("run")

    def upload(name: str, step: int | None, sequence: int) -> None:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(name.encode())
        text = Saved(folder, step, {}).described(sequence, None, "model")
        tier.upload(checkpoint_of(folder, text, "folder"), text, lambda file: iter(()))

    upload("checkpoint-5", 5, 1), upload("checkpoint-5", 5, 2), upload("last", None, 3)
    assert hub.messages(NAME) == ["Step 5", "last"] and files(hub)["model.safetensors"] == b"last"


UNCLOSED = """
import sys, torch, lazyckpt
mirror = lazyckpt.Mirror("hf://org/model", what="model", options={"endpoint": sys.argv[2]})
ckpt = lazyckpt.Checkpointer(sys.argv[1], mirrors=[mirror])
ckpt.track(model=torch.nn.Linear(2, 2))
ckpt.save(1)
"""


def test_what_a_script_could_not_publish_the_next_one_does(hub: HubServer, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_XET": "1"}
    hub.refused["/api/repos/create"] = 500
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path / "a"), hub.endpoint]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0 and "not all checkpoints are in hf://org/model" in job.stderr
    hub.refused.clear()
    with Checkpointer(tmp_path / "a", mirrors=[mirror(hub)]) as ckpt:
        ckpt.track(model=torch.nn.Linear(2, 2))
    assert hub.messages(NAME) == ["Step 1"]


def test_a_hub_that_needs_threads_when_python_ends_is_told(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    with monkeypatch.context() as ending, pytest.warns(UserWarning, match=r"close\(\) the Checkpointer before"):
        ending.setattr("concurrent.futures.ThreadPoolExecutor.submit", submit)  # as it does then
        ending.setattr(weights, "_SHARD_BYTES", 4000)  # several files
        with Checkpointer(tmp_path / "a", mirrors=[mirror(hub)]) as ckpt:
            ckpt.track(model=torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)))
            ckpt.save(1)


def test_options_that_the_hub_does_not_take_are_told(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="options: tokn: expected endpoint, token, private") as caught:
        Checkpointer(tmp_path / "a", mirrors=[mirror(hub, options={"tokn": "hf_hunter2"})])
    assert "hunter2" not in str(caught.value)


def test_without_its_library_the_hub_is_refused(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'lazyckpt\[hf\]'"):
        Checkpointer(tmp_path / "a", mirrors=[mirror(hub)])
