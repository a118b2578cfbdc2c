"""Whole runs under accelerate, in processes of their own: kills, ranks, the example."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate", "1.0")


import lazyckpt  # noqa: E402
import lazyckpt.run  # noqa: E402
from accelerate_training import Run, names, number  # noqa: E402
from lazyckpt.integrations.accelerate import enable  # noqa: E402
from lazyckpt.storage import commit, folders  # noqa: E402
from trainers import Forked, contents, ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
SCRIPT = Path(__file__).with_name("plain_accelerate.py")


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``python -m lazyckpt.run`` in this process."""

    def run_main(*arguments: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(accelerate.Accelerator, "__init__", accelerate.Accelerator.__init__)
            patch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
            patch.setattr(sys, "path", [os.getcwd(), *sys.path])
            lazyckpt.run.main()

    return run_main


@pytest.fixture
def run_here(run_main: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[int, str]]:
    """Runs the script in this process: the loss by step."""

    def run_here(*arguments: object) -> dict[int, str]:
        run_main(SCRIPT, *arguments)
        return losses(capsys.readouterr().out)

    return run_here


def losses(printed: str) -> dict[int, str]:
    entries = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {entry["step"]: entry["loss"] for entry in entries}


def launch(*arguments: object, folder: Path) -> list[tuple[int, dict[int, str], str]]:
    """Runs the script with lazyckpt on two ranks: the exit code, the loss by step and the output of each."""
    children = ranks(lambda: main(*arguments), folder)
    codes = [child.wait() for child in children]
    printed = [child.output.read_text() for child in children]
    return [(code, losses(text), text) for code, text in zip(codes, printed, strict=True)]


def main(*arguments: object) -> None:
    sys.argv = ["run.py", str(SCRIPT), *map(str, arguments)]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    lazyckpt.run.main()


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, graph: Any, run_here: Any) -> None:
    """Dropout, shuffling, a scheduler and accumulation; killed while a folder has its temporary name."""
    whole = run_here(tmp_path / "whole", 14, 2)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", "lazyckpt.run", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(tmp_path / "killed"), "14", "2", "kill-at=5"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    killed = losses(done.stdout)
    assert done.returncode != 0 and "died with <Signals.SIGKILL" in done.stderr, done.stderr
    assert list((tmp_path / "killed" / ".lazyckpt" / "staged").glob(".tmp-*"))
    resumed = run_here(tmp_path / "killed", 14, 2)
    assert sorted(whole) == list(range(1, 15)) and 1 < min(resumed) <= max(killed) + 1 <= 14
    assert {**killed, **resumed} == whole == {**resumed, **killed}
    # Later checkpoints are the same, too; the numbers go on where the killed run stopped.
    newest = [sorted((tmp_path / run / "checkpoints").iterdir(), key=number)[-1] for run in ("whole", "killed")]
    assert contents(newest[0], graph) == contents(newest[1], graph)
    assert names(tmp_path / "killed") == ["checkpoints"] and len(names(newest[1].parent)) == 2


def save_until_killed(folder: Path) -> None:
    """Saves step_1, step_2, … into the working folder, and is killed before step_3 has its name."""
    os.chdir(folder)
    publish = commit.Staging.publish

    def deadly(self: commit.Staging) -> Any:
        if self.target.name == "step_3":
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(self)

    commit.Staging.publish = deadly  # type: ignore[method-assign]
    run = Run()
    enable(run.accelerator)
    for step in (1, 2, 3, 4):
        run.step()
        run.accelerator.save_state(f"step_{step}")
        if step < 3:
            wait_for_a_later_time(Path(f"step_{step}"))
    run.accelerator.end_training()


def wait_for_a_later_time(path: Path) -> None:
    """Until the path exists, and what changes from then on has a later time: the file system's clock is coarse."""
    probe = path.with_name("probe")
    probe.touch()
    while not path.exists() or probe.stat().st_mtime_ns <= max(path.stat().st_ctime_ns, path.stat().st_mtime_ns):
        probe.touch()
        time.sleep(0.001)
    probe.unlink()


@pytest.mark.parametrize("time_of", [os.path.getctime, os.path.getmtime])
def test_the_idiom_of_accelerates_examples_resumes_after_a_kill(
    time_of: Callable[[str], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the newest folder was .tmp-step_3-…, and stayed it at every start."""
    folder = tmp_path / "run"
    (folder / "step_0").mkdir(parents=True)  # of a run without lazyckpt
    died = Forked(lambda: save_until_killed(folder), tmp_path / "output")
    assert died.wait() == -signal.SIGKILL, died.output.read_text()
    monkeypatch.chdir(folder)
    dirs = [f.name for f in os.scandir(os.getcwd()) if f.is_dir()]
    dirs.sort(key=time_of)
    assert (dirs[-1], sorted(dirs)) == ("step_2", [".lazyckpt", "step_0", "step_1", "step_2"])
    run = Run()
    enable(run.accelerator)
    run.accelerator.load_state(dirs[-1])
    run.step()
    run.accelerator.save_state("step_3")
    run.accelerator.end_training()
    assert names(folder) == ["step_0", "step_1", "step_2", "step_3"]


def test_enable_removes_what_a_killed_run_of_an_older_version_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the script would find it, before the first save, and stay stuck."""
    for root in (tmp_path, tmp_path / "project"):
        for prefix in (folders.TEMPORARY, folders.TRASH):
            folders.fresh_name(prefix, root / "step_3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    enable(accelerate.Accelerator(cpu=True, project_dir="project"))
    assert names(tmp_path) == ["project"] and names(tmp_path / "project") == []


@pytest.mark.parametrize("left", [".lazyckpt", ".lazyckpt/staged/.tmp-step_3-*", ".tmp-step_3-*", ".trash-step_1-*"])
def test_load_state_of_a_temporary_name_says_which_checkpoint_is_whole(left: str, tmp_path: Path) -> None:
    run = Run()
    enable(run.accelerator)
    run.accelerator.save_state(tmp_path / "step_2")
    run.accelerator.end_training()
    unfinished = tmp_path / left.replace("*", "0" * 32)
    unfinished.mkdir(parents=True)
    with pytest.raises(lazyckpt.LoadError, match=f"the newest whole one is {tmp_path}/step_2"):
        run.accelerator.load_state(str(unfinished))


def test_two_ranks_save_one_folder(tmp_path: Path, graph: Any) -> None:
    whole = launch(tmp_path / "whole", 6, 2, folder=tmp_path)
    assert [code for code, _, _ in whole] == [0, 0], whole
    newest = tmp_path / "whole" / "checkpoints" / "checkpoint_2"
    states = [torch.load(newest / f"random_states_{rank}.pkl", weights_only=False) for rank in range(2)]
    assert not torch.equal(states[0]["torch_manual_seed"], states[1]["torch_manual_seed"])
    assert names(tmp_path / "whole" / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    # Once more from the middle, as if the machine had failed before the last one was durable.
    shutil.copytree(newest.with_name("checkpoint_1"), tmp_path / "again" / "checkpoints" / "checkpoint_1")
    again = launch(tmp_path / "again", 6, 2, folder=tmp_path)
    for rank in range(2):
        assert again[rank][1] == {step: whole[rank][1][step] for step in (5, 6)}, again
    assert contents(tmp_path / "again" / "checkpoints" / "checkpoint_2", graph) == contents(newest, graph)
    assert whole[0][1] != whole[1][1] and names(tmp_path / "again") == ["checkpoints"]


@pytest.mark.parametrize("how", ["raise", pytest.param("die", marks=pytest.mark.slow)])
def test_a_rank_that_fails_fails_the_save_on_all_ranks(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    (main, _, told), (other, _, _) = launch(run, 4, 2, f"hook={how}", folder=tmp_path)
    assert main not in (0, -signal.SIGKILL) and other != 0
    if how == "raise":
        assert "SaveError" in told and "the hook of rank 1 failed" in told
    assert names(run / "checkpoints") == []
    assert names(run) == ["checkpoints"]


def test_run_gives_a_script_what_it_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_main: Callable[..., None], capsys: Any
) -> None:
    (tmp_path / "beside.py").write_text("value = 42")
    (tmp_path / "train.py").write_text(
        "import pickle, sys\n"
        "from accelerate import Accelerator\n"
        "import beside\n"
        "class Own: pass\n"
        "pickle.loads(pickle.dumps(Own()))\n"
        "accelerator = Accelerator(cpu=True)\n"
        "print(__name__, sys.argv[1:], beside.value, type(accelerator.save_state.__self__).__name__)\n"
    )
    run_main(tmp_path / "train.py", "--lr", "1")
    monkeypatch.chdir(tmp_path)
    run_main("-m", "train", "--lr", "1")
    assert capsys.readouterr().out.splitlines() == ["__main__ ['--lr', '1'] 42 StateSaver"] * 2
    with pytest.raises(SystemExit, match="usage"):
        run_main("--lr", "1")


def test_the_example_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "accelerate_loop.py")
    arguments = ["--folder", str(tmp_path), "--steps", "6", "--every", "2", "--width", "32"]
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    runpy.run_path(example, run_name="__main__")
    assert "save_state took" in capsys.readouterr().out
    checkpoints = tmp_path / "checkpoints"
    assert names(checkpoints) == ["checkpoint_1", "checkpoint_2"]
    train = runpy.run_path(example)["train"]
    whole = train(tmp_path / "whole", 6, 2, 32)
    shutil.rmtree(checkpoints / "checkpoint_2")
    rest = train(tmp_path, 6, 2, 32)
    assert rest == {5: whole[5], 6: whole[6]} and len(whole) == 6
    assert "resumed after step 4" in capsys.readouterr().out
