"""What a Mirror takes, and what it says of what it does not take."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest

import lazyckpt
from lazyckpt import ConfigError, Mirror


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"url": ""}, "neither a URL nor a path"),
        ({"url": 3}, "neither a URL nor a path"),
        ({"url": "s3:/bucket/a"}, "two slashes"),
        ({"url": Path("s3://bucket/a")}, "two slashes"),
        ({"url": "s3://"}, "the name of a bucket"),
        ({"url": "nowhere://host/a"}, "expected one of s3://"),
        ({"url": "hf://org/model"}, "is no place to resume from; what='model' publishes the weights there"),
        ({"url": "hf://org", "what": "model"}, "expected hf://organization/model"),
        ({"url": "hf://datasets/org/data", "what": "model"}, "expected hf://organization/model"),
        ({"url": "hf:/org/model", "what": "model"}, "expected hf://organization/model"),
        ({"url": "hf://user:hunter2@org/model", "what": "model"}, "expected hf://organization/model"),
        ({"url": "hf://org/model", "what": "model", "keep_last": 2}, "keep_last is not for the Hub"),
        ({"url": "hf://org/model", "what": "model", "max_bytes_per_s": 2}, "max_bytes_per_s is not for the Hub"),
        ({"url": "s3://bucket/a", "what": "weights"}, "what='weights': expected 'all' or 'model'"),
        ({"url": "s3://bucket/a", "model": "net"}, "the name of a tracked module, for what='model'"),
        ({"url": "s3://bucket/a?region=x"}, "a query"),
        ({"url": "s3://bucket/a", "every": 0}, "every=0: expected a whole number, at least 1"),
        ({"url": "s3://bucket/a", "every": 2.0}, "every=2.0: expected a whole number"),
        ({"url": "s3://bucket/a", "keep_last": True}, "keep_last=True: expected a whole number"),
        ({"url": "s3://bucket/a", "keep_every": 5}, "give keep_last, too"),
        ({"url": "s3://bucket/a", "max_bytes_per_s": -1}, "max_bytes_per_s=-1: expected a positive number"),
        ({"url": "s3://bucket/a", "max_bytes_per_s": float("nan")}, "expected a positive number"),
    ],
)
def test_what_it_does_not_take_is_told(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Mirror(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA123:hunter2@bucket/a",
        "gs://user:hunter2@bucket/a?x=hunter2",
        "s3://AKIA123:hun/hunter2@bucket/a",
        "s3:/AKIA123:hunter2@bucket/a",
    ],
)
def test_a_url_with_credentials_is_refused_without_telling_them(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Mirror(url)
    with pytest.raises(ConfigError) as listed:
        lazyckpt.Checkpointer(tmp_path, mirrors=url)  # a str, not a list
    assert "hunter2" not in str(listed.value)
    assert "hunter2" not in str(caught.value) and "AKIA" not in str(caught.value)


def test_options_are_not_shown() -> None:
    mirror = Mirror("s3://bucket/a/", options={"secret_access_key": "hunter2"})
    assert "hunter2" not in repr(mirror) and str(mirror) == "s3://bucket/a"


def test_a_folder_is_a_place_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(Mirror("lustre/a")) == str(tmp_path / "lustre" / "a") == str(Mirror(f"file://{tmp_path}/lustre/a"))


def test_mirrors_is_a_list_without_repetitions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a list"):
        lazyckpt.Checkpointer(tmp_path / "a", mirrors="s3://bucket/a")
    with pytest.raises(ConfigError, match="is there twice"):
        lazyckpt.Checkpointer(tmp_path / "a", mirrors=["s3://bucket/a", Mirror("s3://bucket/a/")])
    with pytest.raises(ConfigError, match="the folder of the run"):
        lazyckpt.Checkpointer(tmp_path / "a", mirrors=[tmp_path / "a"])


def test_an_unknown_option_is_told(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match="endpont"):
        lazyckpt.Checkpointer(tmp_path, mirrors=[Mirror("s3://bucket/a", options={"endpont": "http://x"})])
    with pytest.raises(ConfigError, match="skip_signature") as caught:
        lazyckpt.Checkpointer(tmp_path, mirrors=[Mirror("s3://bucket/a", options={"skip_signature": "hunter2"})])
    assert "hunter2" not in str(caught.value)


SECRET = {"secret_access_key": "of-tests", "region": "x"}


def tell_secret(mirror: Mirror, told: Any) -> None:
    told.put(mirror.options["secret_access_key"])


def test_a_pickle_does_not_hold_secrets_unless_a_process_is_started_with_it() -> None:
    mirror = Mirror("s3://bucket/a", every=5, options=SECRET)
    for holder in (mirror, {"mirrors": [mirror]}):
        with pytest.raises(TypeError, match=r"options may hold credentials \(secret_access_key\)"):
            pickle.dumps(holder)
    assert copy.deepcopy({"mirrors": [mirror]})["mirrors"][0].options == SECRET
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    child = context.Process(target=tell_secret, args=(mirror, told))
    child.start()
    assert told.get() == "of-tests"
    child.join(60)
    public = Mirror("s3://bucket/a", every=5, options={"endpoint": "https://minio.example.org"})
    for one in (public, Mirror("/lustre/a", keep_last=3)):
        assert pickle.loads(pickle.dumps(one)) == one
