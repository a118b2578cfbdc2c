"""What people do in a notebook: run a cell again, look at an object, wait for a save."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import waits
from lazyckpt.errors import ConfigError
from lazyckpt.pipeline import wait_bar


def test_a_cell_that_tracks_may_run_again(tmp_path: Path) -> None:
    model, loader = torch.nn.Linear(2, 2), torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type]
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        for _ in range(2):
            ckpt.track(model=model)
            wrapped = ckpt.track_loader(loader)
            assert ckpt.track_loader(wrapped) is wrapped is ckpt.track_loader(loader)
        ckpt.save(1).result()
        assert ckpt.restore() == 1


def test_another_object_takes_the_name_when_asked(tmp_path: Path) -> None:
    old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=old)
        with pytest.raises(ConfigError, match="'model' is taken by another Linear; replace=True replaces it"):
            ckpt.track(model=new)
        ckpt.track(replace=True, model=new)
        assert old not in ckpt._saver.launcher.modules
        saved = torch.load(ckpt.save(1).result() / "state.pt")["model"]
        assert torch.equal(saved["weight"], new.weight)
        with pytest.raises(ConfigError, match="'rng' is taken"):
            ckpt.track(replace=True, rng={})
        loader = ckpt.track_loader(torch.utils.data.DataLoader(range(4)))  # type: ignore[arg-type]
        other = torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type]
        assert ckpt.track_loader(other, replace=True) is not loader


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: lazyckpt.Checkpointer("x", keep_lst=3),
            "Checkpointer: 'keep_lst' is not a setting; did you mean 'keep_last'?",
        ),
        (
            lambda: lazyckpt.Checkpointer("x", save_evry=3),
            "Checkpointer: 'save_evry' is not a setting; did you mean 'save_every'?",
        ),
        (lambda: lazyckpt.Saver(chunk_byte=1), "Saver: 'chunk_byte' is not a setting; did you mean 'chunk_bytes'?"),
        (lambda: lazyckpt.Saver(zzz=1), "Saver: 'zzz' is not a setting; there is: host_buffer_bytes"),
    ],
)
def test_a_misspelt_setting_is_told_with_what_was_meant(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message) and not Path("x").exists()


def test_what_objects_look_like(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=torch.nn.Linear(2, 2))
        assert repr(ckpt) == f"<Checkpointer {tmp_path}: tracks model, rng; 0 saves in flight>"
        handle = ckpt.save(3)
        assert repr(handle).startswith(f"<SaveHandle step 3, {tmp_path}/step-00000003: ")
        handle.result()
        assert handle.progress == 1.0 and "durable after" in repr(handle)
    assert repr(ckpt).endswith("; closed>")


def test_a_failed_save_looks_failed(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path, on_error="warn") as ckpt:
        ckpt.track(state={"a lock": threading.Lock()})
        with pytest.warns(UserWarning):
            handle = ckpt.save(3)
        assert handle.progress == 0.0 and "failed: " in repr(handle)


def test_a_long_wait_shows_a_bar_where_somebody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "PROGRESS_BAR_AFTER_S", 0)
    with wait_bar.WaitBar() as bar:
        bar.show("saving step-3", lambda: 0.5)
    assert capsys.readouterr() == ("", ""), "standard error is no terminal"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with wait_bar.WaitBar() as bar:
        bar.show("saving step-3", lambda: 0.5)
        bar._bar.refresh()
    told = capsys.readouterr()
    assert "saving step-3" in told.err and "50%" in told.err and told.out == ""

    def elsewhere() -> None:
        with wait_bar.WaitBar() as bar:
            bar.show("saving step-3", lambda: 0.5)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert capsys.readouterr() == ("", "")
