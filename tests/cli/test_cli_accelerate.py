"""``lazyckpt accelerate config``: the questions, the file, and the messages for wrong answers."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lazyckpt import settings
from lazyckpt.cli import app

yaml = pytest.importorskip("yaml")


def config(*arguments: str | Path, answers: str = "") -> Result:
    return CliRunner().invoke(app, ["accelerate", "config", *map(str, arguments)], input=answers)


def test_default_asks_nothing_and_spares_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "lazyckpt.yaml"
    assert config("--default", "--config_file", file).exit_code == 0  # accelerate's spelling
    assert settings.gather(file, {}) == {name: settings.DEFAULTS[name] for name in settings.read_file(file)}
    before = file.read_text()
    result = config("--default", "--config-file", file)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and "exists already" in result.stderr
    assert file.read_text() == before


def test_answers_are_written_as_what_they_mean(tmp_path: Path) -> None:
    file = tmp_path / "lazyckpt.yaml"
    result = config("--config-file", file, answers="no\n67108864\n3\nbefore_step\nwarn\n")
    assert result.exit_code == 0, result.output
    assert settings.read_file(file) == {
        "enabled": False,
        "host_buffer_bytes": 67108864,
        "max_in_flight": 3,
        "durability": "before_step",
        "on_error": "warn",
    }


def test_a_wrong_answer_is_explained_and_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "lazyckpt.yaml"
    result = config("--config-file", file, answers="perhaps\nyes\n64\nlots\nauto\n0\n2\nlater\nasync\nraise\n")
    assert result.exit_code == 0, result.output
    expected = ["expected true or false", "must hold two chunks", "host_buffer_bytes='lots'", "max_in_flight=0"]
    for explanation in [*expected, "expected one of 'async', 'before_step'"]:
        assert explanation in result.output
    assert settings.read_file(file)["max_in_flight"] == 2


def test_an_existing_file_gives_the_defaults_and_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "lazyckpt.yaml"
    file.write_text("max_in_flight: 4\ncopy_threads: 3\n")
    assert config("--config-file", file, answers="\n" * 5).exit_code == 0
    written = settings.read_file(file)
    assert (written.pop("max_in_flight"), written.pop("copy_threads")) == (4, 3)
    assert written == {name: settings.DEFAULTS[name] for name in written}
    assert set(written) == {"enabled", "host_buffer_bytes", "durability", "on_error"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n", "one 'setting: value' per line"),
        ("a: [1\n", "not YAML"),
        ("max_in_fligth: 2\n", "'max_in_fligth' is not a setting"),
        ("keep_last: 2\n", "keep_last: Accelerate counts its checkpoints; use total_limit"),
        ("max_in_flight: many\n", "max_in_flight='many'"),
        ("audit: 3\n", "expected true or false"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "lazyckpt.yaml"
    file.write_text(text)
    result = config("--config-file", file, answers="\n" * 5)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and problem in line and str(file) in line
    assert file.read_text() == text


def test_beside_accelerates_own_file_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    monkeypatch.setattr(config_args, "cache_dir", str(tmp_path))
    assert config("--default").exit_code == 0
    assert (tmp_path / "lazyckpt.yaml").is_file()
    assert Path(config_args.default_yaml_config_file).name == "default_config.yaml"


class Interrupted(io.StringIO):
    def readline(self, _: int | None = -1, /) -> str:
        raise KeyboardInterrupt


def test_no_answer_ends_it_as_it_ends_all_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lazyckpt.yaml"
    ended = config("--config-file", file, answers="yes\n")
    assert ended.exit_code == 2 and "error: the input ended" in ended.stderr
    monkeypatch.setattr(sys, "stdin", Interrupted())
    with pytest.raises(SystemExit) as interrupted:
        app(["accelerate", "config", "--config-file", str(file)])
    assert interrupted.value.code == 130
    assert not file.exists()
